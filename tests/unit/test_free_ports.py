"""Choosing free ports that are bound only some time later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shoal_cluster.commands import local_ray
from shoal_cluster.commands.local_ray import FIRST_PORT, USUAL_EPHEMERAL, free_ports


@pytest.fixture
def ephemeral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says which ports the system gives to outgoing connections."""
    path = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(local_ray, "EPHEMERAL_RANGE", path)
    return path


def test_no_outgoing_connection_is_given_one(ephemeral: Path) -> None:
    ephemeral.write_text("21000\t60999\n")
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert all(FIRST_PORT <= port < 21_000 for port in ports)


@pytest.mark.parametrize("told", [None, "1024 65535"], ids=["not told", "all"])
def test_where_that_cannot_be_they_are_free_all_the_same(ephemeral: Path, told: str | None) -> None:
    if told is not None:
        ephemeral.write_text(told)
    (port,) = free_ports(1)
    assert FIRST_PORT <= port < USUAL_EPHEMERAL
    socket.create_server(("127.0.0.1", port)).close()


def test_one_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not local_ray._is_free(port)
    monkeypatch.setattr(local_ray, "_is_free", lambda port: port % 2)
    assert all(port % 2 for port in free_ports(20))
