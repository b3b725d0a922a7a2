"""What a replica keeps of one gateway that follows its feed."""

from __future__ import annotations

import asyncio

from shoal_cluster.policies.wishes import Wish
from shoal_cluster.serve.feed_messages import InFlight, Promise, Promised, ToldWish, Update, put
from shoal_replica.frames import frame
from shoal_replica.prefix_cache import BlockHash
from shoal_replica.reports import StepReport
from shoal_replica.request import TokenDelta
from shoal_replica.stats import ReplicaStats


class Subscriber:
    """A connected gateway: its sequence number, its requests, what it has promised and what it plans to send (wishes).

    Attributes:
        request_ids: its requests that are at this replica.
        accepted: those of them that no report has counted yet.
        in_flight: those of them whose prompts are not computed yet, with the prompts' blocks.
        wishes: due on this replica's monotonic clock. ``told_wishes_version``: of the others' that it has been told.
        told: the stats, and the sums of the others' promises, that it was told last.
        unread_bytes: at most so much of its snapshot is unread; taking a while to read that is no backlog.
    """

    def __init__(self, gateway_id: str, transport: asyncio.Transport) -> None:
        self.gateway_id = gateway_id
        self.transport = transport
        self.request_ids: set[str] = set()
        self.accepted: list[str] = []
        self.in_flight: dict[str, tuple[BlockHash, ...]] = {}
        self.promises: dict[str, Promise] = {}
        self.wishes: tuple[Wish, ...] = ()
        self.told_wishes_version = 0
        self.told: tuple[ReplicaStats | None, Promised] = (None, Promised())
        self.unread_bytes = 0
        self._seq = 0
        self._launched: dict[str, InFlight] = {}  # the others', not told yet
        self._landed: list[str] = []

    @property
    def has_prompts_to_hear_of(self) -> bool:
        """Whether other gateways' prompts have come or been computed since it was last told."""
        return bool(self._launched or self._landed)

    def is_behind(self, max_bytes: int) -> bool:
        """Whether it reads too slowly: more than ``max_bytes`` wait besides what may be left of its snapshot."""
        num_bytes = self.transport.get_write_buffer_size()
        self.unread_bytes = min(self.unread_bytes, num_bytes)
        return num_bytes - self.unread_bytes > max_bytes

    def note_launched(self, prompt: InFlight) -> None:
        """Another gateway's prompt has come."""
        self._launched[prompt.request_id] = prompt

    def note_landed(self, request_id: str) -> None:
        """Another gateway's prompt is computed, or will not be."""
        if self._launched.pop(request_id, None) is None:
            self._landed.append(request_id)

    def send(
        self,
        report: StepReport,
        deltas: tuple[TokenDelta, ...],
        accepted: tuple[str, ...],
        promised: Promised,
        wishes: tuple[ToldWish, ...] | None,
    ) -> None:
        """Send one update, without what the gateway knows already."""
        self._seq += 1
        stats = None if report.stats is self.told[0] else report.stats
        self.told = (report.stats, promised)
        launched, landed = tuple(self._launched.values()), tuple(self._landed)
        self._launched.clear()
        self._landed.clear()
        update = Update(
            self._seq, stats, report.stored, report.removed, deltas, accepted, promised, wishes, launched, landed
        )
        put(self.transport, frame(update))
