"""Each published routing rule, tested on a case that its formula decides."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from fixtures.cluster_views import make_query, make_row, make_stats

from shoal_cluster.policies.baselines import ROUTINGS, Routing, place, ray_prefix_affinity
from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.memory import Recollection, RoutingMemory
from shoal_cluster.policies.replica_view import ReplicaView
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.policies.routing import RouteWeights
from shoal_replica.prefix_cache import hash_blocks

PROMPT = RouteQuery(
    request_id="r",
    block_hashes=tuple(hash_blocks(range(160), 16)),
    num_prompt_tokens=160,
    num_blocks_needed=11,
    block_size=16,
)


def ranked(
    routing: Routing, *rows: ReplicaView, memory: RoutingMemory | None = None, seed: int = 0, turn: int = 0
) -> tuple[str, ...]:
    candidates = Candidates.of(rows)
    recalled = memory.recall(PROMPT, candidates) if memory else Recollection.nothing(len(rows), turn)
    return place(routing, PROMPT, candidates, RouteWeights(), Random(seed), recalled).ranked


def best(routing: Routing, *rows: ReplicaView, memory: RoutingMemory | None = None, seed: int = 0) -> str:
    return ranked(routing, *rows, memory=memory, seed=seed)[0]


def remembering(*replica_ids: str, query: RouteQuery = PROMPT) -> RoutingMemory:
    memory = RoutingMemory()
    for replica_id in replica_ids:
        memory.note(query, replica_id, with_blocks=True)
    return memory


def busy(replica_id: str, num_running: int = 0, num_waiting: int = 0) -> ReplicaView:
    stats = make_stats(num_running=num_running, num_waiting=num_waiting, max_num_seqs=1000)
    return make_row(replica_id, stats=stats)


def test_round_robin_takes_each_in_turn_and_skips_the_drained() -> None:
    rows = [make_row("a"), make_row("b", stats=make_stats(draining=True)), make_row("c")]
    first = [ranked("round_robin", *rows, turn=turn)[0] for turn in range(6)]
    assert first == ["a", "c", "a", "c", "a", "c"], "the one after it has no more than its turn"


def test_counting_rules_know_only_their_own_signal() -> None:
    light = make_row("light", stats=make_stats(num_running=1, num_free_blocks=20))
    roomy = make_row("roomy", stats=make_stats(num_running=5, num_free_blocks=90, num_waiting_tokens=9999))
    for seed in range(5):
        assert best("least_requests", light, roomy, seed=seed) == "light"
        assert best("power_of_two", light, roomy, seed=seed) == "light"
        assert best("most_free_blocks", light, roomy, seed=seed) == "roomy"


def test_power_of_two_takes_the_lighter_of_two_drawn() -> None:
    """The lightest of four wins whenever it is drawn, which is half of the time; the heaviest never wins."""
    rows = [busy("a", 0), busy("b", 1), busy("c", 2), busy("d", 3)]
    wins = Counter(best("power_of_two", *rows, seed=seed) for seed in range(400))
    assert wins["d"] == 0
    assert wins["a"] == pytest.approx(200, abs=40)


def test_ray_follows_what_was_sent_whatever_the_queues_unless_given_a_threshold() -> None:
    memory = remembering("owner")
    assert best("ray_prefix_affinity", busy("owner", 900), busy("other"), memory=memory) == "owner"
    for num_running, winner in ((10, "owner"), (11, "other")):
        candidates = Candidates.of([busy("owner", num_running), busy("other")])
        costs = ray_prefix_affinity(PROMPT, candidates, memory.recall(PROMPT, candidates), Random(0), 10)
        assert candidates.replica_ids[int(costs.cost.argmin())] == winner


def test_ray_sends_what_it_has_not_seen_to_the_smallest_tree() -> None:
    another = make_query(block_hashes=tuple(hash_blocks(range(500, 660), 16)))
    memory = remembering("known", query=another)
    assert best("ray_prefix_affinity", busy("known"), busy("new", 5), memory=memory) == "new"


@pytest.mark.parametrize(("num_sent", "winner"), [(3, "small"), (4, "owner")])
def test_sglang_follows_a_match_of_more_than_three_tenths(num_sent: int, winner: str) -> None:
    """A match of exactly three tenths is not followed: the rule asks for more."""
    memory = remembering("owner", query=make_query(16 * num_sent, block_hashes=PROMPT.block_hashes[:num_sent]))
    assert len(PROMPT.block_hashes) == 10
    assert best("sglang_cache_aware", busy("owner"), busy("small"), memory=memory) == winner


def test_sglang_leaves_affinity_only_far_out_of_balance() -> None:
    memory = remembering("owner")
    assert best("sglang_cache_aware", busy("owner", 64), busy("other"), memory=memory) == "owner"
    assert best("sglang_cache_aware", busy("owner", 65), busy("other"), memory=memory) == "other"
    assert best("sglang_cache_aware", busy("owner", 200), busy("other", 134), memory=memory) == "owner"


@pytest.mark.parametrize(
    ("other", "winner"),
    [
        ({"num_matched_blocks": 7}, "owner"),  # 0.6 for three more blocks of ten
        ({"stats": make_stats(num_free_blocks=100)}, "owner"),  # 2.0 against 0.5 for free blocks
        ({"num_matched_blocks": 8, "stats": make_stats(num_free_blocks=100)}, "other"),  # 0.4 against 0.5
    ],
)
def test_llmd_weighs_prefix_twice(other: dict[str, object], winner: str) -> None:
    owner = make_row("owner", num_matched_blocks=10, stats=make_stats(num_free_blocks=50))
    fields = {"stats": make_stats(num_free_blocks=50), **other}
    assert best("llmd_precise", owner, make_row("other", **fields)) == winner


def test_llmd_counts_the_queue_between_longest_and_shortest() -> None:
    owner = busy("owner", num_waiting=1)
    other = make_row("other", num_matched_blocks=4, stats=make_stats(num_waiting=2))
    assert best("llmd_precise", owner, other) == "owner"  # 1.0 for the shorter queue against 0.8 for the prefix


def test_dynamo_adds_blocks_to_prefill_and_blocks_that_decode() -> None:
    """Of ten blocks six are cached there, which are not computed; kept by no running request, they are added all the
    same.
    """
    idle = make_row("idle", stats=make_stats(num_free_blocks=100))
    for num_held, expected in ((5, "cached"), (7, "idle")):
        cached = make_row("cached", num_matched_blocks=6, stats=make_stats(num_free_blocks=100 - num_held))
        assert best("dynamo_linear", cached, idle) == expected


def test_memory_forgets_a_replica_that_left() -> None:
    memory = remembering("a", "b")
    memory.forget("a")
    recalled = memory.recall(PROMPT, Candidates.of([make_row("a"), make_row("b")]))
    assert recalled.num_sent_blocks.tolist() == [0, 10]
    assert (recalled.turn, recalled.num_remembered_blocks.tolist()) == (2, [0, 10])


@pytest.mark.parametrize("routing", [name for name in ROUTINGS if name != "predicted_ttft"])
def test_each_rule_names_itself_and_tells_what_its_score_is_made_of(routing: Routing) -> None:
    rows = [busy("a", num_running=3, num_waiting=2), busy("b"), make_row("c", stats=make_stats(draining=True))]
    candidates = Candidates.of(rows)
    memory = remembering("a").recall(PROMPT, candidates)
    decision = place(routing, PROMPT, candidates, RouteWeights(), Random(1), memory)
    assert decision.reason.startswith(f"{routing}: {decision.ranked[0]}: least cost ")
    told = {candidate.replica_id: candidate for candidate in decision.candidates}
    for replica_id in ("a", "b"):
        assert told[replica_id].terms
        assert sum(value for _, value in told[replica_id].terms) == pytest.approx(told[replica_id].score)
    assert told["c"].rejected == "draining"
