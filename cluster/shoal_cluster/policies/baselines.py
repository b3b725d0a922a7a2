"""Placement rules by name: ours, and those of other systems with their published formulas and defaults.

They share filter, tie-breaking and explanation, so that only the formula differs. The published rules know neither our
barrier of free blocks nor what a prompt costs; where the original matches text, the rule here matches blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

import numpy as np

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import Ints
from shoal_cluster.policies.memory import Recollection
from shoal_cluster.policies.ranking import Amounts, Scores, is_eligible, rank
from shoal_cluster.policies.route_decision import RouteDecision
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.policies.routing import OWN_RULE as OWN_RULE
from shoal_cluster.policies.routing import RouteWeights, route

Routing = Literal[
    "predicted_ttft",
    "round_robin",
    "power_of_two",
    "least_requests",
    "most_free_blocks",
    "ray_prefix_affinity",
    "sglang_cache_aware",
    "llmd_precise",
    "dynamo_linear",
]
ROUTINGS: tuple[Routing, ...] = get_args(Routing)
USE_SENT_BLOCKS: frozenset[Routing] = frozenset({"ray_prefix_affinity", "sglang_cache_aware"})

RAY_IMBALANCED_THRESHOLD = math.inf  # requests
RAY_MATCH_RATE_THRESHOLD = 0.1
SGLANG_BALANCE_ABS_THRESHOLD = 64  # requests
SGLANG_BALANCE_REL_THRESHOLD = 1.5
SGLANG_CACHE_THRESHOLD = math.nextafter(0.3, 1.0)  # a match has to be above 0.3
LLMD_PREFIX_WEIGHT, LLMD_KV_WEIGHT, LLMD_QUEUE_WEIGHT = 2.0, 1.0, 1.0
DYNAMO_OVERLAP_CREDIT, DYNAMO_PREFILL_LOAD_SCALE = 1.0, 1.0


def place(
    routing: Routing,
    query: RouteQuery,
    candidates: Candidates,
    weights: RouteWeights,
    rng: Random,
    memory: Recollection,
) -> RouteDecision:
    """Decide by the rule of that name. Only our own reads ``weights``."""
    if routing == OWN_RULE:
        return route(query, candidates, weights, rng)
    scores = score(routing, query, candidates, rng, memory)
    decision = rank(query, candidates, rng, lambda _, c: scores)
    return RouteDecision(decision.ranked, f"{routing}: {decision.reason}", decision.candidates)


def score(routing: Routing, query: RouteQuery, candidates: Candidates, rng: Random, memory: Recollection) -> Scores:
    """Each replica's score by a rule other than ours; the names of the terms tell which of its branches was taken."""
    match routing:
        case "round_robin":
            eligible = is_eligible(query, candidates)
            place = np.cumsum(eligible) - 1  # among those whose turn it can be
            return sum_of(turns_until=(place - memory.turn) % max(1, int(np.count_nonzero(eligible))))
        case "power_of_two":
            return power_of_two(query, candidates, rng)
        case "least_requests":
            return sum_of(requests=num_requests(candidates))
        case "most_free_blocks":
            return most_free_blocks(query, candidates)
        case "ray_prefix_affinity":
            return ray_prefix_affinity(query, candidates, memory, rng)
        case "sglang_cache_aware":
            return sglang_cache_aware(query, candidates, memory)
        case "llmd_precise":
            return llmd_precise(query, candidates)
        case "dynamo_linear":
            return dynamo_linear(query, candidates)
        case _:
            raise ValueError(f"routing: {routing!r} has no score of this kind")


def sum_of(**terms: Amounts) -> Scores:
    """Scores with the sum of their terms as cost."""
    first, *others = terms.values()
    return Scores(sum(others, start=first), terms=tuple(terms.items()))


@dataclass(frozen=True, slots=True, eq=False)
class NamedRule:
    """The rule of that name, with its memory as one decision sees it."""

    routing: Routing
    memory: Recollection

    def decide(self, query: RouteQuery, candidates: Candidates, weights: RouteWeights, rng: Random) -> RouteDecision:
        """``place`` by this rule."""
        return place(self.routing, query, candidates, weights, rng, self.memory)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedRule) and self._key() == other._key()

    __hash__ = None  # type: ignore[assignment]

    def _key(self) -> tuple[object, ...]:
        memory = self.memory
        return self.routing, memory.turn, memory.num_sent_blocks.tolist(), memory.num_remembered_blocks.tolist()


def num_requests(candidates: Candidates) -> Ints:
    """Requests running, waiting or on their way [n]."""
    count: Ints = candidates.told["num_running"] + candidates.told["num_waiting"] + candidates.num_reserved
    return count


def power_of_two(query: RouteQuery, candidates: Candidates, rng: Random) -> Scores:
    """The one with fewer requests of two replicas drawn at random: Ray Serve's default (Mitzenmacher, 2001)."""
    places = np.flatnonzero(is_eligible(query, candidates)).tolist()
    load = num_requests(candidates)
    not_drawn = np.full(len(candidates), 1 + load.max(initial=0))  # all others come after the two
    not_drawn[rng.sample(places, min(2, len(places)))] = 0
    return sum_of(requests=load, not_drawn=not_drawn)


