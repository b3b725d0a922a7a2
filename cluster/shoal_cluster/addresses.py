"""Addresses: where a gateway listens unless told otherwise, and how."""

from __future__ import annotations

import socket

DEFAULT_GRPC_ADDRESS = "127.0.0.1:9000"
DEFAULT_HTTP_ADDRESS = "127.0.0.1:8000"


def listen(address: str, *, share_port: bool = False) -> socket.socket:
    """A TCP socket at "host:port", or "[IPv6 address]:port"; "[::]" takes IPv4 too, as gRPC's does.

    Args:
        share_port: with other processes that do, too.

    Raises:
        OSError: it is in use, or not an address of this machine.
    """
    host, _, port = address.rpartition(":")
    if not host.startswith("["):
        return socket.create_server((host, int(port)), reuse_port=share_port)
    host = host.strip("[]")
    takes_all = host == "::" and socket.has_dualstack_ipv6()
    place = (host, int(port))
    return socket.create_server(place, family=socket.AF_INET6, reuse_port=share_port, dualstack_ipv6=takes_all)
