"""The frame of every placement rule: filter the replicas, score the rest, sort; explain on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import CAPACITY
from shoal_cluster.policies.route_decision import CandidateTerms, RouteDecision
from shoal_cluster.policies.route_query import RouteQuery

Amounts = NDArray[np.float64] | NDArray[np.int64]

MAX_REASONS_SHOWN = 4
MAX_AGE_S = 2.0
"""Older stats are stale: replicas report tens of times a second."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Sort keys of the replicas [n]: those where the request must wait come last; then lowest ``cost`` first.

    Elements of replicas that are not eligible are meaningless.
    """

    cost: Amounts
    must_wait: NDArray[np.bool_] | None = None
    terms: tuple[tuple[str, Amounts], ...] = ()


Score = Callable[[RouteQuery, Candidates], Scores]


def rank(
    query: RouteQuery, candidates: Candidates, rng: Random, score: Score, explain: Score | None = None
) -> RouteDecision:
    """Order ``candidates`` by ``score``; ties are shuffled by ``rng``. ``explain`` gives the same scores with their
    terms and is called only when these are read; the default is ``score``.
    """
    explained = _Explained(query, candidates, score if explain is None else explain)
    eligible = is_eligible(query, candidates)
    num_eligible = int(np.count_nonzero(eligible))
    if not num_eligible:
        why = [f"{candidate.replica_id}: {candidate.rejected}" for candidate in explained]
        return RouteDecision((), f"no replica can take it: {some(why)}" if why else "no replica is known", explained)
    scores = score(query, candidates)
    keys: list[NDArray[Any]] = [shuffle(rng, len(candidates)), scores.cost]
    must_wait = scores.must_wait is not None and scores.must_wait.any()
    if scores.must_wait is not None and must_wait:
        keys.append(scores.must_wait)
    if num_eligible < len(candidates):
        keys.append(~eligible)
    order = np.lexsort(keys)[:num_eligible].tolist()
    ids = candidates.replica_ids
    best = order[0]
    cost = float(scores.cost[best])
    reason = f"{ids[best]}: least cost {round(cost, 2):.10g} of {num_eligible} eligible"
    if scores.must_wait is not None and must_wait:
        if scores.must_wait[best]:
            reason += "; none can start it now"
        elif (scores.cost < cost)[eligible].any():
            reason += "; cheaper ones have no room now"
    stale = ((candidates.age_s > MAX_AGE_S) & eligible).nonzero()[0].tolist()
    if stale:
        reason += f"; stale stats: {some([f'{ids[place]} ({candidates.age_s[place]:.1f} s)' for place in stale])}"
    return RouteDecision(tuple([ids[place] for place in order]), reason, explained)


def best_of(query: RouteQuery, candidates: Candidates, scores: Scores, seed: int) -> tuple[int, int]:
    """The place that ``rank`` puts first with a generator of ``seed``, -1 for none; and how many are eligible."""
    eligible = is_eligible(query, candidates)
    num_eligible = int(np.count_nonzero(eligible))
    if not num_eligible:
        return -1, 0
    costs = scores.cost if num_eligible == eligible.size else np.where(eligible, scores.cost, np.inf)
    if scores.must_wait is not None and scores.must_wait[scores.must_wait.argmax()]:
        at_once = np.where(scores.must_wait, np.inf, costs)
        if at_once[at_once.argmin()] < np.inf:
            costs = at_once
    best = int(costs.argmin())
    equals = costs == costs[best]
    if np.count_nonzero(equals) == 1:
        return best, num_eligible
    places = equals.nonzero()[0]
    dice = shuffle(Random(seed), len(candidates))
    return int(places[dice[places].argmin()]), num_eligible


def shuffle(rng: Random, count: int) -> NDArray[np.uint32]:
    """A random number for each of ``count`` replicas: among equals the lowest goes first."""
    return np.frombuffer(rng.randbytes(4 * count), np.uint32)


def some(items: Sequence[str]) -> str:
    """The first few of ``items`` as text, and how many more there are."""
    shown = ", ".join(items[:MAX_REASONS_SHOWN])
    return shown if len(items) <= MAX_REASONS_SHOWN else f"{shown} and {len(items) - MAX_REASONS_SHOWN} more"


def is_eligible(query: RouteQuery, candidates: Candidates) -> NDArray[np.bool_]:
    """Which replicas could take the request, now or later [n]."""
    eligible: NDArray[np.bool_] = candidates.columns[CAPACITY] >= query.num_blocks_needed
    return eligible & is_allowed(query, candidates) if query.is_restricted else eligible


def is_allowed(query: RouteQuery, candidates: Candidates) -> NDArray[np.bool_]:
    """Which replicas the request may go to as far as ``excluded`` and ``phase`` say [n]."""
    allowed = candidates.serves(query.phase)
    if query.excluded:
        allowed &= ~np.isin(candidates.replica_ids, list(query.excluded))
    return allowed


class _Explained(Sequence[CandidateTerms]):
    """Every candidate's terms, computed when first read: a decision does not wait for its explanation."""

    __slots__ = ("_inputs", "_terms")

    def __init__(self, query: RouteQuery, candidates: Candidates, score: Score) -> None:
        self._inputs = (query, candidates, score)
        self._terms: tuple[CandidateTerms, ...] | None = None

    def __len__(self) -> int:
        return len(self._inputs[1])

    @overload
    def __getitem__(self, index: int) -> CandidateTerms: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[CandidateTerms, ...]: ...
    def __getitem__(self, index: int | slice) -> CandidateTerms | tuple[CandidateTerms, ...]:
        return self._all()[index]

    def __iter__(self) -> Iterator[CandidateTerms]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all() == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._all())

    def _all(self) -> tuple[CandidateTerms, ...]:
        if self._terms is None:
            query, candidates, score = self._inputs
            scores = score(query, candidates)
            self._terms = tuple(
                _explain(query, candidates, scores, place, bool(eligible))
                for place, eligible in enumerate(is_eligible(query, candidates))
            )
        return self._terms


def _explain(query: RouteQuery, candidates: Candidates, scores: Scores, place: int, eligible: bool) -> CandidateTerms:
    replica_id = candidates.replica_ids[place]
    if not eligible:
        return CandidateTerms(replica_id, False, _rejection(query, candidates, place))
    terms = tuple((name, amounts[place].item()) for name, amounts in scores.terms)
    return CandidateTerms(replica_id, True, "", scores.cost[place].item(), terms)


def _rejection(query: RouteQuery, candidates: Candidates, place: int) -> str:
    stats = candidates.stats[place]
    if candidates.replica_ids[place] in query.excluded:
        return "excluded"
    if query.phase and (role := candidates.states[place].role) not in ("", query.phase):
        return f"for {role} alone"
    if not candidates.states[place].connected:
        return "not connected"
    if stats is None:
        return "no stats yet"
    if stats.draining:
        return "draining"
    if candidates.states[place].stalled:
        return "stalled"
    return f"needs {query.num_blocks_needed} blocks, has {stats.num_total_blocks}"
