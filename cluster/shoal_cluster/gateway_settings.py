"""Settings of the gateway, as given under ``args.gateway`` in the Serve YAML."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, NonNegativeFloat, SecretStr, model_validator

from shoal_cluster.addresses import DEFAULT_GRPC_ADDRESS, DEFAULT_HTTP_ADDRESS, is_loopback
from shoal_cluster.settings import Settings
from shoal_replica.errors import ConfigError

MAX_PORT = 65_535
DEFAULT_MAX_REQUEST_BYTES = 8 * 2**20
TENANT_PATTERN = r"[\x21-\x7e]{1,64}"
KEY_PATTERN = r"[\x21-\x7e]+"  # it travels in a header
ADMIN_KEY_PATTERN = rf"{KEY_PATTERN}( +{KEY_PATTERN})*"
ADMIN = "admin"  # the tenant whose key is the admin key
ADMIN_KEY_VARIABLE, API_KEYS_VARIABLE = "SHOAL_ADMIN_KEY", "SHOAL_API_KEYS"


def _address(value: str) -> str:
    match = re.fullmatch(r"(?:\[[^\s\[\]]+\]|[^\s:]+):(\d{1,5})", value)
    if match is None or int(match[1]) > MAX_PORT:
        shape = f"host:port, or [IPv6 address]:port, with a port of at most {MAX_PORT}"
        raise ValueError(f"got {value!r}; must be {shape}")
    return value


def _origin(value: str) -> str:
    """Browsers send origins in this form, and it is compared letter by letter."""
    if (
        value not in ("*", "null")
        and re.fullmatch(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?", value) is None
    ):
        raise ValueError(
            f"got {value!r}; must be '*' or like 'https://chat.example:8443', in lower case, without a path"
        )
    return value


Address = Annotated[str, AfterValidator(_address)]
Origin = Annotated[str, AfterValidator(_origin)]


class GatewaySettings(Settings):
    """Settings of the gateway. Port 0 picks a free one."""

    grpc_address: Address = Field(DEFAULT_GRPC_ADDRESS, description="address of the gRPC server")
    http_address: Address = Field(DEFAULT_HTTP_ADDRESS, description="address of the HTTP server")
    num_replicas: int = Field(1, ge=1, description="number of gateways; those on a node share its ports")
    num_cpus: float = Field(0.5, ge=0, description="CPUs reserved in Ray per gateway")
    resources: dict[str, NonNegativeFloat] = Field(
        default_factory=dict, description="additional Ray resources per gateway"
    )
    request_timeout_s: float = Field(
        600.0, gt=0, description="maximum seconds per request; a gRPC client's deadline may be shorter"
    )
    drain_timeout_s: float = Field(
        60.0, gt=0, description="seconds that answers may continue once the gateway stops or is replaced"
    )
    placement_timeout_s: float = Field(
        30.0, gt=0, description="maximum seconds of waiting while no replica takes requests or starts"
    )
    max_request_bytes: int = Field(DEFAULT_MAX_REQUEST_BYTES, ge=1024, description="maximum size of a request's body")
    max_waiting_tokens: int = Field(
        262_144, ge=1, description="waiting prompt tokens per replica beyond which calls are refused"
    )
    max_index_entries: int = Field(
        2**21,
        ge=1024,
        le=2**25,
        description="cached blocks a gateway can know, rounded up to a power of two; 20 bytes each",
    )
    shed_late: bool = Field(False, description="refuse calls whose first token can no longer come within the objective")
    admin_key: SecretStr | None = Field(
        None,
        min_length=1,
        description="required for `shoal tune` and other controls; without a key they are disabled",
    )
    api_keys: dict[str, SecretStr] = Field(
        default_factory=dict, description="API key of each tenant; if empty, anyone may call"
    )
    cors_origins: tuple[Origin, ...] = Field(
        (), description="origins of web pages whose scripts may call, like `https://chat.example`; or `*` for all"
    )
    api_keys_file: Path | None = Field(
        None, description="file of more API keys, lines of tenant=key, on the gateway's node"
    )
    tls_cert: Path | None = Field(None, description="certificate chain (PEM) on the gateway's node; turns TLS on")
    tls_key: Path | None = Field(None, description="private key of tls_cert (PEM, not encrypted)")

    @property
    def is_local(self) -> bool:
        """Whether only this host can reach it."""
        return is_loopback(self.grpc_address) and is_loopback(self.http_address)

    @property
    def admin_secret(self) -> str | None:
        return None if self.admin_key is None else self.admin_key.get_secret_value()

    def api_secrets(self) -> dict[str, str]:
        """All API keys, by tenant. Raises ConfigError for a file that cannot be read, or has none."""
        secrets = {tenant: key.get_secret_value() for tenant, key in self.api_keys.items()}
        if self.api_keys_file is None:
            return secrets
        where = f"gateway.api_keys_file: {self.api_keys_file}"
        try:
            lines = self.api_keys_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: cannot be read: {error}") from None
        pairs = [line for each in lines if (line := each.strip()) and not line.startswith("#")]
        if not pairs:
            raise ConfigError(f"{where}: has no keys")
        return checked_keys(where, secrets | parse_keys(where, pairs), self.admin_secret)

    def without_secrets(self) -> Self:
        return self.model_copy(update={"admin_key": None, "api_keys": {}, "api_keys_file": None})

    @model_validator(mode="after")
    def _has_two_ports(self) -> Self:
        if self.grpc_address == self.http_address and not self.http_address.endswith(":0"):
            raise ValueError(f"http_address is {self.http_address!r}, as grpc_address is; each needs a port of its own")
        return self

    @model_validator(mode="after")
    def _has_certificate_and_key(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be given together")
        return self

    @model_validator(mode="after")
    def _keys_differ(self) -> Self:
        secrets = {tenant: key.get_secret_value() for tenant, key in self.api_keys.items()}
        try:
            checked_keys("api_keys", secrets, self.admin_secret)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self


def checked_keys(where: str, keys: dict[str, str], admin_key: str | None) -> dict[str, str]:
    """``keys``. Raises ConfigError for keys, or names, that are no good; no key is shown."""
    for tenant, key in keys.items():
        if not re.fullmatch(TENANT_PATTERN, tenant) or tenant == ADMIN:
            raise ConfigError(f"{where}: got the tenant {tenant!r}; must match {TENANT_PATTERN} and not be {ADMIN!r}")
        if not re.fullmatch(KEY_PATTERN, key):
            raise ConfigError(f"{where}: the key of {tenant!r} must be printable ASCII without spaces")
    if admin_key is not None and not re.fullmatch(ADMIN_KEY_PATTERN, admin_key):
        raise ConfigError("admin_key: must be printable ASCII without spaces at its ends, for it travels in a header")
    given = [*keys.values(), *([] if admin_key is None else [admin_key])]
    if len(set(given)) < len(given):
        raise ConfigError(f"{where}: two tenants have the same key, or one has the admin key")
    return keys


def parse_keys(where: str, pairs: Sequence[str]) -> dict[str, str]:
    """API keys by tenant, from texts like "tenant=key". Raises ConfigError."""
    keys: dict[str, str] = {}
    for pair in pairs:
        tenant, _, key = (part.strip() for part in pair.partition("="))
        if not (tenant and key) or tenant in keys:
            raise ConfigError(f"{where}: must be tenant=key pairs, each tenant once")
        keys[tenant] = key
    return keys


def with_keys(args: dict[str, Any]) -> dict[str, Any]:
    """An application's ``args`` with the keys of this process's environment, so that the YAML need not contain them.
    Both may have API keys, each of other tenants; the YAML's admin key is the one. Raises ConfigError.
    """
    gateway: Any = args.get("gateway", {})
    found: dict[str, Any] = {}
    if key := os.environ.get(ADMIN_KEY_VARIABLE):
        found["admin_key"] = key
    if keys := os.environ.get(API_KEYS_VARIABLE):
        found["api_keys"] = parse_keys(API_KEYS_VARIABLE, keys.split(","))
    if not found or not isinstance(gateway, dict):
        return args
    if isinstance(own := gateway.get("api_keys"), dict) and (both := own.keys() & found.get("api_keys", {}).keys()):
        raise ConfigError(f"gateway.api_keys: {min(both)!r} has a key in {API_KEYS_VARIABLE}, too")
    if isinstance(own, dict):
        gateway = gateway | {"api_keys": found.get("api_keys", {}) | own}
    return args | {"gateway": found | gateway}
