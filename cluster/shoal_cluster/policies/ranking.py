"""The frame of every placement rule: filter the replicas, score the rest, sort; explain on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import CAPACITY, Phase
from shoal_replica.prefix_cache import BlockHash, hash_blocks
from shoal_replica.request import Request

Terms = tuple[tuple[str, float], ...]
Amounts = NDArray[np.float64] | NDArray[np.int64]

MAX_REASONS_SHOWN = 4
MAX_AGE_S = 2.0
"""Older stats are stale: replicas report tens of times a second."""

PRICED_STEPS = 128
BYTES_PER_PASSED = 96  # an entry of ``RouteQuery.passed``: tuple, integer and reference; the replica's id is shared


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteQuery:
    """What routing needs to know of a request.

    Attributes:
        block_hashes: hashes of the prompt's full blocks.
        num_prompt_tokens: those that must be computed where none of it is cached: all but what comes with it.
        num_blocks_needed: blocks that the request needs to start: those of its prompt and of its first token.
        excluded: replicas that have refused or lost the request already, or lack its adapter.
        decode_steps: steps in which it will decode beside other sequences, as far as they are priced: the tokens that
            it may still generate, at most ``PRICED_STEPS``.
        passed: pairs of a replica's id and the prompt tokens waiting there that this request goes ahead of, because
            their tenants yield to its own.
        phase: what it is sent for, where replicas have roles: it goes to those for this phase.
        num_known_blocks: leading blocks of the prompt that some replica has cached, where others wait that begin so.
        num_alike, num_holders: how many of those there are at least, this one included, and how many replicas have the
            blocks. One more would serve its part of them, which share what the blocks cost there.
    """

    request_id: str
    block_hashes: tuple[BlockHash, ...]
    num_prompt_tokens: int
    num_blocks_needed: int
    block_size: int
    excluded: frozenset[str] = frozenset()
    decode_steps: int = PRICED_STEPS
    passed: tuple[tuple[str, int], ...] = ()
    phase: Phase = ""
    num_known_blocks: int = 0
    num_alike: int = 1
    num_holders: int = 0

    @property
    def spared(self) -> float:
        """The part of what known blocks cost on one more replica that others pay."""
        return max(0.0, 1.0 - (self.num_holders + 1) / self.num_alike)

    def anew(self) -> RouteQuery:
        """The same for a decision at another time: what it says of other requests is out of date."""
        return replace(self, passed=(), num_known_blocks=0, num_alike=1, num_holders=0)

    def with_blocks_given(self, num_blocks: int) -> RouteQuery:
        """The same where so many of its leading blocks come from another replica: they take room, but no computing."""
        return replace(self, num_prompt_tokens=max(1, self.num_prompt_tokens - num_blocks * self.block_size))

    @property
    def is_restricted(self) -> bool:
        """Whether there may be replicas that it must not go to, whatever their size."""
        return bool(self.excluded or self.phase)

    @classmethod
    def for_request(cls, request: Request, block_size: int, is_caching: bool = True) -> RouteQuery:
        """The query that places ``request``. Tokens that another replica has generated count as prompt. There are no
        block hashes unless the replicas cache prefixes (``is_caching``), and this one's too.
        """
        token_ids, separation = request.known_token_ids(), (request.cache_salt, request.adapter)
        return cls(
            request_id=request.request_id,
            block_hashes=tuple(hash_blocks(token_ids, block_size, *separation))
            if is_caching and request.is_cached
            else (),
            num_prompt_tokens=len(token_ids),
            num_blocks_needed=-(-(len(token_ids) + 1) // block_size),
            block_size=block_size,
            decode_steps=priced_steps(request.sampling_params.max_tokens, len(request.output_token_ids)),
        )


@dataclass(frozen=True, slots=True)
class CandidateTerms:
    """One replica's part in a decision. Lower ``score`` is better; it is 0 for a replica that is not eligible.

    ``rejected`` says why it is not eligible. The ``terms`` add up to the score, except those named ``*_blocks`` and
    ``*_slots``, which are what the barrier saw (see ``route``).
    """

    replica_id: str
    eligible: bool
    rejected: str = ""
    score: float = 0.0
    terms: Terms = ()


class RouteDecision:
    """Eligible replicas, best first (none: no replica can take the request), the reason, and every candidate's terms.

    A ``deferred`` decision knows only its ``best``, "" for none, and ``num_ranked``; the rest is computed when it is
    first read.
    """

    __slots__ = ("_parts", "_work_out", "best", "num_ranked")

    def __init__(self, ranked: tuple[str, ...], reason: str, candidates: Sequence[CandidateTerms]) -> None:
        self.best = ranked[0] if ranked else ""
        self.num_ranked = len(ranked)
        self._parts: tuple[tuple[str, ...], str, Sequence[CandidateTerms]] | None = (ranked, reason, candidates)
        self._work_out: Callable[[], RouteDecision] | None = None

    @classmethod
    def deferred(cls, best: str, num_ranked: int, work_out: Callable[[], RouteDecision]) -> RouteDecision:
        """A decision for ``best`` among ``num_ranked``; ``work_out`` computes all of it, and must agree."""
        decision = cls.__new__(cls)
        decision.best, decision.num_ranked = best, num_ranked
        decision._parts, decision._work_out = None, work_out
        return decision

    @property
    def ranked(self) -> tuple[str, ...]:
        return self._whole()[0]

    @property
    def reason(self) -> str:
        return self._whole()[1]

    @property
    def candidates(self) -> Sequence[CandidateTerms]:
        return self._whole()[2]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RouteDecision) and self.best == other.best and self._whole() == other._whole()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RouteDecision(best={self.best!r}, reason={self.reason!r})"

    def _whole(self) -> tuple[tuple[str, ...], str, Sequence[CandidateTerms]]:
        if self._parts is None:
            assert self._work_out is not None
            whole = self._work_out()
            assert whole.best == self.best, f"{self.best} was chosen, {whole.best} is the best"
            self._parts, self._work_out = whole._whole(), None
        return self._parts


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


def priced_steps(max_tokens: int | None, num_generated: int = 0) -> int:
    """``RouteQuery.decode_steps`` of a request; it may generate ``max_tokens`` in all, None for no limit."""
    return PRICED_STEPS if max_tokens is None else min(PRICED_STEPS, max(1, max_tokens - num_generated))


def uncached_tokens(query: RouteQuery, num_matched_blocks: int) -> int:
    """Prompt tokens to compute where that many blocks are cached: at least one, as its logits are needed."""
    return max(1, query.num_prompt_tokens - num_matched_blocks * query.block_size)


def uncached_blocks(query: RouteQuery, num_matched_blocks: int) -> int:
    """Blocks that the request needs there beyond the cached ones: what to reserve."""
    return max(0, query.num_blocks_needed - num_matched_blocks)


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
