"""How many replicas the load needs: for blocks, sequences, compute, what waits, and a reserve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.autoscaling_observe import SAMPLE_PERIOD_S, reporting, uncached_share
from shoal_cluster.policies.autoscaling_reserve import reserve
from shoal_cluster.policies.autoscaling_state import ScaleState, growth
from shoal_cluster.policies.autoscaling_view import Demand, ScaleView

LEVEL_S = 40.0  # a rate over this long is taken as it is; three of them in a row show a trend
LEAST_SPAN_S = 5.0  # shorter means are too noisy to tell a level or a trend by
PEAK_S = 20.0  # a rate counts as a peak when it is a mean over at least this long
CERTAINTY = 2.0  # standard deviations by which a short window must stand out; one is enough for a trend
SMOOTH_S = 10.0  # blocks and sequences are averaged over this long
SHORT_WINDOWS_S = (1.0, 2.0)
UNKNOWN_OUTPUTS = 2.0  # until it is known what requests hold, outputs are assumed to take as much time as prompts


@dataclass(frozen=True, slots=True)
class Load:
    """What arrives and what is there, cluster-wide. Rates are per second; None: not known.

    Attributes:
        rate, rate_ahead: requests arriving now, and by the time that a replica asked for now would serve.
        rate_first: while the past is shorter than LEVEL_S, the mean so far less one standard deviation; else 0.
        rate_lasting: the mean over LEVEL_S, or PEAK_S at least; 0 while that is not known.
        num_uncached_tokens: prompt tokens of a request that need compute: the mean of those that have arrived lately;
            where none has, of those held at gateways; else all that wait at replicas, shared out; 0 if none does.
        num_blocks, num_sequences: held now, smoothed.
        num_waiting_tokens: prompt tokens to compute, at replicas, on their way, and held at gateways.
        num_shed: requests refused within ``burst_window_s``.
        replica_tokens_per_s: prompt tokens that a replica computes per second.
    """

    rate: float
    rate_ahead: float
    rate_first: float
    rate_lasting: float
    num_uncached_tokens: float
    num_blocks: float
    num_sequences: float
    num_waiting_tokens: int
    num_shed: int
    num_held: int
    replica_tokens_per_s: float | None

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, waits or arrives, as far as is reported."""
        return not (self.num_held or self.num_waiting_tokens or self.num_sequences or self.rate)

    @property
    def num_computing(self) -> float:
        """How many replicas the prompts to come would keep computing all the time; 0 before a pace is known."""
        pace = self.replica_tokens_per_s
        return 0.0 if pace is None else self.rate_ahead * self.num_uncached_tokens / pace


def measure(view: ScaleView, state: ScaleState, config: ScaleConfig, now: float) -> Load:
    """The load, from the snapshot and the samples before it."""
    known = reporting(view.replicas)
    demand = view.demand or view.partial_demand or Demand()
    recent = state.since(now - SMOOTH_S)
    longer = state.since(now - 3 * LEVEL_S)
    num_arrived = longer[-1].num_requests - longer[0].num_requests if longer else 0
    num_tokens = longer[-1].num_prompt_tokens - longer[0].num_prompt_tokens if longer else 0
    blocks, sequences = [s.num_allocated_blocks for s in recent], [s.num_running for s in recent]
    if not recent or now - recent[-1].time_s > 2 * SAMPLE_PERIOD_S:  # a gateway is silent
        blocks, sequences = [sum(s.num_allocated_blocks for s in known)], [sum(s.num_running for s in known)]
    burst = state.since(now - config.burst_window_s)
    rate = _rate_now(state, config, now)
    uncached = uncached_share(known)
    num_waiting_tokens = (
        sum(s.num_waiting_tokens for s in known)
        + sum(row.num_reserved_tokens for row in view.replicas)
        + round(demand.num_held_tokens * uncached)
    )
    if num_arrived:
        num_uncached_tokens = num_tokens / num_arrived * uncached
    elif demand.num_held:  # a queue may be longer than the memory of what has arrived
        num_uncached_tokens = demand.num_held_tokens / demand.num_held * uncached
    else:
        num_waiting = sum(s.num_waiting for s in known)
        num_uncached_tokens = num_waiting_tokens / num_waiting if num_waiting else 0.0
    return Load(
        rate=rate,
        rate_ahead=_rate_ahead(state, rate, now),
        rate_first=_first_rate(state, now),
        rate_lasting=growth(state.samples, lambda s: s.num_requests, now - LEVEL_S, now, PEAK_S) or 0.0,
        num_uncached_tokens=num_uncached_tokens,
        num_blocks=_mean(blocks),
        num_sequences=_mean(sequences),
        num_waiting_tokens=num_waiting_tokens,
        num_shed=burst[-1].num_shed - burst[0].num_shed if burst else 0,
        num_held=demand.num_held,
        replica_tokens_per_s=None
        if state.capacity is None
        else state.cost.tokens_per_s(state.capacity.max_num_batched_tokens),
    )


def needs(load: Load, state: ScaleState, config: ScaleConfig, target: float, now: float) -> dict[str, float]:
    """How many replicas each resource needs so that its use stays at ``target``: real numbers by name."""
    capacity, held = state.capacity, state.held
    if capacity is None:
        return {}
    blocks_per_rate = None if held is None else held.blocks_per_rate
    sequences_per_rate = None if held is None else held.sequences_per_rate
    found = {
        "compute": _compute(load, state, target),
        "blocks": _held(load, load.num_blocks, blocks_per_rate, capacity.num_blocks * target),
        "sequences": _held(load, load.num_sequences, sequences_per_rate, capacity.max_num_seqs * target),
        "reserve": _reserve(load, state, config, target),
        "queue": _queue(load, state, config, now),
    }
    return {name: count for name, count in found.items() if count is not None}


