"""The async loop of one replica: schedule, execute, update, publish; until it is stopped or a step fails."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from shoal_replica.errors import EngineDead, Unavailable
from shoal_replica.executor import Executor
from shoal_replica.prefill_pace import PrefillPace
from shoal_replica.prefix_cache import BlockHash
from shoal_replica.request import FinishReason, Request, TokenDelta
from shoal_replica.scheduler import Scheduler
from shoal_replica.stats import ReplicaStats

HEARTBEAT_S = 1.0
BEAT_S = 0.03
STEP_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What changed, for those who follow the engine: tokens, block events, the ledger after them.

    ``step_s`` is the length of the step that has ended; None when the report has another occasion.
    """

    deltas: tuple[TokenDelta, ...]
    stored: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]
    stats: ReplicaStats
    step_s: float | None = None


Subscriber = Callable[[StepReport], None]


class Engine:
    """Runs a scheduler and an executor. All methods belong to the event loop that called ``start``.

    Steps run in one worker thread. Subscribers are called on the loop after each step, after each abort, and every
    ``BEAT_S`` when idle or in a long step, so that they know how old their picture is. The stats of such a report are
    the very ones of the last report while nothing has changed and they are not older than ``heartbeat_s``.
    A step longer than ``step_timeout_s`` counts as failed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        heartbeat_s: float = HEARTBEAT_S,
        step_timeout_s: float = STEP_TIMEOUT_S,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._heartbeat_s = heartbeat_s
        self._beat_s = min(BEAT_S, heartbeat_s)
        self._step_timeout_s = step_timeout_s
        self._subscribers: list[Subscriber] = []
        self._finished: dict[str, asyncio.Future[None]] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-step")
        self._task: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._draining = False
        self._held: StepReport | None = None  # of the last step, until the next one runs
        self._is_checked = False  # the books, since the last step
        self._step_s = self._busy_s = 0.0
        self._pace = PrefillPace()
        self._told = self.stats()
        self._is_changed = False  # since the last report
        self._rested_s = 0.0

    def start(self) -> None:
        """Begin stepping on the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="shoal-engine")

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call ``subscriber`` with every StepReport from now on. Returns the way to stop that."""
        self._subscribers.append(subscriber)
        return lambda: self._subscribers.remove(subscriber)

    def add(self, request: Request) -> asyncio.Future[None]:
        """Queue a request. The future is done when its last sequence has ended; its tokens go to subscribers.

        Raises:
            EngineDead: a step has failed.
            Unavailable: the engine is draining.
            ResourceExhausted: too many sequences wait.
        """
        self.check_health()
        if self._draining:
            raise Unavailable("the replica is draining")
        self._scheduler.add(request)
        self._is_changed = True
        finished = asyncio.get_running_loop().create_future()
        self._finished[request.request_id] = finished
        self._idle.clear()
        self._wake.set()
        return finished

    def abort(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request, or one sequence of it, now; its blocks are free on return. Unknown ids are ignored."""
        deltas = self._scheduler.abort(request_id, index, reason)
        if deltas:
            self._is_changed = True
            self._publish(deltas)

    def stats(self) -> ReplicaStats:
        stats = self._scheduler.stats(time.time(), self._step_s, self._draining, self._busy_s)
        return replace(stats, token_s=self._pace.token_s)

    def cache_hashes(self) -> tuple[BlockHash, ...]:
        """Every hash in the prefix cache; with the events of later reports, a complete picture.

        Events that no report has carried yet are published first: they are in the picture already.
        """
        self._publish(())
        return tuple(self._scheduler.cache_hashes())

    def block_heat(self) -> bytes:
        """One byte a block; see BlockPool.heat."""
        return self._scheduler.block_heat()

    def check_health(self) -> None:
        """Raise EngineDead if a step has failed."""
        if self._failure is not None:
            raise EngineDead(f"the engine stopped: {self._failure!r}") from self._failure

    def check_invariants(self) -> None:
        self._scheduler.check_invariants()

    async def drain(self, timeout_s: float) -> bool:
        """Take no more requests and wait for those here. False if some were left after ``timeout_s``."""
        self._draining = self._is_changed = True
        self._publish(())
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        self._scheduler.check_invariants()
        return True

    async def stop(self) -> None:
        """End every request with FinishReason.ABORT, then the loop, the worker thread and the executor."""
        self._draining = True
        self._end_all(FinishReason.ABORT)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.to_thread(self._thread.shutdown)
        except TimeoutError:
            logger.error("a step still runs %g s after the engine was stopped", STOP_TIMEOUT_S)
            return  # its thread still uses the executor
        await asyncio.to_thread(self._executor.close)  # ranks may take a moment to end

    async def _run(self) -> None:
        try:
            while True:
                await self._step()
        except Exception as error:
            self._die(error)

    async def _step(self) -> None:
        output = self._scheduler.schedule(time.monotonic())
        if output is None:
            self._publish_held()
            await self._rest()
            return
        self._is_checked = False
        self._is_changed = True
        self._rested_s = 0.0
        started = time.perf_counter()
        loop = asyncio.get_running_loop()
        step = loop.run_in_executor(self._thread, self._executor.execute, output)
        self._publish_held()  # the last step's tokens, while this one runs
        try:
            while not (await asyncio.wait([step], timeout=self._beat_s))[0]:
                if time.perf_counter() - started > self._step_timeout_s:
                    raise TimeoutError(f"a step took longer than {self._step_timeout_s:g} s")
                self._publish(())  # a long step is not taken for a death
        finally:
            step.cancel()
        self._step_s = time.perf_counter() - started
        self._busy_s += self._step_s
        self._pace.take(sum(share.num_new_tokens for share in output.scheduled), len(output.scheduled), self._step_s)
        self._is_changed = True
        self._held = self._report(self._scheduler.update(output, step.result()), self._step_s)

    def _publish_held(self) -> None:
        """Tell of the last step. Nothing is held while the loop does anything else, so nobody is told out of order."""
        if self._held is not None:
            held, self._held = self._held, None
            self._tell(held)

    async def _rest(self) -> None:
        """Wait for work; after each beat without any say that we live, after a heartbeat's time look the books over."""
        self._wake.clear()
        try:
            async with asyncio.timeout(self._beat_s):
                await self._wake.wait()
        except TimeoutError:
            self._rested_s += self._beat_s
            if (
                not self._is_checked and self._rested_s >= self._heartbeat_s
            ):  # once: it takes a while where there are many blocks
                self._scheduler.check_invariants()
                self._is_checked = True
            self._executor.check_health()
            self._publish(())

    def _publish(self, deltas: Iterable[TokenDelta]) -> None:
        self._tell(self._report(deltas))

    def _report(self, deltas: Iterable[TokenDelta], step_s: float | None = None) -> StepReport:
        """What has changed since the last report; ``step_s`` is the length of the step that made the change."""
        stored, removed = self._scheduler.take_block_events()
        if self._is_changed or time.time() - self._told.time_s >= self._heartbeat_s:
            self._told = self.stats()
            self._is_changed = False
        return StepReport(tuple(deltas), tuple(stored), tuple(removed), self._told, step_s)

    def _tell(self, report: StepReport) -> None:
        for delta in report.deltas:
            if delta.finish_reason is not None:
                self._note_end(delta.request_id)
        for subscriber in tuple(self._subscribers):
            subscriber(report)

    def _note_end(self, request_id: str) -> None:
        """A sequence has ended; when it was its request's last, whoever awaits the request goes on."""
        if request_id in self._scheduler or request_id not in self._finished:
            return
        finished = self._finished.pop(request_id)
        if not finished.done():
            finished.set_result(None)
        if not self._finished:
            self._idle.set()

    def _die(self, error: Exception) -> None:
        """Fail every request: nobody may wait on an engine that has stopped."""
        self._failure = error
        logger.error("the engine stopped: a step failed", exc_info=error)
        self._publish_held()
        self._end_all(FinishReason.ERROR)

    def _end_all(self, reason: FinishReason) -> None:
        request_ids = self._scheduler.request_ids()
        self._publish([delta for r in request_ids for delta in self._scheduler.abort(r, reason=reason)])
