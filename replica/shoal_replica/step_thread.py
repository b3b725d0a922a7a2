"""The thread that executes an engine's steps, one after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from shoal_replica.executor import Executor, SchedulerOutput, StepResult
from shoal_replica.lookahead import Lookahead, PlannedStep

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Landed:
    """A step as it was executed."""

    output: SchedulerOutput
    result: StepResult
    step_s: float


@dataclass(frozen=True, slots=True)
class Flight:
    """A step submitted to the thread. ``future`` gives None if it was planned ahead and then not executed."""

    planned: SchedulerOutput | PlannedStep
    future: Future[Landed | None]
    is_ahead: bool

    @property
    def is_dropped(self) -> bool:
        """Whether it is known by now that it was planned ahead in vain."""
        future = self.future
        return future.done() and not future.cancelled() and future.exception() is None and future.result() is None


class StepThread:
    """Executes steps in order; a step that was planned ahead follows the one before it at once."""

    def __init__(self, executor: Executor, lookahead: Lookahead) -> None:
        self._executor = executor
        self._lookahead = lookahead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-step")
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="shoal-blocks")  # begun when it is first needed
        self._num_working = 0
        self._is_at_work = False

    def depart(self, output: SchedulerOutput) -> Flight:
        return Flight(output, self._thread.submit(self._execute, output), is_ahead=False)

    def depart_after(self, flight: Flight, planned: PlannedStep) -> Flight:
        """Execute ``planned`` right after ``flight``, if ``Lookahead.confirm`` agrees when that has ended."""
        return Flight(planned, self._thread.submit(self._execute_after, flight.future, planned), is_ahead=True)

    @property
    def has_other_work(self) -> bool:
        """Whether ``run`` is at work, or about to be: the executor must not be asked for anything else meanwhile."""
        return self._num_working > 0

    @property
    def is_at_other_work(self) -> bool:
        """Whether ``run`` is at work, so that a step waits for that."""
        return self._is_at_work

    async def run(self, work: Callable[[], T], then: Callable[[], None] = lambda: None) -> T:
        """Do other work of the executor, after the steps submitted before, and ``then`` on the loop, even if whoever
        waits is cancelled meanwhile: that ends only with the work. Raises what the work raises.
        """
        self._num_working += 1
        working = asyncio.wrap_future(self._thread.submit(self._do, work))

        def end(done: asyncio.Future[T]) -> None:
            self._num_working -= 1
            if not done.cancelled() and done.exception() is None:
                then()

        working.add_done_callback(end)
        return await _to_the_end(working)

    async def run_beside(self, work: Callable[[], T]) -> T:
        """Do work that need not wait for steps, and for which they need not wait. Ends and raises as ``run`` does."""
        return await _to_the_end(asyncio.wrap_future(self._beside.submit(work)))

    async def stop(self, timeout_s: float) -> bool:
        """Drop steps that have not begun. False if one still runs after ``timeout_s`` and so uses the executor."""
        try:
            async with asyncio.timeout(timeout_s):
                for thread in (self._thread, self._beside):
                    await asyncio.to_thread(thread.shutdown, cancel_futures=True)
        except TimeoutError:
            return False
        return True

    def _do(self, work: Callable[[], T]) -> T:
        self._is_at_work = True
        try:
            return work()
        finally:
            self._is_at_work = False

    def _execute(self, output: SchedulerOutput) -> Landed:
        started = time.perf_counter()
        result = self._executor.execute(output)
        return Landed(output, result, time.perf_counter() - started)

    def _execute_after(self, before: Future[Landed | None], planned: PlannedStep) -> Landed | None:
        """Execute ``planned`` unless it is no longer valid; then return None."""
        landed = before.result(0.0)
        output = None if landed is None else self._lookahead.confirm(planned, landed.output, landed.result)
        return None if output is None else self._execute(output)


async def _to_the_end(working: asyncio.Future[T]) -> T:
    """Wait for work that a thread does; however often cancelled, until it is over: what it uses must not be freed
    before.
    """
    cancelled: asyncio.CancelledError | None = None
    while not working.done():
        try:
            await asyncio.wait([working])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not working.cancelled():
            working.exception()  # counts as retrieved
        raise cancelled
    return working.result()
