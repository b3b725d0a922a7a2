"""Who may call a gateway, and in whose name: each API key belongs to a tenant. Without any keys, everybody may."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping

from shoal_cluster.gateway_settings import ADMIN
from shoal_cluster.serve.admin import key_of_header
from shoal_replica.errors import Unauthenticated


class Access:
    """Checks callers' keys.

    Args:
        keys: API keys by the tenant's name.
        admin_key: it may call, too, as ADMIN.
    """

    def __init__(self, keys: Mapping[str, str], admin_key: str | None) -> None:
        # By digest: how long a lookup takes says nothing of the keys.
        self._tenants = {_digest(key): tenant for tenant, key in keys.items()}
        if keys and admin_key is not None:
            self._tenants[_digest(admin_key)] = ADMIN

    @property
    def is_open(self) -> bool:
        """Whether no key is needed."""
        return not self._tenants

    def tenant_of(self, authorization: str | None) -> str | None:
        """The tenant whose key an ``authorization`` header has; None where no key is needed.

        Raises:
            Unauthenticated: the key is missing or unknown.
        """
        if self.is_open:
            return None
        if authorization is None:
            raise Unauthenticated("an API key is needed; send it as 'authorization: Bearer KEY'")
        if (tenant := self._tenants.get(_digest(_key_of(authorization)))) is None:
            raise Unauthenticated("the API key is unknown; it is sent as 'authorization: Bearer KEY'")
        return tenant


def _key_of(authorization: str) -> str:
    """The key, or what a browser's dialog got as password; empty if there is none."""
    if (key := key_of_header(authorization)) is not None:
        return key
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[2]
    except ValueError:  # not base64, not ASCII, or not UTF-8
        return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
