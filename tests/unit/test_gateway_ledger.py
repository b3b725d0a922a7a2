"""The gateway's books without replicas."""

from __future__ import annotations

import time
from random import Random

from fixtures.cluster_views import make_query, make_stats

from shoal_cluster.policies.objective import LatencyObjective, PrefillTime
from shoal_cluster.policies.pending import HoldConfig, PendingQueue, PendingRequest
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.serve.gateway_ledger import GatewayLedger
from shoal_cluster.serve.sent import Follower

CONFIG = HoldConfig(objective=LatencyObjective(), prefill=PrefillTime(tokens_per_s=1000.0, pair_s=0.0))
YIELDING = make_stats(num_waiting_tokens=10_000, max_num_batched_tokens=2048, due_tokens=(*[0] * 4, *[10_000] * 3))


async def test_where_a_request_goes_that_nobody_took_is_priced_by_what_waits_now() -> None:
    """What yielded to it when it was sent has been computed meanwhile."""
    ledger = GatewayLedger("gateway", RouteWeights())
    ledger.view.join("one")
    ledger.view.apply_snapshot("one", YIELDING, (), 0.0)
    queue = PendingQueue(CONFIG)
    for request_id, num_tokens in (("heavy", 800), ("heavy2", 800), ("light", 160)):
        query = make_query(num_tokens, request_id=request_id, num_blocks_needed=11)
        queue.push(PendingRequest(query=query, arrival_s=0.0, tenant=request_id.rstrip("2")))
        ledger.follow(request_id, Follower(lambda *_: None, lambda *_: None, lambda *_: None, lambda: None))
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
