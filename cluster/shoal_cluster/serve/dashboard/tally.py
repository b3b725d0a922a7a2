"""Where the last decisions went: each replica's share of them, and how many of their prompt blocks it had cached."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from shoal_cluster.policies.route_record import RouteRecord

NUM_COUNTED = 500
NUM_LOOKED_AT = 100


@dataclass(frozen=True, slots=True)
class Share:
    """A replica's part: how many decisions chose it, and how many of their prompts' full blocks it had cached."""

    num_decisions: int
    num_cached_blocks: int
    num_prompt_blocks: int


class RouteTally:
    """Counts decisions, over the last ``NUM_COUNTED``, whenever somebody looks at them."""

    def __init__(self) -> None:
        self._counted: deque[tuple[str, int, int]] = deque(maxlen=NUM_COUNTED)
        self._last: tuple[float, str] | None = None

    def count(self, recent: Callable[[int], Sequence[RouteRecord]]) -> Sequence[RouteRecord]:
        """Count what is new in ``recent(limit)``, the last decisions, newest first. Returns those it looked at."""
        records = recent(NUM_LOOKED_AT)
        if all(_key(record) != self._last for record in records):  # more than these are new
            records = recent(NUM_COUNTED)
        new = list(takewhile(lambda record: _key(record) != self._last, records))
        for record in reversed(new):
            if record.decision.best:
                num_cached, num_blocks = cached_blocks(record)
                self._counted.append((record.decision.best, num_cached, num_blocks))
        if records:
            self._last = _key(records[0])
        return records

    @property
    def num_decisions(self) -> int:
        """How many decisions are counted."""
        return len(self._counted)

    def shares(self) -> dict[str, Share]:
        """The shares by replica, for those that were chosen at least once."""
        shares: dict[str, Share] = {}
        for replica_id, num_cached, num_blocks in self._counted:
            so_far = shares.get(replica_id, Share(0, 0, 0))
            shares[replica_id] = Share(
                so_far.num_decisions + 1, so_far.num_cached_blocks + num_cached, so_far.num_prompt_blocks + num_blocks
            )
        return shares


def _key(record: RouteRecord) -> tuple[float, str]:
    return record.time_s, record.query.request_id


def cached_blocks(record: RouteRecord) -> tuple[int, int]:
    """How many full blocks of a decision's prompt the chosen replica had cached, and how many there are."""
    best = record.decision.best
    return record.replicas.matched_by(best) if best else 0, len(record.query.block_hashes)
