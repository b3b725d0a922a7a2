"""Due dates of the requests that a gateway holds, made for all of them together."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from fixtures.cluster_views import make_query, make_stats
from msgspec import structs

from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.policies.objective import RENEWAL, LatencyObjective, PrefillTime
from shoal_cluster.policies.pending import PendingQueue
from shoal_cluster.policies.pending_request import PendingRequest, QueuePlace
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.policies.view import ClusterView
from shoal_cluster.policies.wishes import Wish
from shoal_cluster.serve.feed_messages import ToldWish
from shoal_replica.prefix_cache import hash_blocks

CONFIG = HoldConfig(objective=LatencyObjective(), prefill=PrefillTime(tokens_per_s=1000.0, pair_s=0.0))
BUSY = make_stats(
    num_total_blocks=4000, num_running=1, step_s=0.1, num_waiting_tokens=600, token_s=0.001, max_num_seqs=64
)
PREFIX = hash_blocks(range(3200), 16)


def view_of(**stats: Any) -> ClusterView:
    view = ClusterView(max_index_entries=4096)
    for replica_id, its_stats in stats.items():
        view.join(replica_id)
        view.apply_snapshot(replica_id, its_stats, (), 0.0)
    return view


def pending(request_id: str, num_tokens: int, arrival_s: float = 0.0, **more: Any) -> PendingRequest:
    query = make_query(
        num_tokens,
        request_id=request_id,
        block_hashes=more.pop("hashes", ()),
        excluded=more.pop("excluded", frozenset()),
    )
    return PendingRequest(query=query, arrival_s=arrival_s, **more)


def look(queue: PendingQueue, view: ClusterView, now: float) -> None:
    """Look at all held requests, though no replica can start any."""
    queue._has_unplanned = True
    assert queue.next(view, RouteWeights(), now, Random(0)) is None


def place(queue: PendingQueue, request_id: str, now: float) -> QueuePlace:
    (its,), _ = queue.up_to(request_id, now, 1)
    return its


def in_time(queue: PendingQueue, now: float = 0.0) -> set[str]:
    """The requests that are due within their objective."""
    return {
        one.query.request_id
        for one in queue
        if now + place(queue, one.query.request_id, now).due_in_s
        <= one.arrival_s + CONFIG.objective.due_in_s(one.query.num_prompt_tokens / 1000) + 1e-6
    }


def test_gateways_put_off_the_same_requests() -> None:
    """Of equal prompts, those that arrived last, whichever gateway holds them."""
    alone, view = PendingQueue(CONFIG), view_of(only=BUSY)
    queues, views = (
        [PendingQueue(CONFIG, is_one_of_many=True) for _ in range(2)],
        [view_of(only=BUSY) for _ in range(2)],
    )
    for number in range(12):
        request = pending(f"r{number:02}", 500, arrival_s=-0.01 * (11 - number))
        alone.push(request)
        queues[number % 2].push(request)
    look(alone, view, 0.0)
    for turn in range(4):
        for queue, its_view in zip(queues, views, strict=True):
            look(queue, its_view, 0.11 * turn)
        for its_view, other in zip(views, reversed(queues), strict=True):
            its_view.set_wishes("only", other.wishes().get("only", ()))
    kept = in_time(queues[0], 0.33) | in_time(queues[1], 0.33)
    assert kept == {f"r{number:02}" for number in range(len(kept))}
    assert 0 < len(kept) <= len(in_time(alone)) < 12


@pytest.mark.parametrize("is_lost", [True, False])
def test_what_another_gateway_has_lost_is_put_off_first(is_lost: bool) -> None:
    """Three prompts of 800 tokens and this one cannot all be computed by 3.8 s, when it is due."""
    view, queue = view_of(only=BUSY), PendingQueue(CONFIG, is_one_of_many=True)
    queue.push(pending("mine", 900))
    queue.push(pending("last", 100))
    length_s = 3.6
    ago_s = length_s * RENEWAL if is_lost else length_s
    dues_s = (1.9, 2.7, 3.5)
    view.set_wishes("only", [Wish((0, 0, d), 50, 800, arrival_s=d - ago_s, length_s=length_s) for d in dues_s])
    look(queue, view, 0.0)
    assert ("mine" in in_time(queue)) == is_lost


@pytest.mark.parametrize("seed", range(20))
def test_gateways_make_the_dates_that_one_would_make(seed: int) -> None:
    """For lost requests and others alike. Each gateway knows the other's only by the wishes it is told."""
    rng = Random(seed)
    alone, view = PendingQueue(CONFIG), view_of(only=BUSY)
    queues = [PendingQueue(CONFIG, is_one_of_many=True) for _ in range(2)]
    views = [view_of(only=BUSY) for _ in range(2)]
    for number in range(16):
        arrival_s = -rng.choice([rng.random(), 10.0 * rng.random()])
        request = pending(f"r{number:02}", rng.randrange(1, 40) * 50, arrival_s=arrival_s)
        alone.push(request)
        queues[number % 2].push(request)
    for turn in range(6):
        now = 0.11 * turn
        for queue, its_view in zip(queues, views, strict=True):
            look(queue, its_view, now)
        for its_view, other in zip(views, reversed(queues), strict=True):
            its_view.set_wishes("only", [ToldWish.at(wish, now).wish(now) for wish in other.wishes().get("only", ())])
        look(alone, view, now)
    assert in_time(queues[0], now) | in_time(queues[1], now) == in_time(alone, now)


