"""The gateway's ledger, without replicas."""

from __future__ import annotations

import time
from random import Random

from fixtures.cluster_views import make_query, make_stats

from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.policies.objective import LatencyObjective, PrefillTime
from shoal_cluster.policies.pending import PendingQueue
from shoal_cluster.policies.pending_request import PendingRequest
from shoal_cluster.policies.prefix_index import DEFAULT_MAX_ENTRIES
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.serve.feed_messages import Update
from shoal_cluster.serve.gateway_ledger import GatewayLedger
from shoal_cluster.serve.sent_requests import Follower

CONFIG = HoldConfig(objective=LatencyObjective(), prefill=PrefillTime(tokens_per_s=1000.0, pair_s=0.0))
YIELDING = make_stats(num_waiting_tokens=10_000, max_num_batched_tokens=2048, due_tokens=(*[0] * 4, *[10_000] * 3))


async def test_where_a_request_goes_that_nobody_took_is_priced_by_what_waits_now() -> None:
    """The prompts that would have yielded to it when it was sent have been computed meanwhile."""
    ledger = GatewayLedger("gateway", RouteWeights())
    ledger.view.join("one")
    ledger.view.apply_snapshot("one", YIELDING, (), 0.0)
    queue = PendingQueue(CONFIG)
    for request_id, num_tokens in (("heavy", 800), ("heavy2", 800), ("light", 160)):
        query = make_query(num_tokens, request_id=request_id, num_blocks_needed=11)
        queue.push(PendingRequest(query=query, arrival_s=0.0, tenant=request_id.rstrip("2")))
        ledger.follow(request_id, Follower())
        dispatch = queue.next(ledger.view, ledger.weights, 0.0, Random(0))
        assert dispatch is not None
        ledger.commit(dispatch)
    assert dict(dispatch.pending.query.passed)["one"] >= 10_000
    assert ledger.ranks("light") == ("one",)
    ledger.view.apply_snapshot("one", make_stats(), (), time.monotonic())
    for request_id in ("heavy", "heavy2"):
        ledger.unfollow(request_id)
    assert ledger.ranks("light") == ("one",), "asked again"
    *_, record = ledger.routes.of_call("light")
    (candidate,) = record.decision.candidates
    assert candidate.score > 0
    assert record.replay() == record.decision
    await ledger.close()


async def test_where_a_rule_is_named_it_places_again_what_nobody_took() -> None:
    ledger = GatewayLedger("gateway", RouteWeights())
    ledger.use_rule("round_robin")
    assert ledger.named is not None
    for replica_id in ("one", "two", "three"):
        ledger.view.join(replica_id)
        ledger.view.apply_snapshot(replica_id, make_stats(), (), time.monotonic())
    ledger.follow("r", Follower())
    pending = PendingRequest(query=make_query(100, request_id="r", num_blocks_needed=7), arrival_s=0.0)
    dispatch = ledger.named.dispatch(pending, ledger.view, ledger.weights, time.monotonic(), Random(0))
    assert dispatch is not None
    ledger.commit(dispatch)
    asked = [ledger.ranks("r")[0] for _ in range(4)]
    assert sorted(asked[:3]) == ["one", "three", "two"], "each in its turn"
    assert asked[3] == asked[0]
    records = ledger.routes.of_call("r")
    assert len(records) == 4
    assert all(record.rule is not None and record.rule.routing == "round_robin" for record in records)
    assert all(record.replay() == record.decision for record in records)
    await ledger.close()


async def test_the_index_has_room_for_what_was_asked() -> None:
    small, usual = (
        GatewayLedger("small", RouteWeights(), max_index_entries=5000),
        GatewayLedger("usual", RouteWeights()),
    )
    assert 5000 <= small.view.index.max_entries < 10_000
    assert usual.view.index.max_entries == DEFAULT_MAX_ENTRIES
    for ledger in (small, usual):
        await ledger.close()


async def test_news_tell_how_slow_replicas_are() -> None:
    ledger = GatewayLedger("gateway", RouteWeights())
    for replica_id, token_s in (("fast", 1e-4), ("slow", 4e-4)):
        ledger.view.join(replica_id)
        ledger.view.apply_snapshot(replica_id, make_stats(full_token_s=token_s), (), time.monotonic())
    ledger.hear("fast", Update(1, None))
    assert [row.slowness for row in ledger.view.replicas_for((), 0.0)] == [1.0, 4.0]
    await ledger.close()