def most_free_blocks(query: RouteQuery, candidates: Candidates) -> Scores:
    """The replica with the most blocks that are free and not promised."""
    return sum_of(promised=candidates.num_reserved_blocks, free=-candidates.told["num_free_blocks"])


def ray_prefix_affinity(
    query: RouteQuery,
    candidates: Candidates,
    memory: Recollection,
    rng: Random,
    imbalanced_threshold: float = RAY_IMBALANCED_THRESHOLD,
) -> Scores:
    """Ray Serve LLM's ``PrefixCacheAffinityRouter`` (2.60): power of two choices if the longest queue exceeds the
    shortest by more than ``imbalanced_threshold`` requests, which never happens with its default; else the longest
    match with what was sent before, if it is at least 10 % of the prompt; else the smallest tree.
    """
    loads = num_requests(candidates)[is_eligible(query, candidates)]
    if loads.size and loads.max() - loads.min() > imbalanced_threshold:
        return power_of_two(query, candidates, rng)
    return _match_or_smallest_tree(query, candidates, memory, RAY_MATCH_RATE_THRESHOLD)


def sglang_cache_aware(query: RouteQuery, candidates: Candidates, memory: Recollection) -> Scores:
    """SGLang router's ``cache_aware`` policy with the defaults of its command line: the shortest queue if the longest
    exceeds it by more than 64 requests and by more than half; else the longest match with what was sent before, if it
    is more than 30 % of the prompt; else the smallest tree. (So until December 2025; since then a prompt without such a
    match goes to the shortest queue, which places worse on the traces here.)
    """
    load = num_requests(candidates)
    loads = load[is_eligible(query, candidates)]
    high, low = loads.max(initial=0), loads.min(initial=np.iinfo(np.int64).max)
    if high - low > SGLANG_BALANCE_ABS_THRESHOLD and high > SGLANG_BALANCE_REL_THRESHOLD * low:
        return sum_of(requests=load)
    return _match_or_smallest_tree(query, candidates, memory, SGLANG_CACHE_THRESHOLD)


def llmd_precise(query: RouteQuery, candidates: Candidates) -> Scores:
    """llm-d's precise prefix scheduling: 2 x matched share of the prompt + 1 x (1 - KV usage) + 1 x queue score (0 for
    the longest queue, 1 for the shortest), with the weights of its precise-prefix configuration; highest wins.
    (Its deprecated scorer counted matches from the shortest holder's to the longest's instead.)
    """
    told = candidates.told
    prefix = candidates.num_matched_blocks / max(1, len(query.block_hashes))
    kv = told["num_free_blocks"] / np.maximum(1, told["num_total_blocks"])
    waiting = told["num_waiting"] + candidates.num_reserved
    among = waiting[is_eligible(query, candidates)]
    longest = among.max(initial=0)
    spread = longest - among.min(initial=longest)
    queue = (longest - waiting) / spread if spread else np.ones(len(candidates))
    return sum_of(prefix=-LLMD_PREFIX_WEIGHT * prefix, kv=-LLMD_KV_WEIGHT * kv, queue=-LLMD_QUEUE_WEIGHT * queue)


def dynamo_linear(query: RouteQuery, candidates: Candidates) -> Scores:
    """Dynamo's KV router: prefill_load_scale x max(0, active prefill blocks + the prompt's - credit x overlap) + decode
    blocks, with those of the request that no running one has already; scale and credit are 1 by default, the
    temperature is 0; lowest wins. Which cached blocks are in use is not known here: the request's all count as added.
    """
    told = candidates.told
    active = told["num_waiting_tokens"] + candidates.num_reserved_tokens
    raw = (active + query.num_prompt_tokens) / query.block_size
    adjusted = np.maximum(0.0, raw - DYNAMO_OVERLAP_CREDIT * candidates.num_matched_blocks)
    decode = told["num_total_blocks"] - told["num_free_blocks"] + candidates.num_reserved_blocks
    decode = decode + query.num_blocks_needed
    return sum_of(prefill=DYNAMO_PREFILL_LOAD_SCALE * adjusted, decode=decode)


def _match_or_smallest_tree(
    query: RouteQuery, candidates: Candidates, memory: Recollection, threshold: float
) -> Scores:
    """The longest match if it is long enough, else the smallest tree; ties by load."""
    load = num_requests(candidates)
    shares = memory.num_sent_blocks / max(1, len(query.block_hashes))
    eligible = is_eligible(query, candidates)
    is_long = shares[eligible].max(initial=0.0) >= max(threshold, 1e-9)
    among_equals = load / (1.0 + load.max(initial=0))
    if is_long:
        return sum_of(match=-memory.num_sent_blocks, requests=among_equals)
    return sum_of(tree=memory.num_remembered_blocks, requests=among_equals)
