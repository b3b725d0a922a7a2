"""Where the last decisions went: each replica's share of them, and of their prompt blocks that it had cached."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from shoal_cluster.policies.routing import RouteRecord

NUM_COUNTED = 500
NUM_LOOKED_AT = 100


@dataclass(frozen=True, slots=True)
class Share:
    """A replica's part: of the decisions, and cached of its prompts' full blocks."""

    num_decisions: int
    num_cached_blocks: int
    num_prompt_blocks: int


class Tally:
    """Counts decisions as they are taken; the last ``NUM_COUNTED`` of them."""

    def __init__(self) -> None:
        self._counted: deque[tuple[str, int, int]] = deque(maxlen=NUM_COUNTED)
        self._last: tuple[float, str] | None = None

    def count(self, recent: Callable[[int], Sequence[RouteRecord]]) -> Sequence[RouteRecord]:
        """Count what is new in ``recent(limit)``, the last decisions, newest first; returns the few it looked at."""
        records = recent(NUM_LOOKED_AT)
        if all(_key(record) != self._last for record in records):  # much has happened since the last look
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
        """How many are counted."""
        return len(self._counted)

    def shares(self) -> dict[str, Share]:
        """By replica, of those that were chosen at least once."""
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
    """Of a decision: full blocks of the prompt that the chosen replica had, and all of them."""
    best, replicas = record.decision.best, record.replicas
    num_blocks = len(record.query.block_hashes)
    if not best:
        return 0, num_blocks
    return int(replicas.num_matched_blocks[replicas.replica_ids.index(best)]), num_blocks