def test_a_newcomer_counts_with_what_it_has_to_compute() -> None:
    """3200 cached tokens leave it one to compute, except where the replica that has them is excluded: then the others
    take until 4.9 s, and its own prompt until after its 8.4.
    """
    others = {"a": 2600, "b": 2600, "c": 2600, "d": 2000}
    for excluded, is_cached_in_time in ((frozenset[str](), True), (frozenset({"owner"}), False)):
        view = view_of(owner=BUSY, other=BUSY)
        view.apply_snapshot("owner", BUSY, PREFIX, 0.0)
        queue = PendingQueue(HoldConfig(objective=CONFIG.objective, prefill=CONFIG.prefill, max_considered=1))
        queue.push(pending("cached", 3200, hashes=PREFIX, excluded=excluded))
        for name, num_tokens in others.items():
            queue.push(pending(name, num_tokens))
        look(queue, view, 0.0)
        assert in_time(queue) == others.keys() | ({"cached"} if is_cached_in_time else set())


def test_what_is_cached_meanwhile_makes_a_prompt_shorter() -> None:
    """Even if it has been put off and is not among the requests considered."""
    view = view_of(only=BUSY)
    queue = PendingQueue(HoldConfig(objective=CONFIG.objective, prefill=CONFIG.prefill, max_considered=1))
    for number in range(4):
        queue.push(pending(f"short{number}", 500))
    queue.push(pending("long", 3200, arrival_s=-3.5, hashes=PREFIX))
    dues_s = []
    for now in (0.0, 0.5, 1.1):
        look(queue, view, now)
        dues_s.append(now + place(queue, "long", now).due_in_s)
        view.apply_update("only", BUSY, PREFIX, (), now)
    assert dues_s[0] == dues_s[1] == 4 * 8.4 - 3.5, "sizes are looked up every second"
    assert dues_s[2] < 4 * 2.1 - 3.5


def test_who_is_left_alone_gets_its_date_back() -> None:
    view, queue = view_of(only=BUSY), PendingQueue(CONFIG)
    queue.push(pending("long", 1500, arrival_s=-2.0))
    for number in range(5):
        queue.push(pending(f"short{number}", 400))
    look(queue, view, 0.0)
    assert "long" not in in_time(queue)
    for number in range(5):
        queue.remove(f"short{number}")
    view.apply_update("only", structs.replace(BUSY, num_waiting_tokens=510), (), (), 0.1)
    look(queue, view, 0.11)
    assert in_time(queue, 0.11) == {"long"}


def test_nobody_is_put_off_for_those_of_less_priority() -> None:
    view, queue = view_of(only=BUSY), PendingQueue(CONFIG)
    queue.push(pending("first", 2000, arrival_s=-2.9, priority=-1))
    for number in range(8):
        queue.push(pending(f"other{number}", 400))
    look(queue, view, 0.0)
    assert "first" in in_time(queue)
    assert len(in_time(queue)) < 9


def test_what_is_put_off_is_admitted_by_what_comes_before_its_objective() -> None:
    """Requests due before its present due date are lost as well, and do not fill its queue."""
    view, queue = view_of(only=BUSY), PendingQueue(CONFIG)
    for number in range(20):
        queue.push(pending(f"old{number}", 1000, arrival_s=-10.0))
    for number in range(6):
        queue.push(pending(f"new{number}", 500))
    look(queue, view, 0.0)
    assert "new5" not in in_time(queue)
    assert queue.before("new5")[0] <= 6 * 500


def test_with_thousands_held_a_new_pace_counts_from_the_next_time_that_dates_are_made_for_all() -> None:
    """A look then does not make thousands of dates again and again, and the pace is not forgotten."""
    view, queue = view_of(only=BUSY), PendingQueue(CONFIG)
    for number in range(3000):
        queue.push(pending(f"r{number}", 500, arrival_s=number / 1e6))

    def due_s(now: float, token_s: float) -> float:
        view.apply_update("only", structs.replace(BUSY, token_s=token_s), (), (), now)
        look(queue, view, now)
        return now + place(queue, "r2999", now).due_in_s

    first, second, third = due_s(0.0, 0.002), due_s(0.15, 0.0005), due_s(0.35, 0.0005)
    assert second == first
    assert third < second
