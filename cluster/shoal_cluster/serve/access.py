"""Who may call a gateway, and in whose name: each API key belongs to a tenant. Without any keys, everybody may."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping

from shoal_cluster.serve.admin import BEARER
from shoal_replica.errors import Unauthenticated

API_KEYS_VARIABLE = "SHOAL_API_KEYS"
ADMIN = "admin"
BASIC = "Basic "


class Access:
    """Checks callers' keys.

    Args:
        keys: API keys by the tenant's name.
        admin_key: it may call, too, as ADMIN.
    """

    def __init__(self, keys: Mapping[str, str], admin_key: str | None) -> None:
        tenants = dict(keys)
        if keys and admin_key is not None:
            tenants.setdefault(ADMIN, admin_key)
        # By digest: how long a lookup takes says nothing of the keys.
        self._tenants = {_digest(key): tenant for tenant, key in tenants.items()}

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
    if authorization.startswith(BEARER):
        return authorization.removeprefix(BEARER)
    if not authorization.startswith(BASIC):
        return ""
    try:
        return base64.b64decode(authorization.removeprefix(BASIC), validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
