"""An executor whose model is spread over several processes, one per rank."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import NoReturn

from shoal_replica import errors
from shoal_replica.adapter import AdapterConfig
from shoal_replica.config import EngineConfig
from shoal_replica.errors import ConfigError, EngineDead, ShoalError
from shoal_replica.executor import BlockPart, SchedulerOutput, StepResult
from shoal_replica.frames import frame
from shoal_replica.ranks.blame import stuck_ranks
from shoal_replica.ranks.channel import (
    Blocks,
    Done,
    Failed,
    FromRank,
    Load,
    RankLink,
    ReadBlocks,
    Ready,
    Refused,
    Setup,
    Step,
    Stop,
    Unload,
    WriteBlocks,
    readable,
)
from shoal_replica.ranks.launcher import RankLauncher, RankProcess

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 3.0
KILL_TIMEOUT_S = 5.0
ASKED_TIMEOUT_S = 120.0  # to answer anything but a step
POLL_S = 0.25  # while ranks start
HELLO_S = 10.0  # to say who it is, for whoever connects: the others wait meanwhile
LEAST_POLL_S = 0.01
BLAME_S = 0.5  # when ranks fail because another is lost: how long to wait for that one's own report

logger = logging.getLogger(__name__)


class RankExecutor:
    """Starts the ranks and sends each step to all of them; the rank that samples answers.

    The engine's process computes nothing itself, so a rank that hangs can be killed and leaves nothing behind here.
    If a rank dies, reports an error, or shows no progress for ``parallel.rank_timeout_s``, all of them are ended.

    Raises:
        ConfigError, NotFound, EngineDead: a rank could not start; the message names it.
    """

    def __init__(self, config: EngineConfig, launcher: RankLauncher, start_timeout_s: float = START_TIMEOUT_S) -> None:
        self._timeout_s = config.parallel.rank_timeout_s
        self._tensor_size = config.parallel.tensor_parallel_size
        self._links: list[RankLink] = []
        self._processes: list[RankProcess] = []
        self._sampled: tuple[tuple[int, int], ...] = ()
        self._failure: ShoalError | None = None
        try:
            self._start(config, launcher, monotonic() + start_timeout_s)
        except BaseException:
            self._kill_all()
            raise

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Run one step on all ranks.

        Raises:
            EngineDead: a rank failed, now or earlier; the message names it. All ranks have been ended.
        """
        self._raise_failure()
        started = monotonic()
        self._send(Step(output, self._sampled))
        try:
            return self._result(output.step, started)
        except KeyboardInterrupt:
            try:
                self._result(output.step, started)  # its answer must not be taken for the next step's
            except KeyboardInterrupt:
                self._give_up(0)
            raise

    def _send(self, step: Step) -> None:
        data = frame(step)
        for rank, link in enumerate(self._links):
            try:
                link.send(data)
            except TimeoutError:
                self._fail(rank, f"hangs: has not read its step for {self._timeout_s:g} s")
            except OSError:
                continue  # it is gone: what it sent before is read below
            except KeyboardInterrupt:  # some ranks have the step, and this one perhaps a part of it
                self._give_up(rank)
                raise

    def _give_up(self, rank: int) -> None:
        """End every rank: what they have of the step is not known."""
        with suppress(EngineDead):
            self._fail(rank, "was at a step when this process was interrupted")

    def _result(self, step: int, started: float) -> StepResult:
        """Wait until the ranks have run a step that they were sent at ``started``."""
        while True:
            for rank, message in self._poll(self._until_overdue_s(started)):
                if isinstance(message, Done) and message.step == step:
                    self._sampled = tuple((token.seq_id, token.token_id) for token in message.result.sampled)
                    return message.result
                self._fail(rank, f"sent an unexpected {type(message).__name__}")
            self._check_silence()
            self._check_progress(step, started)

    def load_adapter(self, adapter: AdapterConfig) -> Generator[None]:
        """Load it on all ranks, or on none, in one part. Raises ConfigError, and EngineDead as ``execute`` does."""
        refusals = _refusals(self._ask(dict.fromkeys(self._ranks, Load(adapter))))
        if refusals:
            self._ask({rank: Unload(adapter.name) for rank in self._ranks if rank not in refusals})
            _raise_first(refusals)
        yield from ()

    def unload_adapter(self, name: str) -> None:
        self._ask(dict.fromkeys(self._ranks, Unload(name)))

    @property
    def copies_beside_steps(self) -> bool:
        return False

    def read_blocks(self, block_ids: Sequence[int]) -> tuple[BlockPart, ...]:
        """Each rank's part of some blocks. Raises ConfigError if there is no memory for them, EngineDead as ``execute``
        does.
        """
        answers = self._ask(dict.fromkeys(self._ranks, ReadBlocks(tuple(block_ids))))
        _raise_first(_refusals(answers))
        return tuple(answer.part for answer in answers if isinstance(answer, Blocks))

    def write_blocks(self, block_ids: Sequence[int], parts: Sequence[BlockPart]) -> None:
        """Fill each rank's part of some blocks. Raises ConfigError if the contents are of another kind; EngineDead as
        ``execute`` does.
        """
        if len(parts) != len(self._ranks):
            raise ConfigError(f"blocks: are of {len(parts)} ranks; must be of {len(self._ranks)}")
        ids = tuple(block_ids)
        _raise_first(_refusals(self._ask({rank: WriteBlocks(ids, part) for rank, part in enumerate(parts)})))

    def check_health(self) -> None:
        """Raise EngineDead if a rank has failed. To be called only between steps."""
        self._raise_failure()
        for rank, message in self._poll(0.0):
            self._fail(rank, f"sent an unexpected {type(message).__name__}")
        self._check_silence()

    def close(self) -> None:
        """Ask the ranks to stop, wait briefly, then kill those that are left. Idempotent."""
        for link in self._links:
            try:
                link.send(frame(Stop()))
            except OSError:
                continue  # it is gone already
        deadline = monotonic() + STOP_TIMEOUT_S
        for process in self._processes:
            process.exit_reason(max(0.0, deadline - monotonic()))
        self._kill_all()
        self._failure = self._failure or EngineDead("the ranks have been stopped")

    @property
    def _ranks(self) -> range:
        return range(len(self._links))

    def _ask(self, messages: Mapping[int, Load | Unload | ReadBlocks | WriteBlocks]) -> list[Ready | Refused | Blocks]:
        """Have ranks do something between steps. Returns their answers, in the order of ``messages``."""
        self._raise_failure()
        for rank, message in messages.items():
            try:
                self._links[rank].send(frame(message))
            except TimeoutError:
                self._fail(rank, f"hangs: has not read what it was asked for {self._timeout_s:g} s")
            except OSError:
                continue  # it is gone: what it sent before is read below
        answers: dict[int, Ready | Refused | Blocks] = {}
        deadline = monotonic() + ASKED_TIMEOUT_S
        while waiting := messages.keys() - answers.keys():
            for rank, answer in self._poll(POLL_S):
                if rank not in waiting or not isinstance(answer, Ready | Refused | Blocks):
                    self._fail(rank, f"sent an unexpected {type(answer).__name__}")
                answers[rank] = answer
            self._check_silence()
            if (late := messages.keys() - answers.keys()) and monotonic() > deadline:
                self._fail(min(late), f"did not answer in {ASKED_TIMEOUT_S:g} s")
        return [answers[rank] for rank in messages]

    def _start(self, config: EngineConfig, launcher: RankLauncher, deadline: float) -> None:
        num_ranks, key = config.parallel.num_ranks, secrets.token_hex(16)
        with socket.create_server((launcher.host, 0)) as listener:
            port = listener.getsockname()[1]
            for rank in range(num_ranks):
                self._processes.append(launcher.launch(rank, port, key))
            self._links = self._accept_all(listener, key, deadline)
        keeper = self._links[0].hello
        setup = frame(Setup(config, keeper.host, keeper.store_port, tuple(link.hello.host for link in self._links)))
        for link in self._links:
            link.send(setup)
        waiting = set(range(num_ranks))
        while waiting:
            for rank, message in self._poll(POLL_S):
                if not isinstance(message, Ready):
                    self._fail(rank, f"sent an unexpected {type(message).__name__}")
                waiting.discard(rank)
            if waiting and monotonic() > deadline:
                self._fail(min(waiting), "was not ready in time")

    def _accept_all(self, listener: socket.socket, key: str, deadline: float) -> list[RankLink]:
        """A link to each rank, in rank order. Connections without the right key are closed."""
        links: dict[int, RankLink] = {}
        listener.settimeout(POLL_S)
        while len(links) < len(self._processes):
            if monotonic() > deadline:
                raise EngineDead(f"rank {min(set(range(len(self._processes))) - links.keys())} did not call in time")
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                for rank, process in enumerate(self._processes):
                    if rank not in links and (reason := process.exit_reason(0.0)) is not None:
                        raise EngineDead(f"rank {rank} ended before it was ready: {reason}") from None
                continue
            try:
                link = RankLink(connection, self._timeout_s, min(HELLO_S, deadline - monotonic()))
            except (OSError, ValueError):  # msgspec's errors are ValueErrors
                connection.close()
                continue
            if not secrets.compare_digest(link.hello.key, key) or link.hello.rank in links:
                link.close()
                continue
            links[link.hello.rank] = link
            self._links = [links[rank] for rank in sorted(links)]  # so that they are closed if this fails
        return self._links

    def _poll(self, timeout_s: float) -> list[tuple[int, FromRank]]:
        """Messages from all ranks except pulses, after at most ``timeout_s``. Raises a rank's failure."""
        messages: list[tuple[int, FromRank]] = []
        bereft: dict[int, str] = {}
        for link in readable(self._links, timeout_s):
            rank = self._links.index(link)
            try:
                heard = link.read()
            except (OSError, ValueError) as error:
                self._fail(rank, self._death(rank, str(error)))
            for message in heard:
                if not isinstance(message, Failed):
                    messages.append((rank, message))
                elif message.is_secondary:
                    bereft[rank] = message.message
                else:
                    self._fail(rank, message.message, message.kind)
        if bereft:
            self._wait_for_blame(bereft)
        return messages

    def _wait_for_blame(self, bereft: dict[int, str]) -> NoReturn:
        """Some ranks report that they have lost another one. The end of that rank is the cause, but may become known
        only a little later.

        Args:
            bereft: the message of each rank that ends only because it lost another, and is not to blame.
        """
        deadline = monotonic() + BLAME_S
        others = [link for rank, link in enumerate(self._links) if rank not in bereft]
        while (left := deadline - monotonic()) > 0:
            for link in readable(others, left):
                rank = self._links.index(link)
                try:
                    heard = link.read()
                except (OSError, ValueError) as error:
                    self._fail(rank, self._death(rank, str(error)))
                for message in heard:
                    if isinstance(message, Failed) and not message.is_secondary:
                        self._fail(rank, message.message, message.kind)
                    if isinstance(message, Failed):
                        others.remove(link)
                        break
        self._fail(*next(iter(bereft.items())))

    def _death(self, rank: int, error: str) -> str:
        reason = self._processes[rank].exit_reason(BLAME_S)
        return f"died: {reason}" if reason is not None else f"cut its channel: {error}"

    def _check_silence(self) -> None:
        now = monotonic()
        for rank, link in enumerate(self._links):
            if now - link.heard_s > self._timeout_s:
                self._fail(rank, f"hangs: no sign of life for {self._timeout_s:g} s")

    def _until_overdue_s(self, started: float) -> float:
        """Seconds until the earliest possible timeout of any rank, if nothing more is heard."""
        since = min(max(started, *(link.progressed_s for link in self._links)), *(link.heard_s for link in self._links))
        return max(0.0, since + self._timeout_s - monotonic()) + LEAST_POLL_S

    def _check_progress(self, step: int, started: float) -> None:
        """Fail if no rank has progressed for the timeout; the rank that does not wait for another is to blame."""
        last = max(started, *(link.progressed_s for link in self._links))
        if monotonic() - last <= self._timeout_s:
            return
        first, *others = stuck_ranks([link.pulse for link in self._links], step, self._tensor_size)
        also = f" (with rank {', '.join(map(str, others))})" if others else ""
        self._fail(first, f"hangs{also}: no progress for {self._timeout_s:g} s")

    def _fail(self, rank: int, what: str, kind: str = "") -> NoReturn:
        """End every rank and raise. ``kind`` names the error's type if it is a ShoalError."""
        hello = self._links[rank].hello if rank < len(self._links) else None
        who = f"rank {rank}" + (f" (pid {hello.pid} on {hello.host})" if hello is not None else "")
        error_type: Callable[[str], ShoalError] = getattr(errors, kind) if kind in _PLAIN_ERRORS else EngineDead
        self._failure = error_type(f"{who} {what}" if not kind else f"{who}: {what}")
        logger.error("%s", self._failure)
        self._kill_all()
        raise self._failure

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise EngineDead(str(self._failure)) from self._failure

    def _kill_all(self) -> None:
        """Kill all ranks first, then wait for each: no rank goes on while another's end is awaited."""
        for process in self._processes:
            process.kill()
        deadline = monotonic() + KILL_TIMEOUT_S
        for process in self._processes:
            process.exit_reason(max(0.0, deadline - monotonic()))
        for link in self._links:
            link.close()
        self._links = []


_PLAIN_ERRORS = ("ConfigError", "NotFound", "Unavailable")


def _refusals(answers: Sequence[Ready | Refused | Blocks]) -> dict[int, str]:
    """Why those ranks refuse that do; ``answers`` are of all ranks."""
    return {rank: answer.message for rank, answer in enumerate(answers) if isinstance(answer, Refused)}


def _raise_first(refusals: Mapping[int, str]) -> None:
    for rank, why in refusals.items():
        raise ConfigError(f"rank {rank}: {why}")
