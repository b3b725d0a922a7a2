"""Where a request goes: filter, score by predicted work before its first token, pick; every decision says why."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from shoal_cluster.policies.view import ReplicaView
from shoal_replica.errors import ConfigError
from shoal_replica.prefix_cache import BlockHash, hash_blocks
from shoal_replica.request import Request
from shoal_replica.stats import ReplicaStats

Terms = tuple[tuple[str, float], ...]

MAX_REASONS_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteQuery:
    """What routing needs to know of a request.

    Attributes:
        block_hashes: of the prompt's full blocks.
        num_blocks_needed: blocks that the request needs to start: its prompt's and its first token's.
        excluded: replicas that have refused or lost it already.
    """

    request_id: str
    block_hashes: tuple[BlockHash, ...]
    num_prompt_tokens: int
    num_blocks_needed: int
    block_size: int
    excluded: frozenset[str] = frozenset()

    @classmethod
    def for_request(cls, request: Request, block_size: int) -> RouteQuery:
        """The query that places ``request``; tokens that another replica has generated count as prompt."""
        token_ids = request.prompt_token_ids + request.output_token_ids
        return cls(
            request_id=request.request_id,
            block_hashes=tuple(hash_blocks(token_ids, block_size, request.cache_salt)),
            num_prompt_tokens=len(token_ids),
            num_blocks_needed=-(-(len(token_ids) + 1) // block_size),
            block_size=block_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteWeights:
    """Prices, in prompt tokens of compute: one of them is what a replica spends on one prompt token of prefill.

    Attributes:
        prefill_price: cost of each uncached token of this prompt. 1 is its compute alone; above 1 also pays for the
            cached blocks its KV will displace. Replays of real traces are flat and best between 3 and 5.
        decode_price: cost of one running sequence in one step. A step over a full budget of prompt tokens is that
            much longer for each sequence that decodes beside them.
        max_age_s: stats older than this are stale: still used, at a price. Idle replicas report once a second.
        stale_tokens_per_s: work assumed to have reached a replica, unseen, for each second past ``max_age_s``.
    """

    prefill_price: float = 4.0
    decode_price: float = 4.0
    max_age_s: float = 3.0
    stale_tokens_per_s: float = 2000.0

    def __post_init__(self) -> None:
        for name in ("prefill_price", "decode_price", "max_age_s", "stale_tokens_per_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}: got {value!r}; must be a finite number of at least 0")


@dataclass(frozen=True, slots=True)
class CandidateTerms:
    """One replica's part in a decision. Lower ``score`` is better; it is 0 for a replica that is not eligible.

    ``rejected`` says why it is not eligible. ``terms`` adds up to the score, but for those named ``*_blocks`` and
    ``*_slots``, which are what the barrier saw.
    """

    replica_id: str
    eligible: bool
    rejected: str = ""
    score: float = 0.0
    terms: Terms = ()


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """Eligible replicas, best first (none: nobody can take the request), why, and every candidate's terms."""

    ranked: tuple[str, ...]
    reason: str
    candidates: tuple[CandidateTerms, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """A replica's place: those that must wait come after all that can start; then the least ``cost``."""

    cost: float
    must_wait: bool = False
    terms: Terms = ()


def route(query: RouteQuery, replicas: Sequence[ReplicaView], weights: RouteWeights, rng: Random) -> RouteDecision:
    """Rank ``replicas`` for ``query`` by predicted work before its first token.

    Cost = waiting tokens + reserved tokens + prefill_price * uncached prompt tokens + running sequences' share of the
    steps that takes + a price for stale stats. Barrier: a replica that has no free slot, or whose free blocks, less
    those promised and those its queue will take, cannot hold the request's uncached part, ranks after all that can.
    The order of ``replicas`` does not matter; equals are shuffled by ``rng``.
    """
    decision = rank(query, replicas, rng, lambda row, stats: _predicted_work(query, row, stats, weights))
    if not decision.ranked:
        return decision
    row = next(r for r in replicas if r.replica_id == decision.ranked[0])
    reason = f"{decision.reason}; {row.num_matched_blocks} of {len(query.block_hashes)} prompt blocks cached"
    stale = sorted(f"{r.replica_id} ({r.age_s:.1f} s)" for r in replicas if r.age_s > weights.max_age_s)
    if stale:
        reason += f"; stale stats: {_some(stale)}"
    return RouteDecision(decision.ranked, reason, decision.candidates)


def rank(
    query: RouteQuery,
    replicas: Sequence[ReplicaView],
    rng: Random,
    score: Callable[[ReplicaView, ReplicaStats], Score],
) -> RouteDecision:
    """Filter ``replicas``, score the rest, sort; the frame that every placement rule shares."""
    candidates: list[CandidateTerms] = []
    places: list[tuple[bool, float, float, str]] = []
    for row in sorted(replicas, key=lambda r: r.replica_id):
        stats = row.stats
        rejected = _rejection(query, row)
        if rejected or stats is None:
            candidates.append(CandidateTerms(row.replica_id, False, rejected))
            continue
        scored = score(row, stats)
        candidates.append(CandidateTerms(row.replica_id, True, "", scored.cost, scored.terms))
        places.append((scored.must_wait, scored.cost, rng.random(), row.replica_id))
    if not places:
        why = [f"{c.replica_id}: {c.rejected}" for c in candidates]
        reason = f"no replica can take it: {_some(why)}" if why else "no replica is known"
        return RouteDecision((), reason, tuple(candidates))
    places.sort()
    must_wait, cost, _, best = places[0]
    reason = f"{best}: least cost {cost:.0f} of {len(places)} eligible"
    if must_wait:
        reason += "; none can start it now"
    elif any(place[1] < cost for place in places):
        reason += "; cheaper ones have no room now"
    return RouteDecision(tuple(place[3] for place in places), reason, tuple(candidates))


@dataclass(frozen=True, slots=True)
class RouteRecord:
    """A decision with all that made it. ``time_s`` is wall-clock, for show; it takes no part."""

    time_s: float
    query: RouteQuery
    replicas: tuple[ReplicaView, ...]
    weights: RouteWeights
    seed: int
    decision: RouteDecision

    def replay(self) -> RouteDecision:
        """Decide again from the record: equal to ``decision``."""
        return route(self.query, self.replicas, self.weights, Random(self.seed))


def decide(
    query: RouteQuery, replicas: tuple[ReplicaView, ...], weights: RouteWeights, *, seed: int, time_s: float
) -> RouteRecord:
    """``route`` with a fresh generator of ``seed``, recorded."""
    return RouteRecord(time_s, query, replicas, weights, seed, route(query, replicas, weights, Random(seed)))


def uncached_tokens(query: RouteQuery, row: ReplicaView) -> int:
    """Prompt tokens that ``row`` would have to compute: at least one, since the last one's logits are needed."""
    return max(1, query.num_prompt_tokens - row.num_matched_blocks * query.block_size)


def uncached_blocks(query: RouteQuery, row: ReplicaView) -> int:
    """Blocks that ``row`` would have to find beside those it caches: what to reserve there."""
    return max(0, query.num_blocks_needed - row.num_matched_blocks)


def _rejection(query: RouteQuery, row: ReplicaView) -> str:
    if row.replica_id in query.excluded:
        return "excluded"
    if not row.connected:
        return "not connected"
    if row.stats is None:
        return "no stats yet"
    if row.stats.draining:
        return "draining"
    if query.num_blocks_needed > row.stats.num_total_blocks:
        return f"needs {query.num_blocks_needed} blocks, has {row.stats.num_total_blocks}"
    return ""


def _predicted_work(query: RouteQuery, row: ReplicaView, stats: ReplicaStats, weights: RouteWeights) -> Score:
    uncached = uncached_tokens(query, row)
    ahead = stats.num_waiting_tokens + row.num_reserved_tokens
    num_steps = 1 + (ahead + uncached) / stats.max_num_batched_tokens
    unseen_s = max(0.0, row.age_s - weights.max_age_s)
    prefill = weights.prefill_price * uncached
    running = weights.decode_price * stats.num_running * num_steps
    stale = weights.stale_tokens_per_s * unseen_s
    # A queued prompt's blocks are still counted free: they are taken, all at once, when its first step is scheduled.
    queued_blocks = -(-stats.num_waiting_tokens // stats.block_size) if stats.num_waiting else 0
    free_blocks = stats.num_free_blocks - row.num_reserved_blocks - queued_blocks
    free_slots = stats.max_num_seqs - stats.num_running - stats.num_waiting - row.num_reserved
    return Score(
        cost=ahead + prefill + running + stale,
        must_wait=free_slots < 1 or free_blocks < uncached_blocks(query, row),
        terms=(
            ("waiting", stats.num_waiting_tokens),
            ("reserved", row.num_reserved_tokens),
            ("prefill", prefill),
            ("running", running),
            ("stale", stale),
            ("matched_blocks", row.num_matched_blocks),
            ("free_blocks", free_blocks),
            ("free_slots", free_slots),
        ),
    )


def _some(items: Sequence[str]) -> str:
    shown = ", ".join(items[:MAX_REASONS_SHOWN])
    return shown if len(items) <= MAX_REASONS_SHOWN else f"{shown} and {len(items) - MAX_REASONS_SHOWN} more"
