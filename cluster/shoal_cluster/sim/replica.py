"""A replica in simulated time: the real Scheduler, with a StepTime in place of a model."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import msgspec

from shoal_cluster.policies.block_offer import BlockOffer
from shoal_cluster.policies.wishes import Wish
from shoal_cluster.sim.event_loop import EventLoop
from shoal_cluster.sim.faults import Hindrances
from shoal_cluster.sim.latency import StepTime
from shoal_cluster.sim.steady import FIRST_OUTPUT_TOKEN_ID, CompactRequest, SteadyScheduler, Stretch
from shoal_cluster.sim.transfers import Transfers
from shoal_cluster.sim.workload import SimRequest
from shoal_replica.config import CacheConfig, SchedulerConfig
from shoal_replica.executor import SchedulerOutput
from shoal_replica.prefill_pace import PrefillPace
from shoal_replica.prefix_cache import BlockHash
from shoal_replica.request import Request, TokenDelta
from shoal_replica.sampling_params import SamplingParams
from shoal_replica.stats import ReplicaStats

BEAT_S = 0.03  # this long into a stalled or slowed step, the replica reports its load
GATHER_S = 0.005  # wishes are collected for this long before they are passed on to the gateways
MAX_STRETCH_S = 1.0  # longest stretch of steps without a report


class FeedMessage(msgspec.Struct, frozen=True):
    """What a replica tells the gateways: after a step, when a request or wishes have come, and as a heartbeat.

    ``stats`` None: the last ones still hold. ``added``: requests that these ``stats`` are the first to count;
    ``promised``: reservations that no stats count yet. ``in_flight``: requests that have arrived, each with how many
    blocks of its prompt were cached then; ``landed``: requests that have left before their first token. ``wishes``:
    requests that gateways (by id) hold and mean to send here.
    """

    stats: ReplicaStats | None = None
    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    added: tuple[str, ...] = ()
    deltas: tuple[TokenDelta, ...] = ()
    promised: tuple[Promise, ...] = ()
    wishes: tuple[tuple[str, Wish], ...] = ()
    in_flight: tuple[tuple[str, int], ...] = ()
    landed: tuple[str, ...] = ()


class Promise(msgspec.Struct, frozen=True):
    """What a gateway has reserved for a request that it sends."""

    request_id: str
    gateway_id: str
    num_blocks: int
    num_tokens: int


class Order(msgspec.Struct, frozen=True):
    """A request as a gateway sends it; the rest of the request is in the trace.

    ``num_output_tokens``: tokens that other replicas have generated already. ``due_s``, ``yields`` and
    ``is_prefill_only`` as in Request.
    ``offer``: another replica has more of its blocks.
    """

    request_id: str
    due_s: float = math.inf
    yields: bool = False
    num_output_tokens: int = 0
    promise: Promise | None = None
    offer: BlockOffer | None = None
    is_prefill_only: bool = False


class EndedReplica(msgspec.Struct, frozen=True):
    """A replica at the end of a run, with its invariants checked: final stats, seconds spent in steps, when it started
    and ended (infinite if it lasted to the end), and the number of blocks cached.
    """

    replica_id: str
    stats: ReplicaStats
    busy_s: float
    started_s: float
    ended_s: float
    num_cached_blocks: int


class SimReplica:
    """Runs steps while it has work.

    Args:
        publish: called with each feed message.
        hindrances: the stalls and slowdowns of this replica.
        crash_s: when ``crash`` will be called.
        transfers: how it takes blocks of others; None if it does not.
    """

    def __init__(
        self,
        replica_id: str,
        loop: EventLoop,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        step_time: StepTime,
        publish: Callable[[SimReplica, FeedMessage], None],
        hindrances: Hindrances | None = None,
        crash_s: float = math.inf,
        transfers: Transfers | None = None,
    ) -> None:
        self.replica_id = replica_id
        max_model_len = cache_config.num_blocks * cache_config.block_size
        self.scheduler = SteadyScheduler(scheduler_config, cache_config, max_model_len)
        self.draining = False
        self.busy_s = 0.0
        self.started_s, self.ended_s = loop.now, math.inf
        self._loop = loop
        self._step_time = step_time
        self.publish = publish
        self._hindrances = hindrances or Hindrances()
        self._crash_s = crash_s
        self._transfers = transfers
        self._has_crashed = False
        self._added: list[str] = []
        self._promised: list[Promise] = []  # of requests that no stats have counted yet
        self._wishes: tuple[tuple[str, Wish], ...] = ()  # each with the id of its gateway
        self._is_telling = False
        self._step_s = 0.0
        self.told_s = loop.now
        self._began_s = loop.now  # when the running step or stretch of steps began
        self._pace = PrefillPace(scheduler_config.max_num_batched_tokens)
        self._is_stepping = False
        self._stretch: Stretch | None = None
        self._on_cut: Callable[[list[str]], None] | None = None

    @property
    def is_idle(self) -> bool:
        """No step is running or about to start."""
        return not self._is_stepping

    @property
    def busy_so_far_s(self) -> float:
        """``busy_s``, and what the running step or stretch of steps has taken so far."""
        is_running = self._is_stepping and not self._has_crashed
        return self.busy_s + (self._loop.now - self._began_s if is_running else 0.0)

    def place(self, order: Order, request: SimRequest, block_hashes: tuple[BlockHash, ...]) -> None:
        """A gateway sends ``request``; ``block_hashes`` are of its full blocks. Lost without notice after a crash.

        Raises as ``add`` does.
        """
        if self._has_crashed:
            return
        engine_request = CompactRequest(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids(),
            sampling_params=SamplingParams(
                max_tokens=request.num_output_tokens, temperature=0.0, seed=0, ignore_eos=True
            ),
            arrival_s=self._loop.now,
            due_s=order.due_s,
            tenant=request.tenant,
            yields=order.yields,
            block_hashes=block_hashes,
            cache_salt=str(request.round),
            output_token_ids=(FIRST_OUTPUT_TOKEN_ID,) * order.num_output_tokens,
            is_prefill_only=order.is_prefill_only,
        )
        self.add(engine_request, order.promise, order.offer)

    def add(self, request: Request, promise: Promise | None = None, offer: BlockOffer | None = None) -> None:
        """Queue a request and publish its ``promise``. Raises ResourceExhausted as the scheduler does."""
        num_coming_blocks = 0
        if offer is not None and self._transfers is not None and self.scheduler.has_room:
            token_s, release = self._pace.told(self._loop.now).token_s, partial(self._release, request.request_id)
            num_coming_blocks = self._transfers.begin(self.scheduler, request, offer, token_s, release)
        self.scheduler.add(request, num_coming_blocks)
        self._added.append(request.request_id)
        if promise is not None:
            num_cached_blocks = len(request.block_hashes) - len(self.scheduler.kv.uncached(request.block_hashes))
            self._promised.append(promise)
            self._tell_promises(((request.request_id, num_cached_blocks),))
        self.go_on()

    def _release(self, request_id: str) -> None:
        """The blocks that a request has waited for are here, or will not come."""
        if not self._has_crashed:
            self.scheduler.release(request_id)
            self.tell(())
            self.go_on()

    def go_on(self) -> None:
        """There is something new to schedule, as soon as the running step has ended."""
        self._cut_stretch()
        if not self._is_stepping:
            self._is_stepping, self._began_s = True, self._loop.now
            self._loop.at(self._loop.now, self._start_step, last=True)

    def wish(self, gateway_id: str, wishes: tuple[Wish, ...]) -> None:
        """Replace what a gateway means to send here, and pass it on to the gateways soon."""
        others = tuple((of, wish) for of, wish in self._wishes if of != gateway_id)
        self._wishes = (*others, *((gateway_id, wish) for wish in wishes))
        if not self._is_telling:
            self._is_telling = True
            self._loop.after(GATHER_S, self._tell_promises, last=True)

    def _tell_promises(self, in_flight: tuple[tuple[str, int], ...] = ()) -> None:
        self._is_telling = False
        self.publish(self, FeedMessage(promised=tuple(self._promised), wishes=self._wishes, in_flight=in_flight))

    def hand_back(self, request_id: str) -> bool:
        """Give up a request if none of it has been computed; return whether it was given up."""
        if self._has_crashed or not self.scheduler.may_leave(request_id):
            return False
        self.scheduler.abort(request_id)
        self.tell((), landed=(request_id,))
        return True

    def drain(self) -> None:
        """Take no new requests; finish those that are here."""
        self.draining = True
        self.tell(())

    def cut(self, on_cut: Callable[[list[str]], None]) -> None:
        """End all requests after the running step; ``on_cut`` gets their ids."""
        if self._has_crashed:
            return
        self._on_cut = on_cut
        self._cut_stretch()
        if not self._is_stepping:
            self._abort_all()

    def crash(self) -> None:
        """The process dies: messages already sent still arrive, nothing follows."""
        untold = tuple(self.scheduler.abort_all())  # tokens of finished steps
        self.publish(self, FeedMessage(deltas=untold))
        self.publish = lambda replica, message: None
        self.busy_s = self.busy_so_far_s
        self._has_crashed = self._is_stepping = True

    def tell(self, deltas: tuple[TokenDelta, ...], landed: tuple[str, ...] = ()) -> None:
        """Publish the current ledger: stats, block events and ``deltas``."""
        if self._has_crashed:
            return
        stored, removed = self.scheduler.take_block_events()
        if self.scheduler.shared_pool is not None:
            self.scheduler.shared_pool.store(stored)
        added, self._added, self.told_s = tuple(self._added), [], self._loop.now
        self._promised.clear()
        now = self._loop.now
        stats = self.scheduler.stats(now, self._step_s, self.draining, self.busy_s, self._pace.told(now))
        message = FeedMessage(
            stats=stats,
            stored=tuple(stored),
            removed=tuple(removed),
            added=added,
            deltas=deltas,
            wishes=self._wishes,
            landed=landed,
        )
        self.publish(self, message)

    def beat(self) -> None:
        """Send a heartbeat: alive, and the last stats still hold."""
        self.publish(self, FeedMessage(promised=tuple(self._promised), wishes=self._wishes))

    def ended(self) -> EndedReplica:
        """The final state, at the end of a run. Asserts the invariants and that no block is allocated."""
        self.scheduler.check_invariants()
        assert not self.scheduler.has_work
        stats = self.scheduler.stats(self._loop.now)
        assert stats.num_allocated_blocks == 0
        num_cached_blocks = len(list(self.scheduler.kv.cached_hashes()))
        return EndedReplica(self.replica_id, stats, self.busy_s, self.started_s, self.ended_s, num_cached_blocks)

    def _abort_all(self) -> None:
        request_ids = self.scheduler.request_ids()
        self.tell(tuple(self.scheduler.abort_all()))
        on_cut, self._on_cut = self._on_cut, None
        assert on_cut is not None
        on_cut(request_ids)

    def _start_step(self) -> None:
        if self._has_crashed:
            return
        if self._on_cut is not None:
            self._abort_all()
        output = self.scheduler.schedule(self._loop.now)
        if output is None:
            self._is_stepping = False
            return
        now = self._began_s = self._loop.now
        stalled_s, factor = self._hindrances.stalled_s(now), self._hindrances.factor(now)
        num_alike, num_alike_tokens = len(self.scheduler.alike), self.scheduler.num_alike_tokens
        step_s = max(factor * self._step_time.of(output, num_alike, num_alike_tokens), stalled_s)
        max_steps = int(MAX_STRETCH_S / step_s) if step_s and stalled_s <= 0 else 1
        num_steps = self.scheduler.num_steady_steps(output, max_steps)
        if num_steps == 1:
            if stalled_s > BEAT_S or factor * step_s > step_s > BEAT_S:
                self._loop.after(BEAT_S, lambda: self.tell(()), last=True)
            self._loop.at(now + step_s, lambda: self._end_step(output, step_s), last=True)
            return
        changes_s = self._hindrances.next_s(now)
        contexts = [num_alike_tokens + i * num_alike for i in range(num_steps)]
        later_s = [factor * self._step_time.decode(num_alike, num_tokens) for num_tokens in contexts[1:]]
        steps_s = [step_s, *later_s]  # block moves all happen in the first step
        ends_s = [now := now + step_s for step_s in steps_s]
        num_steps = min(num_steps, bisect_left(ends_s, changes_s) + 1)  # steps that begin after a change are left out
        num_steps = max(1, min(num_steps, bisect_left(ends_s, self._crash_s)))  # and so are those that a crash cuts off
        del ends_s[num_steps:]
        stretch = self._stretch = Stretch(steps_s, ends_s)
        self._loop.at(ends_s[-1], lambda: self._end_stretch(stretch, num_steps), last=True)

    def _end_step(self, output: SchedulerOutput, step_s: float) -> None:
        if self._has_crashed:
            return
        self._step_s = step_s
        self.busy_s += step_s
        self._pace.take(output.scheduled, len(self.scheduler.alike), step_s, self._loop.now)
        self.tell(tuple(self.scheduler.finish_step(output)))
        self._start_step()

    def _cut_stretch(self) -> None:
        """End the current stretch, if any, with the step that is running."""
        stretch = self._stretch
        if stretch is None:
            return
        num_steps = min(bisect_left(stretch.ends_s, self._loop.now) + 1, len(stretch.ends_s))
        if num_steps < len(stretch.ends_s):
            del stretch.ends_s[num_steps:]
            self._loop.at(stretch.ends_s[-1], lambda: self._end_stretch(stretch, num_steps), last=True)

    def _end_stretch(self, stretch: Stretch, num_steps: int) -> None:
        if num_steps != len(stretch.ends_s) or self._has_crashed:
            return  # it was cut, so an earlier event ends it; or the replica has crashed
        self._stretch = None
        for self._step_s in stretch.steps_s[:num_steps]:
            self.busy_s += self._step_s
        began_s = stretch.ends_s[-2] if num_steps > 1 else self.scheduler.now
        self.scheduler.finish_steps(num_steps, began_s)
        self.tell(())
        self._start_step()
