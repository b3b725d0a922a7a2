"""The latest routing decisions and refusals, bounded in number and memory."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from operator import is_not
from typing import Generic, TypeVar

from shoal_cluster.policies.admission import AdmissionRecord
from shoal_cluster.policies.look import Look
from shoal_cluster.policies.route_query import BYTES_PER_PASSED
from shoal_cluster.policies.route_record import RouteRecord
from shoal_cluster.serve.call import MAX_PROMPTS
from shoal_cluster.serve.explanation import Explanation, Refusal, SentBy
from shoal_cluster.serve.request_id import call_of
from shoal_replica.stats import ReplicaStats

Item = TypeVar("Item")

MAX_REQUESTS = 4096
MAX_BYTES = 128 * 2**20
MAX_LOOK_BYTES = 32 * 2**20
MAX_RECORDS_PER_REQUEST = 16
MAX_REFUSALS = 4096
MAX_REFUSAL_BYTES = 32 * 2**20
MAX_BEHIND = 64  # decisions after which the log trims itself
BYTES_PER_HASH = 57  # a bytes object of 16 bytes and its slot in a tuple
BYTES_PER_STATS = 1_200  # a replica's stats with their numbers: measured 1 100 to 1 250


class _Kept(Generic[Item]):
    """A record or a look and, once measured, about how much memory it takes; a record, on top of those before it."""

    __slots__ = ("item", "num_bytes")

    def __init__(self, item: Item) -> None:
        self.item = item
        self.num_bytes = 0


class RouteLog:
    """Records by call, including those of its resumes. The calls decided on longest ago are forgotten first.

    Forgetting takes about as long as keeping, since old records are in no CPU cache. So a decision does not wait for
    it: ``trim`` does it, which is called after every ``MAX_BEHIND`` decisions at the latest.
    """

    def __init__(self, max_requests: int = MAX_REQUESTS, max_bytes: int = MAX_BYTES) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._records: OrderedDict[str, list[_Kept[RouteRecord]]] = OrderedDict()
        self._unmeasured: list[_Kept[RouteRecord]] = []
        self._measured: Sequence[ReplicaStats | None] = ()  # of the record that was measured last
        self._looks: OrderedDict[str, _Kept[Look]] = OrderedDict()  # by request id
        self._unmeasured_looks: list[_Kept[Look]] = []
        self._refusals: OrderedDict[str, tuple[Refusal, int]] = OrderedDict()  # by call, the last; with its size
        self._num_look_bytes = 0
        self._num_refusal_bytes = 0
        self._num_behind = 0
        self.num_bytes = 0  # about

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: RouteRecord) -> None:
        """Keep ``record``."""
        call_id, kept = call_of(record.query.request_id), _Kept(record)
        self._unmeasured.append(kept)
        if (records := self._records.get(call_id)) is None:
            self._records[call_id] = [kept]
        else:
            records.append(kept)
            if len(records) > MAX_RECORDS_PER_REQUEST:
                self._measure()
                dropped = records.pop(1)  # the first and the latest ones explain most
                self.num_bytes -= dropped.num_bytes
                request_id = dropped.item.query.request_id
                if all(other.item.query.request_id != request_id for other in records):
                    self._forget_look(request_id)
            self._records.move_to_end(call_id)
        self._num_behind += 1
        if self._num_behind > MAX_BEHIND:
            self.trim()

    def add_look(self, request_id: str, look: Look) -> None:
        """Keep the look that sent a request, beside its record."""
        if request_id in self._looks:
            self._measure()
            self._forget_look(request_id)
        kept = self._looks[request_id] = _Kept(look)
        self._unmeasured_looks.append(kept)

    def refuse(self, refusal: Refusal) -> None:
        """Keep why a request was refused or given up: the last refusal of each call. The oldest are forgotten first."""
        call_id = call_of(refusal.request_id)
        if (before := self._refusals.pop(call_id, None)) is not None:
            self._num_refusal_bytes -= before[1]
        num_bytes = 0 if refusal.record is None else self._size(refusal.record)
        self._refusals[call_id] = refusal, num_bytes
        self._num_refusal_bytes += num_bytes
        while len(self._refusals) > MAX_REFUSALS or (
            self._num_refusal_bytes > MAX_REFUSAL_BYTES and len(self._refusals) > 1
        ):
            self._num_refusal_bytes -= self._refusals.popitem(last=False)[1][1]

    def refusal_of(self, call_id: str) -> Refusal | None:
        """Why a call was refused or given up, if it was."""
        refusal, _ = self._refusals.get(call_id, (None, 0))
        return refusal

    def trim(self) -> None:
        """Forget what exceeds the limits."""
        self._measure()
        self._num_behind = 0
        while len(self._records) > self._max_requests or (self.num_bytes > self._max_bytes and len(self._records) > 1):
            for kept in self._records.popitem(last=False)[1]:
                self.num_bytes -= kept.num_bytes
                self._forget_look(kept.item.query.request_id)
        while len(self._looks) > self._max_requests or (self._num_look_bytes > MAX_LOOK_BYTES and len(self._looks) > 1):
            self._num_look_bytes -= self._looks.popitem(last=False)[1].num_bytes

    def _measure(self) -> None:
        for kept in self._unmeasured:
            kept.num_bytes = self._size(kept.item)
            self.num_bytes += kept.num_bytes
        self._unmeasured.clear()
        for look in self._unmeasured_looks:
            look.num_bytes = look.item.num_bytes
            self._num_look_bytes += look.num_bytes
        self._unmeasured_looks.clear()

    def _size(self, record: RouteRecord | AdmissionRecord) -> int:
        """About: what replicas said is shared with the record before, but for those that have spoken since."""
        query, stats = record.query, record.replicas.stats
        num_new = sum(map(is_not, stats, self._measured)) if len(stats) == len(self._measured) else len(stats)
        self._measured = stats
        num_bytes = BYTES_PER_HASH * len(query.block_hashes) + BYTES_PER_PASSED * len(query.passed)
        return num_bytes + record.replicas.num_bytes + BYTES_PER_STATS * num_new

    def _forget_look(self, request_id: str) -> None:
        """Forget a look with its record: nobody would find it without, and it keeps prompts' hashes alive."""
        if (kept := self._looks.pop(request_id, None)) is not None:
            self._num_look_bytes -= kept.num_bytes

    def look_of(self, request_id: str) -> Look | None:
        """The look that sent a request, the last if several did: what came before it, and where that was to wait."""
        kept = self._looks.get(request_id)
        return None if kept is None else kept.item

    def of_call(self, call_id: str) -> list[RouteRecord]:
        """The records kept for a call, oldest first: the first one and the last few."""
        return [kept.item for kept in self._records.get(call_id, ())]

    def of_request(self, request_id: str) -> Explanation:
        """What is kept of a client's request: of the call with that id, or of its calls if it had several prompts."""
        if explanation := self._explain(request_id):
            return explanation
        calls = (self._explain(f"{request_id}-{number}") for number in range(MAX_PROMPTS))
        return Explanation.of([call for call in calls if call])  # one of them may be held, and the next refused

    def _explain(self, call_id: str) -> Explanation:
        records = self.of_call(call_id)
        looks = dict.fromkeys(record.query.request_id for record in records)
        refusal = self.refusal_of(call_id)
        return Explanation(
            records=tuple(records),
            looks=tuple(SentBy(name, look.queue()) for name in looks if (look := self.look_of(name)) is not None),
            refusals=() if refusal is None else (refusal,),
        )

    def recent(self, limit: int) -> list[RouteRecord]:
        """The latest records of all calls, newest first."""
        calls = itertools.islice(reversed(self._records.values()), limit)
        records = [kept.item for kept in itertools.chain.from_iterable(calls)]
        return sorted(records, key=lambda record: record.time_s, reverse=True)[:limit]
