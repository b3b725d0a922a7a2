"""Starts ranks as processes on this host. The cluster has its own launcher, which uses Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Protocol

import msgspec

from shoal_replica.config import ParallelConfig
from shoal_replica.errors import ConfigError
from shoal_replica.ranks.channel import RankAddress

LOOPBACK = "127.0.0.1"
RANK_COMMAND = (sys.executable, "-m", "shoal_replica.ranks.worker")
VISIBLE_DEVICES = {"npu": "ASCEND_RT_VISIBLE_DEVICES"}


class RankProcess(Protocol):
    """A started rank."""

    def exit_reason(self, timeout_s: float) -> str | None:
        """How the process ended, in words; None if it has not ended within ``timeout_s``."""
        ...

    def kill(self) -> None:
        """Kill the process without waiting; ``exit_reason`` waits until it has ended. Idempotent."""
        ...


class RankLauncher(Protocol):
    """Starts ranks."""

    @property
    def host(self) -> str:
        """The address of this host at which the ranks reach the engine."""
        ...

    def launch(self, rank: int, port: int, key: str) -> RankProcess:
        """Start a rank that dials ``host:port``; does not wait for it."""
        ...


class LocalRanks:
    """Ranks as child processes in sessions of their own, so that an interrupt reaches only the engine.

    Args:
        command: runs ``serve_rank`` with the address that it reads from standard input.
    """

    host = LOOPBACK

    def __init__(self, parallel: ParallelConfig, command: Sequence[str] = RANK_COMMAND) -> None:
        self._parallel = parallel
        self._command = list(command)

    def launch(self, rank: int, port: int, key: str) -> RankProcess:
        process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, env=self._environment(rank), start_new_session=True
        )
        address = RankAddress(self.host, port, key, rank, self.host)
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(msgspec.json.encode(address) + b"\n")
        return _ChildProcess(process)

    def _environment(self, rank: int) -> dict[str, str]:
        """The parent's environment, with its module path, the number of threads, and one of its devices."""
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": str(self._parallel.num_threads),
        }
        variable = VISIBLE_DEVICES.get(self._parallel.device)
        if variable is not None:
            visible = os.environ.get(variable)
            devices = visible.split(",") if visible else [str(i) for i in range(self._parallel.num_ranks)]
            if rank >= len(devices):
                limit = f"must name {self._parallel.num_ranks} devices, one for each rank"
                raise ConfigError(f"{variable}: got {visible!r}; {limit}")
            environment[variable] = devices[rank]
        return environment


class _ChildProcess:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def exit_reason(self, timeout_s: float) -> str | None:
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        return f"signal {-status}" if status < 0 else f"exit status {status}"

    def kill(self) -> None:
        self._process.kill()
