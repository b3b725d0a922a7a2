"""Default addresses of a gateway, and how to listen at an address."""

from __future__ import annotations

import socket

DEFAULT_GRPC_ADDRESS = "127.0.0.1:9000"
DEFAULT_HTTP_ADDRESS = "127.0.0.1:8000"


def is_loopback(address: str) -> bool:
    """Whether an address, like "host:port", is one of this machine only."""
    host = address.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


def no_gateway(address: str, where: str) -> str:
    """What to say where nobody answers at ``address``, which the reader knows as ``where``."""
    hint = "start one with `make demo`" if is_loopback(address) else "is it running, and is that the address it has?"
    return f"no Shoal gateway at {where}; {hint}"


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
