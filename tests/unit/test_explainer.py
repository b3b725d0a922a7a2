"""Explain asks other gateways when this one keeps nothing, and says when one of them does not answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fixtures.cluster_views import make_query, make_row

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.routing import RouteRecord, RouteWeights, decide
from shoal_cluster.serve import explainer
from shoal_cluster.serve.explainer import Explainer
from shoal_cluster.serve.explanation import Explanation, Refusal
from shoal_cluster.serve.explanation_codec import explanation_to_bytes
from shoal_cluster.serve.route_log import RouteLog
from shoal_replica.errors import NotFound, Unavailable


def record(time_s: float) -> RouteRecord:
    candidates = Candidates.of([make_row("a"), make_row("b")])
    return decide(make_query(request_id="call#0"), candidates, RouteWeights(), seed=0, time_s=time_s)


def keeping(*records: RouteRecord) -> bytes:
    """What a gateway with these answers."""
    log = RouteLog()
    for kept in records:
        log.add(kept)
    return Explainer(log.of_request, None).told("call")


class Gateways:
    """Serve's handle of all gateways, as far as it is used; None never answers."""

    def __init__(self, *answers: bytes | Exception | None) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str]] = []

    def broadcast(self, method: str, request_id: str) -> Gateways:
        self.asked.append((method, request_id))
        return self

    async def results_async(self, *, return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        if None in self.answers:
            await asyncio.Event().wait()
        return list(self.answers)


def asking(gateways: Gateways, *kept: RouteRecord) -> Explainer:
    log = RouteLog()
    for each in kept:
        log.add(each)
    return Explainer(log.of_request, lambda: gateways)  # type: ignore[arg-type,return-value]


async def test_what_is_kept_here_is_told_without_asking() -> None:
    gateways = Gateways()
    assert await asking(gateways, record(1.0)).explain("call") == Explanation((record(1.0),))
    assert gateways.asked == []


async def test_what_others_keep_is_told_oldest_first() -> None:
    gateways = Gateways(keeping(record(2.0)), RuntimeError("this one has died"), keeping(), keeping(record(1.0)))
    told = await asking(gateways).explain("call")
    assert [each.time_s for each in told.records] == [1.0, 2.0]
    assert all(each.replay() == each.decision for each in told.records)
    assert gateways.asked == [("told_of_request", "call")]


async def test_where_a_refusal_is_all_that_is_known_others_may_know_of_another_try() -> None:
    refusal = Refusal(0.5, "call#0", "full", 1.0, ())
    log = RouteLog()
    log.refuse(refusal)
    own = explanation_to_bytes(log.of_request("call"))
    for others, records in ((Gateways(own, keeping(record(1.0))), 1), (Gateways(RuntimeError("not ready")), 0)):
        told = await Explainer(log.of_request, lambda others=others: others).explain("call")  # type: ignore[misc]
        assert (told.refusals, len(told.records)) == ((refusal,), records)


async def test_nobody_keeps_it() -> None:
    for one in (asking(Gateways(keeping(), keeping())), Explainer(RouteLog().of_request, None)):
        with pytest.raises(NotFound, match="no routing decision is kept for 'call'"):
            await one.explain("call")


@pytest.mark.parametrize("silent", [None, RuntimeError("this one has died")])
async def test_a_gateway_that_does_not_answer_may_keep_it(
    silent: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explainer, "ANSWER_TIMEOUT_S", 0.05)
    with pytest.raises(Unavailable, match="another gateway may know of 'call'"):
        await asking(Gateways(keeping(), silent)).explain("call")
