"""How the commands reach a gateway that asks for keys or speaks TLS."""

from __future__ import annotations

import os
import re
import ssl
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPResponse
from pathlib import Path

import grpc

from shoal_cluster.gateway_settings import KEY_PATTERN
from shoal_cluster.serve.admin import BEARER
from shoal_replica.errors import ConfigError

API_KEY_VARIABLE, TLS_CA_VARIABLE = "SHOAL_API_KEY", "SHOAL_TLS_CA"
PLAIN, TLS = "http://", "https://"


@dataclass(frozen=True, slots=True)
class GatewayAccess:
    """An API key, if any, and the authority that has signed the gateways' certificates (a PEM file; else the system's).

    An address that begins with ``https://`` is one of a gateway that speaks TLS.
    """

    api_key: str | None = field(default=None, repr=False)
    tls_ca: Path | None = None

    @classmethod
    def from_environment(cls) -> GatewayAccess:
        """Raises ConfigError for a key that no header could carry."""
        ca, key = os.environ.get(TLS_CA_VARIABLE), os.environ.get(API_KEY_VARIABLE)
        if key and not re.fullmatch(KEY_PATTERN, key):
            raise ConfigError(f"{API_KEY_VARIABLE}: must be printable ASCII without spaces, for it travels in a header")
        return cls(key or None, Path(ca) if ca else None)

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """As gRPC metadata, or HTTP headers."""
        return () if self.api_key is None else (("authorization", BEARER + self.api_key),)

    def channel(self, address: str, options: tuple[tuple[str, int], ...]) -> grpc.aio.Channel:
        """A gRPC channel to ``address``. Raises ConfigError for an address, or an authority, that is none."""
        scheme, host = split_address(address)
        if scheme == PLAIN:
            return grpc.aio.insecure_channel(host, options=options)
        self._context()  # which checks the authority
        credentials = grpc.ssl_channel_credentials(None if self.tls_ca is None else self.tls_ca.read_bytes())
        return grpc.aio.secure_channel(host, credentials, options=options)

    def open(self, url: str, timeout_s: float) -> HTTPResponse:
        """GET ``url``. Raises what urllib does, and ConfigError as ``channel`` does."""
        context = self._context() if url.startswith(TLS) else None
        request = urllib.request.Request(url, headers=dict(self.headers))
        response: HTTPResponse = urllib.request.urlopen(request, timeout=timeout_s, context=context)
        return response

    def _context(self) -> ssl.SSLContext:
        context = ssl.create_default_context() if self.tls_ca is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.tls_ca is not None:
            try:
                context.load_verify_locations(self.tls_ca)
            except OSError as error:  # ssl.SSLError is one
                why = error.strerror or str(error)
                raise ConfigError(f"{TLS_CA_VARIABLE}: {self.tls_ca} cannot be read as PEM: {why}") from None
        return context


def split_address(address: str) -> tuple[str, str]:
    """(PLAIN or TLS, host:port). Raises ConfigError for another scheme."""
    found = re.fullmatch(r"(?:(\w+)://)?([^/\s]+)/?", address)
    if found is None or (scheme := f"{(found[1] or 'http').lower()}://") not in (PLAIN, TLS):
        raise ConfigError(f"address: got {address!r}; must be host:port, or https://host:port where it speaks TLS")
    return scheme, found[2]


def http_url(address: str) -> str:
    """The URL of an HTTP address, which may be one already."""
    return "".join(split_address(address))
