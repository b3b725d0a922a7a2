"""A worker process from the benchmark's side: started, sent requests, stopped while others run, and always ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from typing import IO, Any

import psutil

from shoal_replica.bench.contender import Contender
from shoal_replica.bench.processor import ForeignShare
from shoal_replica.errors import ConfigError, DeadlineExceeded, ShoalError, Unavailable

MAX_LINE = 1 << 26
SHOWN_LOG_LINES = 12
SHOWN_LOG_BYTES = 4096
END_TIMEOUT_S = 10.0
LOADING = "loading"
NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


@contextlib.asynccontextmanager
async def running(contender: Contender, start_timeout_s: float) -> AsyncIterator[WorkerProcess]:
    """Start a contender's worker and yield it loaded; on exit, its whole process tree is killed.

    Raises:
        ConfigError: the worker cannot be started, or cannot load its engine.
        Unavailable, DeadlineExceeded: it ended while loading, or took too long.
    """
    with tempfile.TemporaryFile() as log:
        started = time.perf_counter()
        try:
            process = await asyncio.create_subprocess_exec(
                *contender.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={k: v for k, v in os.environ.items() if k not in NOT_INHERITED} | dict(contender.environment),
                start_new_session=True,
                limit=MAX_LINE,
            )
        except OSError as error:
            raise ConfigError(f"{contender.name}: cannot run {contender.command[0]}: {error.strerror}") from None
        worker = WorkerProcess(contender, process, log)
        try:
            await worker.load(started, start_timeout_s)
            yield worker
        finally:
            await worker.end()


class WorkerProcess:
    """A started worker; made by ``running``.

    Attributes:
        ready_s: seconds from the start of the process to the engine's first token.
        ready_foreign: share of a core that other processes used meanwhile.
        hello: what the worker reported of itself: ``versions`` and ``info``.
    """

    def __init__(self, contender: Contender, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self.contender = contender
        self.name = contender.name
        self.ready_s = 0.0
        self.ready_foreign = 0.0
        self.hello: dict[str, Any] = {}
        self._process = process
        self._log = log
        self._is_killed = False

    async def load(self, started: float, timeout_s: float) -> None:
        """Wait for the engine's first token. ``started``: when the process was started, by ``perf_counter``."""
        foreign = ForeignShare(self.cpu_s)
        self.hello = await self._answer(timeout_s, LOADING)
        self.ready_s = time.perf_counter() - started
        self.ready_foreign = foreign.read()

    async def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and wait for the answer.

        Raises:
            Unavailable: the worker has failed or ended.
            DeadlineExceeded: no answer in time.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        return await self._answer(timeout_s, f"doing {request['op']!r}")

    def pause(self) -> None:
        """Stop every thread of the process tree, spinning ones too, until ``resume``."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def cpu_s(self) -> float:
        """CPU seconds that the process tree has used."""
        total = 0.0
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def peak_bytes(self) -> int:
        """The sum of the peak resident set sizes of the process tree."""
        return sum(_peak_bytes(process.pid) for process in self._tree())

    async def _answer(self, timeout_s: float, doing: str) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                with contextlib.suppress(ConnectionError):  # it has ended; anything it wrote before is read below
                    await stdin.drain()
                line = await stdout.readline()
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.name}: no answer in {timeout_s:g} s of {doing}{self._last_words()}"
            ) from None
        if not line:
            status = await self._status()
            raise Unavailable(f"{self.name}: its process ended ({status}) while {doing}{self._last_words()}")
        try:
            answer = json.loads(line)
        except ValueError:
            raise Unavailable(f"{self.name}: answered {line[:80]!r}, which is not JSON, while {doing}") from None
        if not isinstance(answer, dict):
            raise Unavailable(f"{self.name}: answered {line[:80]!r}, which is not an object, while {doing}")
        if "failed" in answer:
            kind: type[ShoalError] = ConfigError if doing == LOADING else Unavailable
            raise kind(f"{self.name} ({self.contender.command[0]}): {answer['failed']}")
        return answer

    async def _status(self) -> str:
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                status = await self._process.wait()
        except TimeoutError:
            return "its output closed"
        return f"status {status}" if status >= 0 else signal.Signals(-status).name

    def _last_words(self) -> str:
        log = self._log.fileno()  # the worker writes at this file's position, which must not move
        tail = os.pread(log, SHOWN_LOG_BYTES, max(0, os.fstat(log).st_size - SHOWN_LOG_BYTES))
        lines = tail.decode(errors="replace").strip().splitlines()[-SHOWN_LOG_LINES:]
        return "; it last wrote:\n  " + "\n  ".join(lines) if lines else ""

    def kill(self) -> None:
        """Kill the process tree at once: a worker has nothing to save. The process group is killed too, for children
        whose parent has ended.
        """
        if self._is_killed:
            return  # its process ids may have been reused
        self._is_killed = True
        self._signal(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Kill the process tree and wait for the worker's end."""
        self.kill()
        async with asyncio.timeout(END_TIMEOUT_S):
            await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _tree(self) -> list[psutil.Process]:
        if self._process.returncode is not None:
            return []
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def _peak_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
