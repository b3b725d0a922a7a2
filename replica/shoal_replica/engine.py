"""The async loop of one replica: schedule, execute, update, publish, until it is stopped or a step fails."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from shoal_replica.block_exchange import BlockExchange
from shoal_replica.burst import Burst
from shoal_replica.errors import EngineDead, Unavailable
from shoal_replica.executor import Executor
from shoal_replica.loaded_adapters import LoadedAdapters
from shoal_replica.prefill_pace import PrefillPace
from shoal_replica.prefix_cache import BlockHash
from shoal_replica.reports import Reports, Subscriber
from shoal_replica.request import FinishReason, Request, TokenDelta
from shoal_replica.scheduler import Scheduler
from shoal_replica.stats import ReplicaStats
from shoal_replica.step_thread import Flight, StepThread

HEARTBEAT_S = 1.0
BEAT_S = 0.03
STEP_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


class Engine:
    """Runs a scheduler and an executor. All methods belong to the event loop that called ``start``.

    Steps run in one worker thread, which goes on by itself where ``Lookahead`` could plan the next step: the loop then
    processes a step's result while the next step runs. Otherwise the loop processes it, starts the next step and then
    publishes the result. Subscribers are called on the loop after each step, after each abort, and every ``BEAT_S``
    when idle or in a long step, so that they know how old their view is. While nothing changes, reports carry the same
    stats object until it is older than ``heartbeat_s``.

    A step longer than ``step_timeout_s`` counts as failed. ``adapters`` are the names of those that are loaded, in the
    set by which the scheduler checks requests.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        heartbeat_s: float = HEARTBEAT_S,
        step_timeout_s: float = STEP_TIMEOUT_S,
        adapters: set[str] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._heartbeat_s = heartbeat_s
        self._beat_s = min(BEAT_S, heartbeat_s)
        self._step_timeout_s = step_timeout_s
        self._finished: dict[str, asyncio.Future[None]] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._thread = StepThread(executor, scheduler.lookahead)
        self.adapters = LoadedAdapters(set() if adapters is None else adapters, executor, self._thread)
        self._task: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._draining = False
        self._burst = Burst()
        self._flight: Flight | None = None  # the step after the one that is awaited
        self._is_checked = False  # whether invariants were checked since the last step
        self._step_s = self._busy_s = 0.0
        self._pace = PrefillPace(scheduler.config.max_num_batched_tokens)
        self._rested_s = 0.0
        self._reports = Reports(scheduler, self.stats, heartbeat_s)
        self.blocks = BlockExchange(scheduler.kv, executor, self._thread, scheduler.totals, self._note_blocks)

    def start(self) -> None:
        """Begin stepping on the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="shoal-engine")

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call ``subscriber`` with every StepReport from now on. Returns a function that unsubscribes it."""
        return self._reports.subscribe(subscriber)

    def add(self, request: Request, num_coming_blocks: int = 0) -> asyncio.Future[None]:
        """Queue a request. If ``num_coming_blocks`` of its leading blocks are on their way here, it waits for
        ``release``. The future completes when its last sequence has ended; its tokens go to subscribers.

        Raises:
            EngineDead: a step has failed.
            Unavailable: the engine is draining, or the request's adapter is not loaded.
            InvalidArgument: the id is in use, or the tokens do not fit the model.
            ResourceExhausted: too many sequences are waiting.
        """
        self.check_health()
        if self._draining:
            raise Unavailable("the replica is draining")
        self._scheduler.add(request, num_coming_blocks)
        self._burst.note(time.monotonic(), len(self._finished), self._step_s)
        self._reports.note_change()
        finished = asyncio.get_running_loop().create_future()
        self._finished[request.request_id] = finished
        if request.adapter:
            self.adapters.use(request.adapter, finished)
        self._idle.clear()
        self._wake.set()
        return finished

    def release(self, request_id: str) -> None:
        """A held request may start. Unknown ids are ignored."""
        self._scheduler.release(request_id)
        self._reports.note_change()
        self._wake.set()

    def abort(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request, or one of its sequences, now; its blocks are free on return. Unknown ids are ignored."""
        deltas = self._scheduler.abort(request_id, index, reason)
        if deltas:
            self._reports.note_change()
            self._publish(deltas)

    def hand_back(self, request_id: str, also_started: bool = False) -> bool:
        """Give up a request of which nothing has been computed or, with ``also_started``, any but a beam search, so
        that another replica may run it or go on after its tokens. Its future raises Unavailable, and subscribers see no
        delta for its end. False if it cannot be given up or is unknown.
        """
        if not self._scheduler.may_leave(request_id, also_started):
            return False
        self._scheduler.abort(request_id, reason=FinishReason.MOVED)
        self._reports.note_change()
        self._note_end(request_id, Unavailable("the replica has handed the request back"))
        self._reports.publish()
        return True

    def stats(self) -> ReplicaStats:
        pace = self._pace.told(time.monotonic())
        return self._scheduler.stats(time.time(), self._step_s, self._draining, self._busy_s, pace)

    def cache_hashes(self) -> tuple[BlockHash, ...]:
        """Every hash in the prefix cache: a snapshot, to which the events of later reports apply.

        Events that no report has carried yet are published first, since the snapshot already includes them.
        """
        self._reports.publish()
        return tuple(self._scheduler.kv.cached_hashes())

    def uncached(self, block_hashes: tuple[BlockHash, ...]) -> tuple[BlockHash, ...]:
        """See ``KVCacheManager.uncached``."""
        return self._scheduler.kv.uncached(block_hashes)

    def block_heat(self) -> bytes:
        """One byte per block; see BlockPool.heat."""
        return self._scheduler.kv.pool.heat()

    def check_health(self) -> None:
        """Raise EngineDead if a step has failed."""
        if self._failure is not None:
            raise EngineDead(f"the engine stopped: {self._failure!r}") from self._failure

    async def ended(self) -> None:
        """Return once the engine has been stopped or has failed: no step follows, and all requests have ended."""
        assert self._task is not None
        await asyncio.wait([self._task])

    def check_invariants(self) -> None:
        self._scheduler.check_invariants()

    async def drain(self, timeout_s: float) -> bool:
        """Accept no more requests and wait for the present ones. False if some are left after ``timeout_s``."""
        self._draining = True
        self._reports.note_change()
        self._reports.publish()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        if self._failure is None:
            self._scheduler.check_invariants()
        return True

    async def stop(self) -> None:
        """End every request with FinishReason.ABORT, then the loop, the worker thread and the executor."""
        self._draining = True
        self._end_all(FinishReason.ABORT)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if not await self._thread.stop(STOP_TIMEOUT_S):
            logger.error("a step still runs %g s after the engine was stopped", STOP_TIMEOUT_S)
            return
        await asyncio.to_thread(self._executor.close)  # ranks may take a moment to end

    async def _run(self) -> None:
        try:
            while True:
                await self._step()
        except Exception as error:
            self._die(error)

    async def _step(self) -> None:
        """See one step through to its end. If the next could be planned, the worker thread runs it right after."""
        if self._flight is None and (left_s := self._gathers_s()):
            await self._gather(left_s)
            return
        flight = self._flight or self._depart()
        if flight is None:
            await self._rest()
            return
        self._is_checked = False
        self._reports.note_change()
        self._rested_s = 0.0
        self._flight = self._depart_after(flight)
        await self._land(flight)

    def _take_in(self, flight: Flight) -> None:
        """A step has ended: update the scheduler with its result, start the next one if that was not planned, and
        publish the result. Raises what the step raised.
        """
        landed = flight.future.result()
        if landed is None:  # it was planned ahead and then dropped
            self._flight = None  # and with it the step that was to follow
            self._go_on()
            return
        if flight.is_ahead:
            self._scheduler.lookahead.note_told(landed.output)
            self._scheduler.now = time.monotonic()
        self._step_s = landed.step_s
        self._busy_s += landed.step_s
        self._pace.take(landed.output.scheduled, 0, landed.step_s, time.monotonic())
        self._reports.note_change()
        deltas = self._scheduler.update(landed.output, landed.result, time.monotonic())
        try:
            self._go_on()
        finally:  # even if that fails, since the scheduler no longer knows of those that have ended
            self._publish(deltas, landed.step_s)

    def _go_on(self) -> None:
        """Start the next step, unless one is under way, or the rest of a burst is waited for."""
        if self._flight is None or self._flight.is_dropped:
            self._flight = None if self._gathers_s() else self._depart()

    def _depart(self) -> Flight | None:
        output = self._scheduler.schedule(time.monotonic())
        if output is None:
            self._scheduler.kv.host.note_dropped()
            return None
        return self._thread.depart(output)

    def _depart_after(self, flight: Flight) -> Flight | None:
        planned = self._scheduler.lookahead.plan(flight.planned)
        return None if planned is None else self._thread.depart_after(flight, planned)

    async def _land(self, flight: Flight) -> None:
        """Wait for the end of a step, publishing heartbeats until then. The result is processed in the callback that
        reports it, not when this task gets its turn: clients are waiting for the tokens.
        """
        started, loop = time.perf_counter(), asyncio.get_running_loop()
        taken: asyncio.Future[None] = loop.create_future()

        def hear() -> None:
            if taken.done():  # the engine has been stopped
                return
            try:
                self._take_in(flight)
            except BaseException as error:  # any error belongs to the task that awaits the step
                taken.set_exception(error)
            else:
                taken.set_result(None)

        flight.future.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(hear))
        try:
            while not (await asyncio.wait([taken], timeout=self._beat_s))[0]:
                if self._thread.is_at_other_work:  # the step may wait for that
                    started = time.perf_counter()
                if time.perf_counter() - started > self._step_timeout_s:
                    raise TimeoutError(f"a step took longer than {self._step_timeout_s:g} s")
                self._reports.publish()  # so that a long step is not taken for a dead replica
        finally:
            taken.cancel()
        taken.result()

    def _gathers_s(self) -> float:
        """Seconds left to wait for the rest of a burst."""
        left_s = 0.0 if self._draining else self._burst.left_s(time.monotonic())
        return left_s if left_s > 0.0 and self._has_room_for_one_more() else 0.0

    def _has_room_for_one_more(self) -> bool:
        """Whether nothing runs, and one more request like the waiting ones would fit into a step with them."""
        stats = self.stats()
        num_tokens = stats.num_waiting_tokens * (stats.num_waiting + 1)
        has_slot = stats.num_running == 0 and stats.num_waiting < stats.max_num_seqs
        return has_slot and 0 < num_tokens <= stats.max_num_batched_tokens * stats.num_waiting

    async def _gather(self, left_s: float) -> None:
        """Wait for the next request of a burst, for at most ``left_s``."""
        self._wake.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._wake.wait()

    async def _rest(self) -> None:
        """Wait for work. Publish a heartbeat after each idle beat; after ``heartbeat_s``, check the invariants."""
        self._wake.clear()
        try:
            async with asyncio.timeout(self._beat_s):
                await self._wake.wait()
        except TimeoutError:
            self._rested_s += self._beat_s
            if not self._is_checked and self._rested_s >= self._heartbeat_s:
                # Once per idle period: it takes a while with many blocks.
                self._scheduler.check_invariants()
                self._is_checked = True
            if not self._thread.has_other_work:
                self._executor.check_health()
            self._reports.publish()

    def _note_blocks(self) -> None:
        """Blocks have been given to another replica, or taken from one: let the gateways know."""
        self._reports.note_change()
        self._reports.publish()

    def _publish(self, deltas: Sequence[TokenDelta], step_s: float | None = None) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                self._note_end(delta.request_id)
        self._reports.publish(deltas, step_s)

    def _note_end(self, request_id: str, error: Exception | None = None) -> None:
        """A sequence has ended; if it was the last of its request, complete the request's future, or fail it with
        ``error``.
        """
        if request_id in self._scheduler or request_id not in self._finished:
            return
        finished = self._finished.pop(request_id)
        if not finished.done() and error is not None:
            finished.set_exception(error)
        elif not finished.done():
            finished.set_result(None)
        if not self._finished:
            self._idle.set()

    def _die(self, error: Exception) -> None:
        """Fail every request: no caller may be left waiting for an engine that has stopped."""
        self._failure = error
        logger.error("the engine stopped: a step failed", exc_info=error)
        self._end_all(FinishReason.ERROR)

    def _end_all(self, reason: FinishReason) -> None:
        request_ids = self._scheduler.request_ids()
        self._publish([delta for r in request_ids for delta in self._scheduler.abort(r, reason=reason)])
