from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shoal_cluster.addresses import listen
from shoal_cluster.serve.shared_port import check_not_taken, is_other_gateway
from shoal_replica.errors import ConfigError

LISTENS = """
import socket, sys
host, _, port = sys.argv[1].rpartition(":")
print(socket.create_server((host, int(port)), reuse_port=True).getsockname()[1], flush=True)
sys.stdin.read()
"""


def nobody(pid: int) -> bool:
    return False


@contextmanager
def listening(title: str, address: str = "127.0.0.1:0") -> Iterator[tuple[int, int]]:
    """A process with that title; gives its id and its port."""
    command = [title, "-c", LISTENS, address]
    process = subprocess.Popen(command, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.pid, int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


def test_a_port_that_nobody_listens_at_is_free_and_so_is_any() -> None:
    with listen("127.0.0.1:0", share_port=True) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    check_not_taken("http_address", address, nobody)
    check_not_taken("http_address", "127.0.0.1:0", nobody)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "[::]"])
def test_one_that_is_shared_with_strangers_is_taken(host: str) -> None:
    with listen("127.0.0.1:0", share_port=True) as server:
        address = f"{host}:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"grpc_address: cannot listen on .*: in use by process {os.getpid()}"):
            check_not_taken("grpc_address", address, nobody)
        check_not_taken("grpc_address", address, lambda pid: pid == os.getpid())


def test_the_same_port_of_another_address_is_free() -> None:
    with listen("127.0.0.1:0", share_port=True) as server:
        port = server.getsockname()[1]
        check_not_taken("grpc_address", f"127.0.0.2:{port}", nobody)
        with listening("peer", f"127.0.0.2:{port}") as (pid, _):
            check_not_taken("grpc_address", f"127.0.0.2:{port}", lambda each: each == pid)
            with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}$"):
                check_not_taken("grpc_address", f"0.0.0.0:{port}", lambda each: each == pid)


@pytest.mark.parametrize(
    ("title", "is_peer"),
    [
        ("ray::ServeReplica:shoal:Gateway", True),
        ("ray::ServeReplica:shoal:Gateway.initialize_and_get_metadata", True),
        ("ray::ServeReplica:shoal:Gateway::Exiting", True),
        ("ray::ServeReplica:shoal:Gateway2", False),
        ("ray::ServeReplica:shoal2:Gateway", False),
        ("python", False),
    ],
)
def test_peers_are_workers_of_the_same_raylet_with_the_name(
    monkeypatch: pytest.MonkeyPatch, title: str, is_peer: bool
) -> None:
    with listening(title) as (pid, _):
        assert not is_other_gateway("shoal", "Gateway")(pid), "it has another parent"
        monkeypatch.setattr(os, "getppid", os.getpid)  # as its child, it is what a sibling would be
        assert is_other_gateway("shoal", "Gateway")(pid) is is_peer
    assert not is_other_gateway("shoal", "Gateway")(pid), "it has ended"
    assert not is_other_gateway("shoal", "Gateway")(os.getpid())
