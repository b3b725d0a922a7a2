"""One replica in simulated time: the real Scheduler, with a StepTime in place of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal_cluster.sim.event_loop import EventLoop
from shoal_cluster.sim.latency import StepTime
from shoal_replica.config import CacheConfig, SchedulerConfig
from shoal_replica.executor import SampledToken, SchedulerOutput, StepResult
from shoal_replica.prefix_cache import BlockHash
from shoal_replica.request import Request, TokenDelta
from shoal_replica.scheduler import Scheduler
from shoal_replica.stats import ReplicaStats

FIRST_OUTPUT_TOKEN_ID = 2**31  # above every token id of a simulated prompt: outputs never look like prompts


@dataclass(frozen=True, slots=True)
class FeedMessage:
    """What a replica tells the gateway after a step. ``added``: requests that ``stats`` is first to count."""

    stats: ReplicaStats
    stored: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]
    added: tuple[str, ...]
    deltas: tuple[TokenDelta, ...]


class SimReplica:
    """Steps while it has work.

    Args:
        publish: called with a message at the end of each step, and whenever ``tell`` is.
    """

    def __init__(
        self,
        replica_id: str,
        loop: EventLoop,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        step_time: StepTime,
        publish: Callable[[SimReplica, FeedMessage], None],
    ) -> None:
        self.replica_id = replica_id
        self.scheduler = Scheduler(
            scheduler_config, cache_config, cache_config.num_blocks * cache_config.block_size, ()
        )
        self.draining = False
        self.busy_s = 0.0
        self.started_s = loop.now
        self._loop = loop
        self._step_time = step_time
        self._publish = publish
        self._added: list[str] = []
        self._step_s = 0.0
        self._is_stepping = False

    @property
    def is_idle(self) -> bool:
        """No step is running or about to."""
        return not self._is_stepping

    def add(self, request: Request) -> None:
        """Queue a request. Raises ResourceExhausted as the scheduler does."""
        self.scheduler.add(request)
        self._added.append(request.request_id)
        if not self._is_stepping:
            self._is_stepping = True
            self._loop.at(self._loop.now, self._start_step)

    def drain(self) -> None:
        """Take nothing new; finish what is here."""
        self.draining = True
        self.tell(())

    def tell(self, deltas: tuple[TokenDelta, ...]) -> None:
        """Publish the ledger as of now."""
        stored, removed = self.scheduler.take_block_events()
        added, self._added = tuple(self._added), []
        stats = self.scheduler.stats(self._loop.now, self._step_s, self.draining)
        self._publish(self, FeedMessage(stats, tuple(stored), tuple(removed), added, deltas))

    def _start_step(self) -> None:
        output = self.scheduler.schedule(self._loop.now)
        if output is None:
            self._is_stepping = False
            return
        self._step_s = self._step_time.step_s(output)
        self.busy_s += self._step_s
        self._loop.after(self._step_s, lambda: self._end_step(output))

    def _end_step(self, output: SchedulerOutput) -> None:
        sampled = tuple(SampledToken(s.seq_id, FIRST_OUTPUT_TOKEN_ID + s.seq_id) for s in output.scheduled if s.samples)
        self.tell(tuple(self.scheduler.update(output, StepResult(sampled))))
        self._start_step()
