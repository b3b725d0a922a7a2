"""Cached blocks on their way between simulated replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from shoal_cluster.policies.block_offer import BlockOffer
from shoal_cluster.policies.transfer_pace import TransferPace, usable_blocks
from shoal_cluster.sim.event_loop import EventLoop
from shoal_replica.errors import Unavailable
from shoal_replica.guest_table import GuestTable
from shoal_replica.request import Request
from shoal_replica.scheduler import Scheduler


class Side(Protocol):
    """A replica that gives blocks or takes them."""

    @property
    def scheduler(self) -> Scheduler: ...

    def go_on(self) -> None:
        """Blocks may have become free: start a step, if there is one to run and none runs."""
        ...


class Transfers:
    """How one replica takes blocks, as ``BlockFetcher`` does, in simulated time. Steps wait for none of it.

    Args:
        block_s: seconds that a block takes.
        replicas: those that can give; the cluster's own mapping, not a copy.
    """

    def __init__(self, block_s: float, replicas: Mapping[str, Side], loop: EventLoop) -> None:
        self._pace = TransferPace(block_s)
        self._replicas = replicas
        self._loop = loop
        self._free_s = 0.0  # when the last one has ended: they take turns

    def begin(
        self, taker: Scheduler, request: Request, offer: BlockOffer, token_s: float, then: Callable[[], None]
    ) -> int:
        """Begin to copy what is offered for ``request`` and not cached here, if that is worth it where a token takes
        ``token_s`` to compute (0: not known); ``then`` is called when it is here. Returns how many of its leading
        blocks will be, 0 if it is to be computed.
        """
        kv = taker.kv
        wanted, now = usable_blocks(request, offer.num_blocks, kv.block_size), self._loop.now
        is_worth = self._pace.is_worth(
            kv.num_missing(wanted),
            round(max(0.0, self._free_s - now) / self._pace.block_s(now)),
            has_begun=bool(request.output_token_ids),
            block_compute_s=kv.block_size * token_s if token_s else None,
            now=now,
        )
        giver = self._replicas.get(offer.replica_id)
        if giver is None or not is_worth:
            return 0
        here = GuestTable(kv, wanted)
        try:
            here.make_room()
        except Unavailable:
            here.close()
            return 0
        there = GuestTable(giver.scheduler.kv, wanted)
        num_blocks = max(0, there.num_filled - here.num_filled)

        def end() -> None:
            if num_blocks and self._replicas.get(offer.replica_id) is giver:
                here.commit(num_blocks)
                taker.totals.num_blocks_taken += num_blocks
                giver.scheduler.totals.num_blocks_given += num_blocks
            here.close()
            there.close()
            if self._replicas.get(offer.replica_id) is giver:
                giver.go_on()  # its own requests may have waited for these blocks
            then()

        self._free_s = max(now, self._free_s) + self._pace.seconds(num_blocks, now)
        self._loop.at(self._free_s, end)
        return len(wanted)
