"""Default addresses of a gateway, and how to listen at an address."""

from __future__ import annotations

import socket

DEFAULT_GRPC_ADDRESS = "127.0.0.1:9000"
DEFAULT_HTTP_ADDRESS = "127.0.0.1:8000"


def listen(address: str, *, share_port: bool = False) -> socket.socket:
    """A listening TCP socket at "host:port" or "[IPv6 address]:port"; "[::]" accepts IPv4 too, as it does in gRPC.

    Args:
        share_port: share the port (SO_REUSEPORT) with other processes that also set this.

    Raises:
        OSError: the address is in use, or is not one of this machine.
    """
    host, _, port = address.rpartition(":")
    if not host.startswith("["):
        return socket.create_server((host, int(port)), reuse_port=share_port)
    host = host.strip("[]")
    takes_all = host == "::" and socket.has_dualstack_ipv6()
    place = (host, int(port))
    return socket.create_server(place, family=socket.AF_INET6, reuse_port=share_port, dualstack_ipv6=takes_all)
