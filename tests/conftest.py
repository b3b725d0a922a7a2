"""Unit, property and golden tests run anywhere: no ray, no torch, no network but loopback."""

from __future__ import annotations

import ipaddress
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent
LIGHT_FOLDERS = frozenset({"unit", "property", "golden"})
HEAVY_MODULES = frozenset({"torch", "ray", "transformers"})

# A busy machine is no failure.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden-write", action="store_true", help="write what happens into the golden files")


@pytest.fixture(autouse=True)
def _alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the light folders: ``import ray`` fails, and sockets connect to this machine only."""
    if _folder(request.path) in LIGHT_FOLDERS:
        monkeypatch.setitem(sys.modules, "ray", None)
        for name in ("connect", "connect_ex"):
            monkeypatch.setattr(socket.socket, name, _guarded(getattr(socket.socket, name)))


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests run in the background, for which shells ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a run of light tests alone if it has loaded a heavy module."""
    folders = {_folder(item.path) for item in session.items}
    heavy = sorted(HEAVY_MODULES & sys.modules.keys())
    if folders and folders <= LIGHT_FOLDERS and heavy:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nunit, property and golden tests do without {', '.join(heavy)}, which were imported")


def _folder(path: Path) -> str:
    return path.relative_to(HERE).parts[0]


def _guarded(connect):
    def guarded(self: socket.socket, address):
        if self.family != socket.AF_UNIX and not _is_loopback(address[0]):
            raise RuntimeError(f"a unit test may not connect to {address!r}")
        return connect(self, address)

    return guarded


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
