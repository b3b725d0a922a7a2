"""Why a request went where it did, waits, or was refused."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from shoal_cluster.policies.admission import AdmissionRecord
from shoal_cluster.policies.pending_request import QueuePlace
from shoal_cluster.policies.route_record import RouteRecord
from shoal_replica.errors import ResourceExhausted, ShoalError

MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that was refused or given up. ``time_s`` is Unix time; ``terms`` are the numbers that decided it, or
    how far the request had come. ``retry_after_s`` is 0 where it is not known when to try again. ``record`` is set if
    admission refused it.
    """

    time_s: float
    request_id: str
    reason: str
    retry_after_s: float
    terms: tuple[tuple[str, float], ...]
    record: AdmissionRecord | None = None

    @classmethod
    def of(
        cls,
        error: ShoalError,
        time_s: float,
        request_id: str,
        terms: tuple[tuple[str, float], ...],
        record: AdmissionRecord | None = None,
    ) -> Refusal:
        """From the error that its client was told."""
        retry_after_s = error.retry_after_s if isinstance(error, ResourceExhausted) else None
        return cls(time_s, request_id, str(error), retry_after_s or 0.0, terms, record)

    @property
    def text(self) -> str:
        terms = ", ".join(f"{name} {value:g}" for name, value in self.terms)
        ended = f"refused, to be tried again after {self.retry_after_s:.1f} s" if self.retry_after_s else "given up"
        return f"{self.request_id}: {ended}: {self.reason} ({terms})"


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """A request that its gateway holds, ``number`` of ``num_held`` by urgency. ``queue`` has the last few requests
    ahead of it, then itself, each with the replica that the last look (a pass over the queue) planned it for.
    """

    time_s: float
    request_id: str
    waited_s: float
    number: int
    num_held: int
    queue: tuple[QueuePlace, ...]

    @property
    def text(self) -> str:
        *before, its = self.queue
        where = f"for {its.replica_id}" if its.replica_id else "for any replica"
        return (
            f"{self.request_id}: held for {self.waited_s:.2f} s, number {self.number} of {self.num_held}, "
            f"waits {where}, due in {its.due_in_s:.2f} s{_named('; before it', before, self.number - 1)}"
        )


@dataclass(frozen=True, slots=True)
class SentBy:
    """The look that sent a request. ``queue`` ends with it; those ahead of it stayed, each for the replica it names."""

    request_id: str
    queue: tuple[QueuePlace, ...]

    @property
    def text(self) -> str:
        *before, its = self.queue
        stayed = _named("; more urgent, but better off waiting", before, len(before))
        return f"{self.request_id}: sent to {its.replica_id}, due in {its.due_in_s:.2f} s{stayed}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """All that gateways keep of a client's request, each part oldest first. ``looks`` are those of the requests in
    ``records``; ``num_left_off`` counts older records and refusals that did not fit into a message.
    """

    records: tuple[RouteRecord, ...] = ()
    looks: tuple[SentBy, ...] = ()
    held: tuple[HeldRequest, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    num_left_off: int = 0

    def __bool__(self) -> bool:
        return bool(self.records or self.held or self.refusals)

    @property
    def left_off(self) -> str:
        """A sentence about what was left off; empty if nothing was."""
        return f"{self.num_left_off} older decisions are left off: a message has no room" if self.num_left_off else ""

    @classmethod
    def of(cls, several: Sequence[Explanation]) -> Explanation:
        """Several explanations combined."""
        return cls(
            records=tuple(sorted((r for each in several for r in each.records), key=lambda record: record.time_s)),
            looks=tuple(look for each in several for look in each.looks),
            held=tuple(held for each in several for held in each.held),
            refusals=tuple(sorted((r for each in several for r in each.refusals), key=lambda refusal: refusal.time_s)),
            num_left_off=sum(each.num_left_off for each in several),
        )


def clock(time_s: float) -> str:
    """``time_s`` (Unix time) as local wall-clock time."""
    return time.strftime("%H:%M:%S", time.localtime(time_s))


def _named(what: str, places: Sequence[QueuePlace], num_all: int) -> str:
    names = [f"{place.request_id} (for {place.replica_id or 'any replica'})" for place in places[-MAX_NAMED:]]
    if num_all > len(names):
        names.insert(0, f"{num_all - len(names)} more")
    return f"{what}: {', '.join(names)}" if names else ""
