"""Explain asks the other gateways if this one has no record, and says if one of them does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import pytest
from fixtures.cluster_views import make_query, make_row

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.route_record import RouteRecord, decide
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.serve import explainer
from shoal_cluster.serve.explainer import Explainer
from shoal_cluster.serve.explanation import Explanation, Refusal
from shoal_cluster.serve.explanation_codec import explanation_from_bytes, explanation_to_bytes
from shoal_cluster.serve.route_log import RouteLog
from shoal_replica.errors import NotFound, Unavailable


def record(time_s: float) -> RouteRecord:
    candidates = Candidates.of([make_row("a"), make_row("b")])
    return decide(make_query(request_id="call#0"), candidates, RouteWeights(), seed=0, time_s=time_s)


def keeping(*records: RouteRecord) -> bytes:
    """The answer of a gateway that keeps these records."""
    log = RouteLog()
    for kept in records:
        log.add(kept)
    return explanation_to_bytes(log.of_request("call"))


class Gateways:
    """The running gateways. Bytes are an answer, errors are raised, None never answers, a list holds a raw answer."""

    def __init__(self, failure: Unavailable | None = None, **answers: bytes | Exception | list[bytes] | None) -> None:
        self.answers = answers
        self.failure = failure  # raised when their names are asked for
        self.asked: list[str] = []
        self.is_waited_for = False

    async def ask(self, request_id: str) -> list[Coroutine[object, object, tuple[str, bytes]]]:
        self.asked.append(request_id)
        return [self._answer(name) for name in self.answers]

    async def _answer(self, name: str) -> tuple[str, bytes]:
        match self.answers[name]:
            case Exception() as error:
                raise error
            case None:
                self.is_waited_for = True
                try:
                    await asyncio.Event().wait()
                finally:
                    self.is_waited_for = False
            case bytes() as told:
                return name, told
            case [told]:
                return told  # type: ignore[return-value]
        raise AssertionError("it never ends")

    async def names(self) -> list[str]:
        if self.failure is not None:
            raise self.failure
        return [*self.answers, "own"]


def asking(gateways: Gateways | None, *kept: RouteRecord, refused: Refusal | None = None) -> Explainer:
    log = RouteLog()
    for each in kept:
        log.add(each)
    if refused is not None:
        log.refuse(refused)
    return Explainer("own", log.of_request, gateways)


async def test_what_is_kept_here_is_told_without_asking() -> None:
    gateways = Gateways()
    assert await asking(gateways, record(1.0)).explain("call") == Explanation((record(1.0),))
    assert gateways.asked == []


async def test_what_others_keep_is_told_oldest_first() -> None:
    gateways = Gateways(
        a=keeping(record(2.0)), b=RuntimeError("this one has died"), c=keeping(), d=keeping(record(1.0))
    )
    told = await asking(gateways).explain("call")
    assert [each.time_s for each in told.records] == [1.0, 2.0]
    assert all(each.replay() == each.decision for each in told.records)
    assert gateways.asked == ["call"]


def test_a_gateway_answers_with_its_name() -> None:
    assert asking(None, record(1.0)).told("call") == ("own", keeping(record(1.0)))


async def test_where_a_refusal_is_all_that_is_known_others_may_know_of_another_try() -> None:
    refusal = Refusal(0.5, "call#0", "full", 1.0, ())
    _, own = asking(None, refused=refusal).told("call")
    others = Gateways(own=own, other=keeping(record(1.0))), Gateways(own=own, other=RuntimeError("not ready"))
    for gateways, num_records in zip(others, (1, 0), strict=True):
        told = await asking(gateways, refused=refusal).explain("call")
        assert (told.refusals, len(told.records)) == ((refusal,), num_records)


async def test_nobody_keeps_it() -> None:
    for one in (asking(Gateways(own=keeping(), other=keeping())), asking(None)):
        with pytest.raises(NotFound, match="no routing decision is kept for 'call'"):
            await one.explain("call")


async def test_a_gateway_that_hangs_keeps_nobodys_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explainer, "GATEWAY_ANSWER_TIMEOUT_S", 0.05)
    gateways = Gateways(own=keeping(), hangs=None, other=keeping(record(1.0)))
    assert (await asking(gateways).explain("call")).records == (record(1.0),)
    assert not gateways.is_waited_for


SILENT = [
    (Gateways(own=keeping(), hangs=None), "gateway hangs"),
    (Gateways(own=keeping(), died=RuntimeError("this one has died"), other=keeping()), "gateway died"),
    (Gateways(own=keeping(), hangs=None, died=RuntimeError(), other=keeping()), "gateway died or hangs"),
    (Gateways(own=keeping(), older=[keeping()]), "gateway older"),  # an older release answers without its name
    (Gateways(Unavailable("nor does Serve answer"), own=keeping(), hangs=None), "another gateway"),
    (Gateways(), "another gateway"),
]


@pytest.mark.parametrize(("gateways", "who"), SILENT)
async def test_a_gateway_that_does_not_answer_may_keep_it(
    gateways: Gateways, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explainer, "GATEWAY_ANSWER_TIMEOUT_S", 0.05)
    with pytest.raises(Unavailable, match=f"^request_id: {who} may know of 'call' and does not answer now$"):
        await asking(gateways).explain("call")
    assert not gateways.is_waited_for


async def test_what_does_not_reach_the_others_may_have_been_told_here() -> None:
    class Unreached(Gateways):
        async def ask(self, request_id: str) -> list[Coroutine[object, object, tuple[str, bytes]]]:
            raise Unavailable("Serve does not reach the other gateways")

    with pytest.raises(Unavailable, match="gateway other may know of 'call'"):
        await asking(Unreached(other=keeping(record(1.0)))).explain("call")
    refusal = Refusal(0.5, "call", "full", 1.0, ())
    assert (await asking(Unreached(), refused=refusal).explain("call")).refusals == (refusal,)


def test_of_more_than_a_message_holds_the_newest_are_told_and_how_many_are_left_off() -> None:
    many = Candidates.of([make_row(f"replica-{number:03}") for number in range(200)])
    records = tuple(
        decide(make_query(request_id=f"call#{i}"), many, RouteWeights(), seed=i, time_s=float(i)) for i in range(60)
    )
    raw = explanation_to_bytes(Explanation(records, num_left_off=3))
    assert len(raw) < 4 * 2**20
    told = explanation_from_bytes(raw)
    num_told = len(told.records)
    assert 10 < num_told < 60
    assert told.records == records[-num_told:]
    assert told.num_left_off == 60 - num_told + 3
    assert told.left_off.startswith(f"{told.num_left_off} older decisions are left off")
    assert explanation_from_bytes(explanation_to_bytes(Explanation(records[:2]))) == Explanation(records[:2])
    assert Explanation.of([told, told]).num_left_off == 2 * told.num_left_off


@pytest.mark.parametrize("prefix", ["", "chatcmpl-", "cmpl-", "resp_", "msg_"])
async def test_the_id_of_an_answer_by_http_is_understood(prefix: str) -> None:
    log, gateways = RouteLog(), Gateways(other=keeping())
    log.add(record(1.0))
    assert (await Explainer("own", log.of_request, None).explain(f"{prefix}call")).records == (record(1.0),)
    with pytest.raises(NotFound, match="'other'"):
        await Explainer("own", log.of_request, gateways).explain(f"{prefix}other")
    assert gateways.asked == [f"{prefix}other", "other"][: 1 + bool(prefix)]


async def test_the_id_of_an_openai_answer_of_this_gateway_is_not_asked_of_others() -> None:
    log, gateways = RouteLog(), Gateways(silent=None)
    log.add(record(1.0))
    assert (await Explainer("own", log.of_request, gateways).explain("chatcmpl-call")).records == (record(1.0),)
    assert not gateways.asked
