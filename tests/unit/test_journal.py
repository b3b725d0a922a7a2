"""The journal: in order, bounded, and short when the same thing happens again and again."""

from __future__ import annotations

from fixtures.fake_serve import serving, streaming
from fixtures.waiting import until

from shoal_cluster.serve.journal import MAX_EVENTS, MAX_TEXT_CHARS, SAME_WITHIN_S, EventKind, Journal
from shoal_replica.testing import make_request


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_events_are_numbered_in_order() -> None:
    journal = Journal(Clock())
    journal.note(EventKind.READY, "one", replica_id="a")
    journal.note(EventKind.LOST, "two", replica_id="a")
    assert [(e.seq, e.kind, e.text, e.count) for e in journal.last(10)] == [
        (1, "ready", "one", 1),
        (2, "lost", "two", 1),
    ]
    assert [e.seq for e in journal.last(1)] == [2]
    assert journal.last(0) == []


def test_refusals_that_follow_each_other_are_counted() -> None:
    clock = Clock()
    journal = Journal(clock)
    for i in range(5):
        journal.note(EventKind.REFUSED, f"no room {i}", request_id=f"r{i}")
        clock.now += 1
    [event] = journal.last(10)
    assert (event.seq, event.time_s, event.count, event.text, event.request_id) == (1, 1000.0, 5, "no room 4", "r4")
    clock.now = 1000.0 + SAME_WITHIN_S
    journal.note(EventKind.REFUSED, "again")
    assert [e.count for e in journal.last(10)] == [5, 1]


def test_kinds_that_alternate_are_counted_apart() -> None:
    journal = Journal(Clock())
    for i in range(5):
        journal.note(EventKind.REFUSED, f"no room {i}")
        journal.note(EventKind.FAILED, f"too late {i}")
    assert [(e.kind, e.text, e.count) for e in journal.last(10)] == [
        ("refused", "no room 4", 5),
        ("failed", "too late 4", 5),
    ]
    journal.note(EventKind.READY, "it is", replica_id="a")
    journal.note(EventKind.REFUSED, "no room 5")
    assert [e.count for e in journal.last(10)] == [5, 5, 1, 1], "what came between stands between"


def test_starts_are_never_merged() -> None:
    journal = Journal(Clock())
    journal.note(EventKind.READY, "it is", replica_id="a")
    journal.note(EventKind.READY, "it is", replica_id="b")
    assert [e.replica_id for e in journal.last(10)] == ["a", "b"]


def test_the_journal_and_its_lines_are_bounded() -> None:
    journal = Journal(Clock())
    for i in range(MAX_EVENTS + 5):
        journal.note(EventKind.READY, "x" * 1000, replica_id=str(i))
    events = journal.last(10 * MAX_EVENTS)
    assert len(events) == MAX_EVENTS
    assert events[-1].seq == MAX_EVENTS + 5
    assert max(len(e.text) for e in events) == MAX_TEXT_CHARS


async def test_a_replica_that_dies_under_a_stream_leaves_its_story() -> None:
    async with serving("a", "b") as serve:
        async with streaming(serve.generation(make_request("call", max_tokens=30))) as chunks:
            await anext(chunks)
            lost = serve.taken_by("call")
            await serve.replicas[lost].die()
            assert [chunk async for chunk in chunks][-1].usage is not None
        serve.leave(lost)
        events = serve.ledger.journal.last(100)
        assert [e.kind for e in events if e.replica_id == lost and e.kind != "resumed"] == ["ready", "lost", "died"]
        assert [(e.request_id, e.count) for e in events if e.kind == "resumed"] == [("call", 1)]


async def test_a_replica_that_leaves_drains_then_stops() -> None:
    async with serving("a", "b") as serve:
        async with streaming(serve.generation(make_request("call", max_tokens=30))) as chunks:
            await anext(chunks)
            left = serve.taken_by("call")
            serve.leave(left)
            kinds = [e.kind for e in serve.ledger.journal.last(100) if e.replica_id == left]
            assert kinds == ["ready", "draining"]
            async for _ in chunks:
                pass
        await until(lambda: left not in serve.ledger._feeds)
        events = [e for e in serve.ledger.journal.last(100) if e.replica_id == left]
        assert [e.kind for e in events] == ["ready", "draining", "stopped"]
        assert "1 requests" in events[1].text
