"""This process's ledger, and the model that it is for. Serve pickles a request router's module by value, so the router
finds them through this module, which both import by name.
"""

from __future__ import annotations

from shoal_cluster.serve.gateway_ledger import GatewayLedger

_installed: GatewayLedger | None = None
_model = ""


def install(ledger: GatewayLedger, model: str) -> None:
    """Make ``ledger`` the one of this process, for replicas with ``model`` (``args.model``)."""
    global _installed, _model
    _installed, _model = ledger, model


def current() -> GatewayLedger:
    """This process's ledger. Raises RuntimeError where none is installed."""
    if _installed is None:
        raise RuntimeError("no ledger: only a gateway routes to replicas")
    return _installed


def routed_model() -> str:
    return _model
