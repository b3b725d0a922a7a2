"""What a scaling decision remembers for the next: a short past of arrivals and load, and what steps have cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType

from shoal_replica.stats import ReplicaStats

Falling = tuple[tuple[float, float], ...]
"""(time, value) pairs, each the highest since its time."""

COST_MEMORY = 0.995  # the part of earlier samples' weight that remains after each new one
DEFAULT_STARTUP_S = 30.0  # until a start has been measured


@dataclass(frozen=True, slots=True)
class Sample:
    """The cluster at one moment.

    Attributes:
        num_requests, num_prompt_tokens, num_shed: totals of the gateways.
        num_begun_tokens, num_computed_tokens, num_finished: totals of what replicas were seen to do: prompt tokens of
            requests that began, those of them that were not cached, and requests that finished.
        num_allocated_blocks, num_running: blocks and sequences in use at that moment.
    """

    time_s: float
    num_requests: int
    num_prompt_tokens: int
    num_shed: int
    num_begun_tokens: int
    num_computed_tokens: int
    num_finished: int
    num_allocated_blocks: int
    num_running: int


@dataclass(frozen=True, slots=True)
class Progress:
    """A replica's own totals as of ``time_s``, and its stats at the last look."""

    time_s: float
    num_steps: int
    num_computed_tokens: int
    busy_s: float
    last: ReplicaStats


@dataclass(frozen=True, slots=True)
class StepCost:
    """Least squares of ``busy = base_s * steps + token_s * prompt tokens`` over what replicas did; the past fades."""

    steps_steps: float = 0.0
    steps_tokens: float = 0.0
    tokens_tokens: float = 0.0
    steps_busy: float = 0.0
    tokens_busy: float = 0.0

    def add(self, num_steps: int, num_tokens: int, busy_s: float) -> StepCost:
        """The same with one more sample: what a replica did between two looks."""
        return StepCost(
            COST_MEMORY * self.steps_steps + num_steps * num_steps,
            COST_MEMORY * self.steps_tokens + num_steps * num_tokens,
            COST_MEMORY * self.tokens_tokens + num_tokens * num_tokens,
            COST_MEMORY * self.steps_busy + num_steps * busy_s,
            COST_MEMORY * self.tokens_busy + num_tokens * busy_s,
        )

    def tokens_per_s(self, num_batched_tokens: int) -> float | None:
        """Prompt tokens that a replica computes in a second of full steps. None before it has computed any."""
        if not self.tokens_tokens or not self.tokens_busy:
            return None
        determinant = self.steps_steps * self.tokens_tokens - self.steps_tokens**2
        base_s, token_s = 0.0, self.tokens_busy / self.tokens_tokens
        if determinant > 1e-6 * self.steps_steps * self.tokens_tokens:
            base_s = (self.steps_busy * self.tokens_tokens - self.tokens_busy * self.steps_tokens) / determinant
            token_s = (self.tokens_busy * self.steps_steps - self.steps_busy * self.steps_tokens) / determinant
        if base_s < 0 or token_s <= 0:  # too noisy to tell apart: all cost goes to the tokens
            base_s, token_s = 0.0, self.tokens_busy / self.tokens_tokens
        return num_batched_tokens / (base_s + token_s * num_batched_tokens)


@dataclass(frozen=True, slots=True)
class Capacity:
    """One replica's: blocks, tokens per block, sequences at once, tokens per step."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class HeldPerRate:
    """Blocks and sequences held for each request a second that is served, if no prompts were computed meanwhile."""

    blocks_per_rate: float
    sequences_per_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleState:
    """Carried from one decision to the next; the first gets an empty one.

    Attributes:
        samples: about one a second, oldest first.
        progress: by replica.
        capacity: the least that a replica has; remembered while there is none.
        held: as last learnt; None before that.
        needs: (time, replicas needed), each the most needed since its time, so the counts fall.
        offered: peaks of the load, as a number of full replicas, over the last ``burst_memory_s``.
        looked_s: when the last decision was; None before the first.
        seen_since_s: since when every replica and gateway has reported without a break; None while one does not.
        pending_s: when each replica that is starting was asked for, oldest first; as much later as nobody looked.
        startup_s: how long a start takes, as measured; None before the first.
        num_running: replicas that ran at the last look.
        last_down_s: when the count last went down, unless it has gone up since.
        left: (time, count) of the counts given up lately: each from which it went down.
        patience: how many times ``downscale_delay_s`` to wait; doubles when going down proves wrong.
    """

    samples: tuple[Sample, ...] = ()
    progress: Mapping[str, Progress] = field(default_factory=lambda: MappingProxyType({}))
    cost: StepCost = StepCost()
    capacity: Capacity | None = None
    held: HeldPerRate | None = None
    needs: tuple[tuple[float, int], ...] = ()
    offered: Falling = ()
    looked_s: float | None = None
    seen_since_s: float | None = None
    pending_s: tuple[float, ...] = ()
    startup_s: float | None = None
    num_running: int = 0
    last_down_s: float | None = None
    left: tuple[tuple[float, int], ...] = ()
    patience: int = 1

    @property
    def expected_startup_s(self) -> float:
        return DEFAULT_STARTUP_S if self.startup_s is None else self.startup_s

    def with_need(self, now: float, num_needed: int, window_s: float) -> ScaleState:
        """The same with one more need; those older than ``window_s`` are forgotten."""
        kept = [(t, n) for t, n in self.needs if n > num_needed and t >= now - window_s]
        return replace(self, needs=(*kept, (now, num_needed)))

    def peak_need(self, since_s: float, default: int) -> int:
        """The most replicas needed since ``since_s``; ``default`` if no need was noted."""
        return max((n for t, n in self.needs if t >= since_s), default=default)

    def since(self, time_s: float) -> tuple[Sample, ...]:
        """Samples from the last one at or before ``time_s`` on, or all of them if there is none."""
        first = 0
        for i, sample in enumerate(self.samples):
            if sample.time_s > time_s:
                break
            first = i
        return tuple(islice(self.samples, first, None))


def growth(
    samples: Sequence[Sample], total: Callable[[Sample], int], since_s: float, until_s: float, min_span_s: float
) -> float | None:
    """Growth of a total between two times, per second; None if the samples there span less than ``min_span_s``."""
    within = [s for s in samples if since_s - 1 <= s.time_s <= until_s]
    if len(within) < 2 or (span_s := within[-1].time_s - within[0].time_s) < min_span_s:
        return None
    return max(0, total(within[-1]) - total(within[0])) / span_s


@dataclass(frozen=True, slots=True)
class ScaleDecision:
    """How many replicas there should be.

    Attributes:
        reason: one line; begins with "up", "down" or "hold".
        terms: what was weighed, by name.
        state: for the next decision.
    """

    num_replicas: int
    reason: str
    terms: tuple[tuple[str, float], ...]
    state: ScaleState
