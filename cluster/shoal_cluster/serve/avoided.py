"""The replicas that one call must not go to."""

from __future__ import annotations

import asyncio
from collections.abc import Set

from shoal_cluster.serve.gateway_ledger import GatewayLedger
from shoal_cluster.serve.served_adapters import ServedAdapters

PAUSE_S = 0.1  # where all that seemed open have turned the call away: news of why is on its way
GONE_S = 2.0  # after which a replica that failed a request but has kept its feed counts as well again


class Avoided:
    """The replicas that a call must not be sent to: those that could not finish it, those that leave, and those without
    its adapter. Methods take further ones that have refused it.

    Args:
        adapter: the version that the call asks for; "" for the model alone.
        timeout_s: how long to wait for a first replica that has it.
    """

    def __init__(self, ledger: GatewayLedger, adapters: ServedAdapters | None, adapter: str, timeout_s: float) -> None:
        self._ledger = ledger
        self._adapters = adapters
        self._adapter = adapter
        self._timeout_s = timeout_s
        self._gone: set[str] = set()
        self._turned_away: set[str] = set()

    def add(self, replica_id: str) -> None:
        """A replica cannot finish what it took."""
        self._gone.add(replica_id)

    def turn_from(self, replica_id: str) -> None:
        """``replica_id`` is leaving and has refused or handed back the call. The view may still show it as open."""
        self._turned_away.add(replica_id)

    def beside(self, refused: Set[str]) -> Set[str]:
        """All of them, and the ``refused``."""
        return refused | self._gone | self._lacking()

    async def once_there_is_another(self, refused: Set[str]) -> Set[str]:
        """The same, when a replica has the adapter. One that is gone may be well, if only its call broke off: where
        there is no other and it stays for ``GONE_S``, it is tried again.
        """
        if self._adapters is not None:
            await self._adapters.until_somewhere(self._adapter, self._timeout_s)
        loop = asyncio.get_running_loop()
        can_place, ends_s = self._ledger.can_place, loop.time() + GONE_S
        while self._gone and not can_place(self.beside(refused)):
            if not can_place(refused | self._lacking()):
                break
            if loop.time() >= ends_s:
                self._gone.clear()
                break
            await asyncio.sleep(GONE_S / 20)
        avoided = self.beside(refused)
        if not self._turned_away:
            return avoided
        if not can_place(avoided | self._turned_away):
            await asyncio.sleep(PAUSE_S)
            self._turned_away.clear()
        # One that is known to take nothing is left to the ledger: it may be well again before another is.
        everybody = frozenset(self._ledger.view.replica_ids)
        return avoided | {one for one in self._turned_away if can_place(everybody - {one})}

    def _lacking(self) -> Set[str]:
        return frozenset() if self._adapters is None else self._adapters.lacking(self._adapter)
