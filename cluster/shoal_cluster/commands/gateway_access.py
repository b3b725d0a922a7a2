"""How the commands reach a gateway that asks for keys or speaks TLS."""

from __future__ import annotations

import os
import ssl
import urllib.request
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path

import grpc

from shoal_cluster.serve.admin import BEARER
from shoal_replica.errors import ConfigError

API_KEY_VARIABLE, TLS_CA_VARIABLE = "SHOAL_API_KEY", "SHOAL_TLS_CA"
TLS = "https://"


@dataclass(frozen=True, slots=True)
class GatewayAccess:
    """An API key, if any, and the authority that has signed the gateways' certificates (a PEM file; else the system's).

    An address that begins with ``https://`` is one of a gateway that speaks TLS.
    """

    api_key: str | None = None
    tls_ca: Path | None = None

    @classmethod
    def from_environment(cls) -> GatewayAccess:
        ca = os.environ.get(TLS_CA_VARIABLE)
        return cls(os.environ.get(API_KEY_VARIABLE) or None, Path(ca) if ca else None)

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """As gRPC metadata, or HTTP headers."""
        return () if self.api_key is None else (("authorization", BEARER + self.api_key),)

    def channel(self, address: str, options: tuple[tuple[str, int], ...]) -> grpc.aio.Channel:
        """A gRPC channel to ``address``. Raises ConfigError for an authority that cannot be read."""
        if not address.startswith(TLS):
            return grpc.aio.insecure_channel(address, options=options)
        credentials = grpc.ssl_channel_credentials(None if self.tls_ca is None else self._read_ca(self.tls_ca))
        return grpc.aio.secure_channel(address.removeprefix(TLS), credentials, options=options)

    def open(self, url: str, timeout_s: float) -> HTTPResponse:
        """GET ``url``. Raises what urllib does, and ConfigError as ``channel`` does."""
        context = None
        if url.startswith(TLS):
            ca = None if self.tls_ca is None else self._read_ca(self.tls_ca).decode("ascii", "replace")
            context = ssl.create_default_context(cadata=ca)
        request = urllib.request.Request(url, headers=dict(self.headers))
        response: HTTPResponse = urllib.request.urlopen(request, timeout=timeout_s, context=context)
        return response

    def _read_ca(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{TLS_CA_VARIABLE}: {path} cannot be read: {error.strerror}") from None


def http_url(address: str) -> str:
    """The URL of an HTTP address, which may be one already."""
    return address if address.startswith(TLS) else f"http://{address}"
