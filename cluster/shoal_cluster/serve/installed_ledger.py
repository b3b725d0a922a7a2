"""This process's ledger. Serve pickles a request router's module by value, so the router finds the ledger through this
module, which both import by name.
"""

from __future__ import annotations

from shoal_cluster.serve.gateway_ledger import GatewayLedger

_installed: GatewayLedger | None = None


def install(ledger: GatewayLedger) -> None:
    """Make ``ledger`` the one of this process."""
    global _installed
    _installed = ledger


def current() -> GatewayLedger:
    """This process's ledger. Raises RuntimeError where none is installed."""
    if _installed is None:
        raise RuntimeError("no ledger: only a gateway routes to replicas")
    return _installed
