"""The gateway's two servers, gRPC and HTTP: opened together, and closed without cutting the answers under way."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable

import grpc
import uvicorn

from shoal_cluster.addresses import listen
from shoal_cluster.gateway_settings import GatewaySettings
from shoal_cluster.serve.gateway_core import GatewayCore
from shoal_cluster.serve.grpc_service import start_grpc_server
from shoal_cluster.serve.http.api import http_config
from shoal_cluster.serve.shared_port import check_not_taken
from shoal_replica.errors import ConfigError

SHUTDOWN_S = 5.0
"""For what is still open once no answer is under way: dashboards, health watchers, clients that do not read."""

UNREAD_S = 60.0
"""How long a client may leave available data unread. HTTP: then the system closes its connection (TCP_USER_TIMEOUT).
gRPC: this long after the longest time that a call may take, its work ends; its status waits until the client reads.
"""

LAST_CALLS_S = 0.3
"""For the calls of connections that were accepted just before."""

LAST_BYTES_S = 1.0
"""Of those, for HTTP to send the end of the last answers."""


class Ingress:
    """Made by ``open``. Both ports are known from then on."""

    def __init__(
        self,
        grpc_server: grpc.aio.Server,
        grpc_port: int,
        http_server: uvicorn.Server,
        http_port: int,
        http_task: asyncio.Task[None],
        shutdown_s: float,
    ) -> None:
        self.grpc_port = grpc_port
        self.http_port = http_port
        self._grpc_server = grpc_server
        self._http_server = http_server
        self._http_task = http_task
        self._shutdown_s = shutdown_s

    @classmethod
    async def open(
        cls, core: GatewayCore, settings: GatewaySettings, is_peer: Callable[[int], bool] = lambda pid: False
    ) -> Ingress:
        """Serve ``core`` at the addresses of ``settings``.

        Args:
            is_peer: whether a process, by its id, may listen at the same addresses.

        Raises:
            ConfigError: one of them cannot be bound, or there is no such certificate.
        """
        credentials = _credentials(settings)
        await asyncio.to_thread(check_not_taken, "grpc_address", settings.grpc_address, is_peer)
        grpc_server, grpc_port = await start_grpc_server(
            core,
            settings.grpc_address,
            settings.max_request_bytes,
            max_call_s=settings.request_timeout_s + UNREAD_S,
            credentials=credentials,
            share_port=True,
        )
        try:
            listener = await asyncio.to_thread(_listen, settings.http_address, is_peer)
        except ConfigError:
            await grpc_server.stop(None)
            raise
        http_port: int = listener.getsockname()[1]
        shutdown_s = settings.drain_timeout_s + SHUTDOWN_S
        http_server = uvicorn.Server(http_config(core, settings, shutdown_s))
        serving = http_server.serve(sockets=[listener])
        http_task = asyncio.get_running_loop().create_task(serving, name="shoal-http")
        return cls(grpc_server, grpc_port, http_server, http_port, http_task, shutdown_s)

    def check_health(self) -> None:
        """Raises RuntimeError once the HTTP server has ended by itself."""
        if self._http_task.done():
            raise RuntimeError(f"the HTTP server has ended: {self._http_task}")

    async def close(self, drained: Awaitable[None]) -> None:
        """Stop accepting at once; end what is open when no answer is.

        Args:
            drained: returns when no answer is under way any more.
        """
        grpc_ends = asyncio.ensure_future(self._grpc_server.stop(self._shutdown_s))
        if self._http_server.started:
            for server in self._http_server.servers:
                server.close()
        await asyncio.sleep(LAST_CALLS_S)
        self._http_server.should_exit = True  # from now on it ends connections on which no call is
        await drained
        await asyncio.gather(grpc_ends, self._grpc_server.stop(SHUTDOWN_S), self._end_http())

    async def _end_http(self) -> None:
        await asyncio.wait((self._http_task,), timeout=LAST_BYTES_S)
        for task in tuple(self._http_server.server_state.tasks):
            task.cancel()
        await asyncio.wait((self._http_task,), timeout=SHUTDOWN_S)
        for connection in tuple(self._http_server.server_state.connections):
            connection.transport.abort()  # its client does not read: what is written would never leave
        await self._http_task


def _listen(http_address: str, is_peer: Callable[[int], bool]) -> socket.socket:
    """A listening socket for HTTP. Raises ConfigError."""
    check_not_taken("http_address", http_address, is_peer)
    try:
        listener = listen(http_address, share_port=True)
    except OSError as error:
        raise ConfigError(f"http_address: cannot listen on {http_address!r}: {error.strerror}") from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * UNREAD_S))
    return listener


def _credentials(settings: GatewaySettings) -> grpc.ServerCredentials | None:
    """The certificate for TLS, if there is to be TLS. Raises ConfigError for files that are none."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password=_refuse_password)
        pair = settings.tls_key.read_bytes(), settings.tls_cert.read_bytes()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"gateway.tls_cert: {settings.tls_cert} and {settings.tls_key}: {error}") from None
    return grpc.ssl_server_credentials([pair])


def _refuse_password() -> str:
    """Called for a key that is encrypted: nobody is there to type a password."""
    raise ConfigError("gateway.tls_key: must not be encrypted")
