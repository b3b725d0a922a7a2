"""Settings of the gateway, as given under ``args.gateway`` in the Serve YAML."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, NonNegativeFloat, SecretStr, model_validator

from shoal_cluster.addresses import DEFAULT_GRPC_ADDRESS, DEFAULT_HTTP_ADDRESS
from shoal_cluster.settings import Settings

MAX_PORT = 65_535
TENANT_PATTERN = r"[\x21-\x7e]{1,64}"


def _address(value: str) -> str:
    match = re.fullmatch(r"(?:\[[^\s\[\]]+\]|[^\s:]+):(\d{1,5})", value)
    if match is None or int(match[1]) > MAX_PORT:
        shape = f"host:port, or [IPv6 address]:port, with a port of at most {MAX_PORT}"
        raise ValueError(f"got {value!r}; must be {shape}")
    return value


def _key(value: SecretStr) -> SecretStr:
    if not re.fullmatch(r"[\x21-\x7e]+", value.get_secret_value()):
        raise ValueError("a key must be printable ASCII without spaces, for it travels in a header")
    return value


Address = Annotated[str, AfterValidator(_address)]
ApiKey = Annotated[SecretStr, AfterValidator(_key)]
TenantName = Annotated[str, Field(pattern=f"^{TENANT_PATTERN}$")]


class GatewaySettings(Settings):
    """Settings of the gateway. Port 0 picks a free one."""

    grpc_address: Address = DEFAULT_GRPC_ADDRESS
    http_address: Address = DEFAULT_HTTP_ADDRESS
    num_replicas: int = Field(1, ge=1)
    num_cpus: float = Field(0.5, ge=0)
    resources: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    request_timeout_s: float = Field(
        600.0, gt=0, description="longest life of a request; its client's deadline may be shorter"
    )
    drain_timeout_s: float = Field(60.0, gt=0, description="how long answers may go on once it is stopped or replaced")
    placement_timeout_s: float = Field(30.0, gt=0, description="longest wait while no replica takes requests or starts")
    max_request_bytes: int = Field(8 * 2**20, ge=1024)
    max_waiting_tokens: int = Field(262_144, ge=1, description="tokens waiting per replica beyond which calls are shed")
    max_index_entries: int = Field(
        2**21, ge=1024, le=2**25, description="cached blocks known to a gateway: the next power of two, 20 bytes each"
    )
    shed_late: bool = Field(False, description="refuse calls whose first token could not come within the objective")
    admin_key: SecretStr | None = Field(None, min_length=1, description="lets `shoal tune` in; no key, no controls")
    api_keys: dict[TenantName, ApiKey] = Field(
        default_factory=dict, description="by tenant: the keys of which every call needs one; none: everybody may call"
    )
    cors_origins: tuple[str, ...] = Field((), description="origins of pages whose scripts may call: a URL each, or '*'")
    tls_cert: Path | None = Field(None, description="certificate chain, PEM, on the gateway's node: serve TLS only")
    tls_key: Path | None = Field(None, description="its private key, PEM")

    @property
    def admin_secret(self) -> str | None:
        return None if self.admin_key is None else self.admin_key.get_secret_value()

    @property
    def api_secrets(self) -> dict[str, str]:
        return {tenant: key.get_secret_value() for tenant, key in self.api_keys.items()}

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
        keys = [key.get_secret_value() for key in self.api_keys.values()]
        if len(set(keys)) < len(keys):
            raise ValueError("api_keys: two tenants have the same key")
        return self