def _compute(load: Load, state: ScaleState, target: float) -> float | None:
    """None before a pace is known."""
    if load.replica_tokens_per_s is None:
        return None
    return load.num_computing / target * (UNKNOWN_OUTPUTS if state.held is None else 1.0)


def _held(load: Load, num_held: float, per_rate: float | None, room: float) -> float:
    """For what is held now and, once it is known what a request a second holds, for what will be; a replica has
    ``room``. Prompts take a share of the time, so sequences that decode stay longer.
    """
    if per_rate is None:
        return num_held / room
    return max(num_held / room, load.rate_ahead * per_rate / room + load.num_computing)


def _reserve(load: Load, state: ScaleState, config: ScaleConfig, target: float) -> float | None:
    """None where the cluster may go to 0 and is idle: a minimum of 0 accepts waiting for a start."""
    if config.min_replicas == 0 and load.is_idle:
        return None
    served = replica_rate(load, state)
    offered = max(load.rate, load.rate_first) / served if served is not None else 0.0
    return reserve(offered, state, config) * config.target_utilization / target


def _queue(load: Load, state: ScaleState, config: ScaleConfig, now: float) -> float | None:
    """What will still wait when a replica asked for now serves is worked off in as long again. None while the running
    replicas are quick enough for the objective, or no pace is known.
    """
    served, ttft_s = replica_rate(load, state), predicted_ttft(load, state)
    if served is None or ttft_s is None or ttft_s <= config.ttft_objective_s:
        return None
    ahead_s = max(state.expected_startup_s, config.ttft_objective_s)
    left = _num_waiting(load) + load.rate * ahead_s - served * _serving_s(state, ahead_s, now)
    return (load.rate + max(0.0, left) / ahead_s) / served


def replica_rate(load: Load, state: ScaleState) -> float | None:
    """Requests a second that a full replica serves: it computes prompts and, in the time left, decodes outputs."""
    capacity, held = state.capacity, state.held
    if load.replica_tokens_per_s is None or capacity is None or not load.num_uncached_tokens:
        return None
    compute_s = load.num_uncached_tokens / load.replica_tokens_per_s
    if held is None:
        return 1 / (compute_s * UNKNOWN_OUTPUTS)
    decode_s = max(held.blocks_per_rate / capacity.num_blocks, held.sequences_per_rate / capacity.max_num_seqs)
    return 1 / (compute_s + decode_s)


def predicted_ttft(load: Load, state: ScaleState) -> float | None:
    """Seconds that the running replicas need for what waits now; infinite if none runs, None before a pace is known."""
    served = replica_rate(load, state)
    if served is None:
        return None
    if not load.num_waiting_tokens:
        return 0.0
    return _num_waiting(load) / (served * state.num_running) if state.num_running else math.inf


def _num_waiting(load: Load) -> float:
    """Waiting tokens as a number of average requests."""
    return load.num_waiting_tokens / load.num_uncached_tokens if load.num_uncached_tokens else 0.0


def _serving_s(state: ScaleState, ahead_s: float, now: float) -> float:
    """Replica-seconds of service in the next ``ahead_s``, of running replicas and of starting ones once they come."""
    startup_s = state.expected_startup_s
    coming = sum(min(ahead_s, max(0.0, now + ahead_s - (asked_s + startup_s))) for asked_s in state.pending_s)
    return state.num_running * ahead_s + coming


def _rate(state: ScaleState, since_s: float, until_s: float) -> float | None:
    """Requests a second between two times; None where too little is known of them."""
    return growth(state.samples, lambda s: s.num_requests, since_s, until_s, LEAST_SPAN_S)


def _rate_now(state: ScaleState, config: ScaleConfig, now: float) -> float:
    """Requests a second: the mean of the last LEVEL_S, or of a shorter window as far as that is certain to be higher.

    Arrivals are at least as irregular as a Poisson process, so N of them could have been CERTAINTY * sqrt(N) fewer.
    """
    level = _rate(state, now - LEVEL_S, now) or 0.0
    for window_s in (*SHORT_WINDOWS_S, config.burst_window_s):
        window = state.since(now - window_s)
        if len(window) > 1 and (span_s := window[-1].time_s - window[0].time_s) > 0:
            count = window[-1].num_requests - window[0].num_requests
            level = max(level, (count - CERTAINTY * math.sqrt(count)) / span_s)
    return level


def _rate_ahead(state: ScaleState, level: float, now: float) -> float:
    """Requests a second a start-up time ahead, at ``level`` now.

    The rise from one LEVEL_S to the next goes on if it has lasted for three of them and still does; the least of these
    rises counts, so that a step is not taken for a slope.
    """
    older, old = (_rate(state, now - n * LEVEL_S, now - (n - 1) * LEVEL_S) for n in (3, 2))
    new, half = _rate(state, now - LEVEL_S, now), now - LEVEL_S / 2
    early, late = _rate(state, now - LEVEL_S, half), _rate(state, half, now)
    if older is None or old is None or new is None or early is None or late is None:
        return level
    noise = math.sqrt(2 * new / LEVEL_S)
    rise = max(0.0, min(new - old - noise, old - older - noise, 2 * (late - early) + noise))
    return max(level, new + rise * (0.5 + state.expected_startup_s / LEVEL_S))


def _first_rate(state: ScaleState, now: float) -> float:
    """Requests a second while there is too little past to stand out from; only the reserve, which may err, uses it."""
    if not state.samples:
        return 0.0
    first, last = state.samples[0], state.samples[-1]
    span_s = last.time_s - first.time_s
    if not span_s or now - first.time_s >= LEVEL_S:
        return 0.0
    count = last.num_requests - first.num_requests
    return (count - math.sqrt(count)) / span_s


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0
