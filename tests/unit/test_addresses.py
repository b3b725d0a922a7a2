"""The addresses that a gateway listens on."""

from __future__ import annotations

import socket

import pytest

from shoal_cluster.addresses import listen


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return socket.has_dualstack_ipv6()


NEEDS_IPV6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize(
    ("address", "reached_at"),
    [
        ("127.0.0.1:0", ["127.0.0.1"]),
        pytest.param("[::1]:0", ["::1"], marks=NEEDS_IPV6),
        pytest.param("[::]:0", ["::1", "127.0.0.1"], marks=NEEDS_IPV6),
    ],
)
def test_is_reached_at(address: str, reached_at: list[str]) -> None:
    with listen(address) as server:
        port = server.getsockname()[1]
        for host in reached_at:
            socket.create_connection((host, port), timeout=5).close()


def test_an_address_in_use_is_refused_and_a_shared_one_is_not() -> None:
    with listen("127.0.0.1:0") as server, pytest.raises(OSError, match="in use"):
        listen(f"127.0.0.1:{server.getsockname()[1]}")
    with listen("127.0.0.1:0", share_port=True) as server:
        listen(f"127.0.0.1:{server.getsockname()[1]}", share_port=True).close()
