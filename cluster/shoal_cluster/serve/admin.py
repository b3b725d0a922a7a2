"""Access to controls of the running cluster: it takes the admin key. If none is configured, nobody has access."""

from __future__ import annotations

import hmac

from shoal_cluster.gateway_settings import ADMIN_KEY_VARIABLE
from shoal_replica.errors import PermissionDenied

BEARER = "Bearer "


def check_admin_key(configured: str | None, given: str | None) -> None:
    """Raise PermissionDenied unless ``given`` is the ``configured`` key."""
    if configured is None:
        raise PermissionDenied(f"controls are off: the cluster has no gateway.admin_key (or {ADMIN_KEY_VARIABLE})")
    if given is None or not hmac.compare_digest(configured.encode(), given.encode()):
        raise PermissionDenied(
            "the admin key is missing or wrong; send it as 'authorization: Bearer KEY' (shoal: --admin-key)"
        )


def key_of_header(authorization: str | None) -> str | None:
    """The key in an ``authorization`` header or gRPC metadata value; None if there is none."""
    scheme, _, given = (authorization or "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else None
