"""What can wait until after a call: in order, a few at a time, all of it, and none of it before."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from shoal_cluster.serve import after_calls
from shoal_cluster.serve.after_calls import AT_ONCE, MOST, AfterCalls
from shoal_cluster.serve.call_record import CallRecord, RequestOutcome

RECORD = CallRecord(request_id="0", outcome=RequestOutcome.FINISHED, time_s=0.0, arrived_s=0.0, ended_s=1.0)
RECORDS = [replace(RECORD, request_id=str(i)) for i in range(3 * AT_ONCE + 1)]


@pytest.fixture
def is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is handed on by time within a test."""
    monkeypatch.setattr(after_calls, "DELAY_S", 3600.0)


async def test_all_are_handed_on_in_order_a_few_at_a_time() -> None:
    heard: list[CallRecord] = []
    turns: list[int] = []
    seen = asyncio.Event()

    def hear(record: CallRecord) -> None:
        heard.append(record)
        if len(heard) == len(RECORDS):
            seen.set()

    after = AfterCalls(hear, lambda _: turns.append(len(heard)))
    for record in RECORDS:
        after.take(record)
    assert heard == []
    loop, passes = asyncio.get_running_loop(), 0

    def count() -> None:
        nonlocal passes
        passes += 1
        if not seen.is_set():
            loop.call_soon(count)

    loop.call_soon(count)
    await asyncio.wait_for(seen.wait(), 30)
    assert heard == RECORDS
    assert turns == list(range(1, len(RECORDS) + 1))  # both listeners hear of a call before the next
    assert passes > len(RECORDS) // AT_ONCE  # the loop had turns in between


@pytest.mark.usefixtures("is_slow")
async def test_finishing_hands_on_what_waits() -> None:
    heard: list[CallRecord] = []
    after = AfterCalls(heard.append)
    for record in RECORDS:
        after.take(record)
    await asyncio.sleep(0)
    assert heard == []
    after.finish()
    assert heard == RECORDS
    after.finish()
    assert heard == RECORDS


@pytest.mark.parametrize("failing", ["0", RECORDS[-2].request_id])
async def test_a_listener_that_fails_holds_up_nobody(failing: str, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[CallRecord] = []

    def fail(record: CallRecord) -> None:
        if record.request_id == failing:
            raise OSError("the log's disk is full")

    after = AfterCalls(fail, heard.append)
    for record in RECORDS:
        after.take(record)
    after.finish()
    assert heard == RECORDS
    (line,) = caplog.records
    assert (line.getMessage(), line.__dict__["fields"]["error"]) == ("a call's record was not taken", "OSError")


@pytest.mark.usefixtures("is_slow")
async def test_those_that_wait_do_not_become_ever_more() -> None:
    heard: list[CallRecord] = []
    after = AfterCalls(heard.append)
    for _ in range(10 * MOST):
        after.take(RECORD)
    assert 9 * MOST <= len(heard) <= 10 * MOST
    after.finish()
    assert len(heard) == 10 * MOST
