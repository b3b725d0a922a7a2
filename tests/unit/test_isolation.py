"""The guard that isolates the light test folders works."""

from __future__ import annotations

import importlib
import socket

import pytest


def test_ray_cannot_be_imported() -> None:
    with pytest.raises(ImportError):
        importlib.import_module("ray")


@pytest.mark.parametrize("address", [("192.0.2.1", 80), ("example.com", 80)])
def test_no_socket_leaves_the_machine(address: tuple[str, int]) -> None:
    with socket.socket() as outgoing, pytest.raises(RuntimeError, match="may not connect"):
        outgoing.connect(address)


def test_loopback_is_allowed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.connect(server.getsockname())
