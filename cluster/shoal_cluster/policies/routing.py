"""Routing by predicted work before the first token. Every decision explains itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal_cluster.policies.block_offer import best_offer
from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import (
    CAPACITY,
    LOAD,
    OPEN_BLOCKS,
    OPEN_SLOTS,
    PER_CENT,
    ROOM,
    SEQUENCES,
    SLOWER,
    Floats,
    Ints,
)
from shoal_cluster.policies.native_cost import native_least_cost
from shoal_cluster.policies.native_library import library
from shoal_cluster.policies.ranking import Scores, best_of, is_eligible, rank
from shoal_cluster.policies.route_decision import RouteDecision
from shoal_cluster.policies.route_query import PRICED_STEPS, RouteQuery, uncached_tokens
from shoal_replica.errors import ConfigError

OWN_RULE: Final = "predicted_ttft"
"""The name of ``route`` among placement rules."""

MAX_PRICE = 1e9  # keeps costs finite


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteWeights:
    """Prices in prompt tokens of compute: 1 is what a replica spends on the prefill of one prompt token.

    Attributes:
        prefill_price: cost of each uncached token of this prompt. 1 pays for its compute alone; more than 1 also pays
            for the cached blocks that its KV will displace. Replays of a real trace with a small KV cache are flat from
            4 to 12. With a large one the hit rate grows up to 8, but with hundreds of replicas requests then wait for
            the owner of a known prefix while others stand idle.
        decode_price: cost of each sequence that runs, waits or is on its way there: what it and the newcomer take from
            each other's steps while both decode. 640 is the compute of 2.5 tokens in each of 128 steps, for each of the
            two; a request that may decode for fewer steps pays proportionally less.
    """

    prefill_price: float = 6.5
    decode_price: float = 640.0

    def sequence_price(self, decode_steps: int) -> float:
        """Price of each sequence on a replica, for a request with so many ``RouteQuery.decode_steps``."""
        return self.decode_price * decode_steps / PRICED_STEPS

    def __post_init__(self) -> None:
        for name in ("prefill_price", "decode_price"):
            value = getattr(self, name)
            if not 0 <= value <= MAX_PRICE:
                raise ConfigError(f"{name}: got {value!r}; must be a number from 0 to {MAX_PRICE:g}")


def route(query: RouteQuery, candidates: Candidates, weights: RouteWeights, rng: Random) -> RouteDecision:
    """Rank ``candidates`` for ``query`` by predicted work before its first token.

    Cost = waiting and reserved tokens, less those that the request passes, + prefill_price * uncached prompt tokens +
    decode_price * sequences there, scaled down for a request with fewer steps. Of the tokens that are cached elsewhere,
    a request among ``num_alike`` pays only its share: the others will find them, too. On a slower replica the compute
    costs proportionally more (the displacement by the prompt's KV does not). Barrier: a replica ranks after all that
    have room if it has no free slot, or if its free blocks, less those promised and those that its queue will take,
    cannot hold the request's uncached part. If the cheapest one computes more than ``patience_tokens`` until the first
    token, those come last that are busy or compute as much, if there are others: an idle replica's time is lost
    otherwise. Ties are shuffled by ``rng``.
    """
    score, explain = partial(_price, weights=weights), partial(predicted_work, weights=weights)
    decision = rank(query, candidates, rng, score, explain)
    if not decision.ranked:
        return decision
    num_cached = candidates.matched_by(decision.ranked[0])
    reason = f"{decision.reason}; {num_cached} of {len(query.block_hashes)} prompt blocks cached"
    if (offer := best_offer(candidates, decision.ranked[0])) is not None:  # it may give them
        reason += f", {offer.num_blocks} at {offer.replica_id}"
    if query.spared:
        reason += (
            f"; at least {query.num_alike} wait for the first {query.num_known_blocks}, cached by {query.num_holders}"
        )
    return RouteDecision(decision.ranked, reason, decision.candidates)


def choose(query: RouteQuery, candidates: Candidates, weights: RouteWeights, seed: int) -> tuple[int, RouteDecision]:
    """``route`` with a fresh generator of ``seed``. The best one's place, -1 for none; the rest is computed if read."""
    place, num_eligible = _least_cost(query, candidates, weights)
    if place < 0:
        place, num_eligible = best_of(query, candidates, _price(query, candidates, weights), seed)
    best = "" if place < 0 else candidates.replica_ids[place]
    return place, RouteDecision.deferred(best, num_eligible, lambda: route(query, candidates, weights, Random(seed)))


def _least_cost(query: RouteQuery, candidates: Candidates, weights: RouteWeights) -> tuple[int, int]:
    """The cheapest place and the number of eligible ones, if it has room now and no other costs the same; else -1."""
    if query.is_restricted or query.passed or query.patience_tokens is not None or not candidates.replica_ids:
        return -1, 0
    if library is not None:
        return native_least_cost(query, candidates, weights.prefill_price, weights.sequence_price(query.decode_steps))
    costs = cost(query, candidates, weights)
    place = int(costs.argmin())
    if not _has_room(query, candidates, place) or not _is_alone(costs, place):
        return -1, 0
    return place, int(np.count_nonzero(is_eligible(query, candidates)))


def predicted_work(query: RouteQuery, candidates: Candidates, weights: RouteWeights) -> Scores:
    """The scores behind ``route`` with their terms, in prompt tokens of compute."""
    told, matched = candidates.told, candidates.num_matched_blocks
    scores = _price(query, candidates, weights)
    running: Floats = np.multiply(weights.sequence_price(query.decode_steps), candidates.columns[SEQUENCES])
    uncached = _uncached(query, matched)
    slower: Floats = candidates.columns[SLOWER] * PER_CENT * (uncached + load(query, candidates) + running)
    busy = _busy(query, candidates, _work(query, candidates, weights))
    return Scores(
        cost=scores.cost,
        must_wait=scores.must_wait,
        terms=(
            ("waiting", told["num_waiting_tokens"]),
            ("reserved", candidates.num_reserved_tokens),
            *((("passed", -_passed(query, candidates)),) if query.passed else ()),
            ("prefill", (uncached - spared_tokens(query, matched)) * np.float64(weights.prefill_price)),
            ("running", running),
            *((("slower", slower),) if slower.any() else ()),
            *((("busy", busy),) if busy.any() else ()),
            ("matched_blocks", matched),
            ("free_blocks", candidates.columns[OPEN_BLOCKS]),
            ("free_slots", candidates.columns[OPEN_SLOTS]),
        ),
    )


def _price(query: RouteQuery, candidates: Candidates, weights: RouteWeights) -> Scores:
    """``predicted_work`` without the terms."""
    return Scores(cost(query, candidates, weights), _must_wait(query, candidates))


def cost(query: RouteQuery, candidates: Candidates, weights: RouteWeights) -> Floats:
    """The cost behind ``route`` of each replica [n]."""
    costs = _work(query, candidates, weights)
    return costs if query.patience_tokens is None else costs + _busy(query, candidates, costs)


def may_be_sooner_elsewhere(query: RouteQuery, candidates: Candidates, place: int, patience_tokens: int) -> bool:
    """Whether the replica at ``place`` computes more than ``patience_tokens`` until the first token of ``query``, while
    some replica has nothing to compute.
    """
    columns = candidates.columns
    own = uncached_tokens(query, candidates.num_matched_blocks.item(place))
    until_first = (columns.item(LOAD, place) + own) * (1.0 + columns.item(SLOWER, place) * PER_CENT)
    return until_first > patience_tokens and bool((columns[LOAD] == 0).any())


def idle_and_sooner(
    query: RouteQuery, candidates: Candidates, costs: Floats, patience_tokens: int
) -> NDArray[np.bool_] | None:
    """Which replicas have room now, nothing to compute, and fewer tokens until the first one of ``query`` than the
    replica of least ``costs`` with room [n]. None if there is none, or that one has no more than ``patience_tokens``.
    """
    has_room = is_eligible(query, candidates) & ~_must_wait(query, candidates)
    slower: Floats = 1.0 + candidates.columns[SLOWER] * PER_CENT
    until_first = (load(query, candidates) + _uncached(query, candidates.num_matched_blocks)) * slower
    if not has_room.any():
        return None
    there = until_first[np.where(has_room, costs, np.inf).argmin()]
    if there <= patience_tokens:
        return None
    idle: NDArray[np.bool_] = has_room & (candidates.columns[LOAD] == 0) & (until_first < there)
    return idle if idle.any() else None


def _busy(query: RouteQuery, candidates: Candidates, costs: Floats) -> Floats:
    """What replicas cost besides because idle ones are preferred: more than the dearest [n]."""
    idle = None
    if query.patience_tokens is not None:
        idle = idle_and_sooner(query, candidates, costs, query.patience_tokens)
    return np.zeros(len(candidates)) if idle is None else np.where(idle, 0.0, costs.max() + 1.0)


def _work(query: RouteQuery, candidates: Candidates, weights: RouteWeights) -> Floats:
    """``cost`` where no idle replica is preferred [n]."""
    uncached = _uncached(query, candidates.num_matched_blocks)
    spared = spared_tokens(query, candidates.num_matched_blocks)
    return work(
        candidates, uncached, spared, weights.sequence_price(query.decode_steps), weights, load(query, candidates)
    )


def spared_tokens(query: RouteQuery, num_matched_blocks: Ints) -> Floats:
    """Of the uncached tokens on each replica, those that others pay [n]."""
    elsewhere = _uncached(query, np.maximum(num_matched_blocks, query.num_known_blocks))
    return (_uncached(query, num_matched_blocks) - elsewhere) * np.float64(query.spared)


def _must_wait(query: RouteQuery, candidates: Candidates) -> NDArray[np.bool_]:
    """Which replicas have no room for the request now [n]."""
    num_new_blocks: Ints = query.num_blocks_needed - candidates.num_matched_blocks
    must_wait: NDArray[np.bool_] = candidates.columns[ROOM] < np.maximum(num_new_blocks, 0, out=num_new_blocks)
    return must_wait


def _has_room(query: RouteQuery, candidates: Candidates, place: int) -> bool:
    """Whether the replica at ``place`` accepts requests of this size and has room for this one now."""
    columns, num_new_blocks = candidates.columns, query.num_blocks_needed - candidates.num_matched_blocks.item(place)
    return columns.item(CAPACITY, place) >= query.num_blocks_needed and columns.item(ROOM, place) >= max(
        0, num_new_blocks
    )


def _is_alone(costs: Floats, place: int) -> bool:
    """Whether no other replica costs the same."""
    return int(np.count_nonzero(costs == costs[place])) == 1


def load(query: RouteQuery, candidates: Candidates) -> Ints:
    """Prompt tokens that each replica computes before those of ``query`` [n]."""
    before: Ints = candidates.columns[LOAD]
    return before - _passed(query, candidates) if query.passed else before


def work(
    candidates: Candidates,
    uncached: Ints,
    spared: float | Floats,
    sequence_price: float | Floats,
    weights: RouteWeights,
    before: Ints,
) -> Floats:
    """The cost behind ``route`` of a prompt with ``uncached`` tokens to compute on each replica [n], ``spared`` ones
    included, given its price of a sequence and the ``load`` before it; or of many prompts [q, n] with one price each
    [q, 1].
    """
    total: Floats = (uncached - spared) * np.float64(weights.prefill_price)
    total += before
    sequences: Floats = sequence_price * candidates.columns[SEQUENCES]
    total += sequences
    if candidates.columns[SLOWER].any():
        total += candidates.columns[SLOWER] * PER_CENT * (uncached + before + sequences)
    return total


def _uncached(query: RouteQuery, num_matched_blocks: Ints) -> Ints:
    """Prompt tokens to compute on each replica [n]."""
    uncached: Ints = num_matched_blocks * -query.block_size
    uncached += query.num_prompt_tokens
    return np.maximum(uncached, 1, out=uncached)


def _passed(query: RouteQuery, candidates: Candidates) -> Ints:
    by_id = dict(query.passed)
    return np.array([by_id.get(replica_id, 0) for replica_id in candidates.replica_ids], np.int64)
