"""Late binding: requests wait at the gateway and are placed when a replica can start them, not when they come.

A request that has been placed is stuck behind whatever its replica turns out to do; one that is held goes to whoever is
free first, and to the best of them. Replicas therefore get only what they can start within about a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from random import Random

import numpy as np
from numpy.typing import NDArray

from shoal_cluster.policies.candidates import Candidates, Ints
from shoal_cluster.policies.objective import LatencyObjective, PrefillTime
from shoal_cluster.policies.ranking import RouteDecision, RouteQuery, uncached_blocks, uncached_tokens
from shoal_cluster.policies.routing import RouteWeights, route
from shoal_cluster.policies.tenants import FairShares
from shoal_cluster.policies.view import ClusterView
from shoal_replica.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldConfig:
    """How requests are held.

    Attributes:
        objective, prefill: when a first token is due. Only the order depends on them.
        max_steps_ahead: a replica is sent a request when the prompt tokens before it fill at most so many of its steps.
            One keeps it busy while news travel; more gives up choices and gains nothing.
        max_considered: how many requests, the most urgent first, one look considers.
    """

    objective: LatencyObjective = field(default_factory=LatencyObjective)
    prefill: PrefillTime = field(default_factory=PrefillTime)
    max_steps_ahead: float = 1.0
    max_considered: int = 32

    def __post_init__(self) -> None:
        if not self.max_steps_ahead > 0:
            raise ConfigError(f"max_steps_ahead: got {self.max_steps_ahead!r}; must be above 0")
        if self.max_considered < 1:
            raise ConfigError(f"max_considered: got {self.max_considered!r}; must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRequest:
    """A request that waits at the gateway. ``arrival_s`` is on the clock of ``PendingQueue.next``'s ``now``."""

    query: RouteQuery
    arrival_s: float
    tenant: str = ""
    priority: int = 0  # lower goes first, whatever is due


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A request to send now, to ``replica_id``; ``route`` with these candidates and ``seed`` decides the same again.

    Attributes:
        candidates: what the decision saw. Promised there: also what more urgent requests, still held, will take.
        due_s: when its first token is due; the replica's ``deadline`` policy goes by it.
    """

    pending: PendingRequest
    replica_id: str
    due_s: float
    candidates: Candidates
    seed: int
    decision: RouteDecision


@dataclass(slots=True, eq=False)
class _Held:
    """``prefill_s`` is its own prefill where it is cached best, as far as known; ``due_s`` follows from it."""

    pending: PendingRequest
    prefill_s: float
    due_s: float


class PendingQueue:
    """The requests that a gateway holds; owner and only writer is the gateway.

    Order: priority; then tenants that have had no more than their share; then the earliest due date. A due date that
    can no longer be met is put off (``LatencyObjective.next_due_s``): what is lost does not cost others theirs, and
    nobody starves.
    """

    def __init__(self, config: HoldConfig) -> None:
        self._config = config
        self._held: dict[str, _Held] = {}
        self._shares = FairShares()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def __iter__(self) -> Iterator[PendingRequest]:
        """In order of arrival here."""
        return (held.pending for held in self._held.values())

    def push(self, pending: PendingRequest) -> None:
        """Hold a request until ``next`` returns it or ``remove`` takes it away."""
        request_id = pending.query.request_id
        if request_id in self._held:
            raise ValueError(f"request {request_id!r} is held already")
        held = self._held[request_id] = _Held(pending, 0.0, 0.0)
        self._note_cost(held, 0, pending.arrival_s)
        self._shares.enter(pending.tenant)

    def remove(self, request_id: str) -> PendingRequest | None:
        """Give a request up: its client has left or its deadline has passed. None if it is not held."""
        held = self._held.pop(request_id, None)
        if held is None:
            return None
        self._shares.leave(held.pending.tenant)
        return held.pending

    def next(self, view: ClusterView, weights: RouteWeights, now: float, rng: Random) -> Dispatch | None:
        """The request to send now, no longer held; None when none can start, or each is better off waiting.

        Requests are considered in order. Each is routed, busy replicas included; if the best one cannot start it, it
        stays and takes its place there in the plan before the next is considered. So a less urgent one may start
        elsewhere meanwhile, and many that want one replica spread as soon as waiting for it costs more than computing
        their prefix again. The caller reserves what it sends, and asks again until None.
        """
        if not self._held:
            return None
        snapshot = view.candidates((), now)
        if not self._may_start(snapshot).any():
            return None
        for held in self._most_urgent(now):
            query = held.pending.query
            matched = view.candidates(query.block_hashes, now).num_matched_blocks
            candidates = replace(snapshot, num_matched_blocks=matched)
            seed = rng.getrandbits(32)
            decision = route(query, candidates, weights, Random(seed))
            if not decision.ranked:
                continue
            best = candidates.replica_ids.index(decision.ranked[0])
            num_matched = int(matched[best])
            num_tokens, num_blocks = uncached_tokens(query, num_matched), uncached_blocks(query, num_matched)
            self._note_cost(held, query.num_prompt_tokens - num_tokens, now)
            if self._may_start(candidates)[best] and num_blocks <= _num_open_blocks(candidates)[best]:
                self.remove(query.request_id)
                self._shares.charge(held.pending.tenant, num_tokens)
                return Dispatch(held.pending, decision.ranked[0], held.due_s, candidates, seed, decision)
            promised = snapshot.promised.copy()
            promised[:, best] += (1, num_blocks, num_tokens)
            snapshot = replace(snapshot, promised=promised)
            if not self._may_start(snapshot).any():
                return None
        return None

    def _most_urgent(self, now: float) -> list[_Held]:
        for held in self._held.values():
            if held.due_s < now + held.prefill_s:
                self._note_due(held, now)
        return nsmallest(
            self._config.max_considered,
            self._held.values(),
            key=lambda held: (held.pending.priority, self._shares.excess(held.pending.tenant), held.due_s),
        )

    def _may_start(self, candidates: Candidates) -> NDArray[np.bool_]:
        """Which replicas could start something within ``max_steps_ahead`` [n]."""
        told = candidates.told
        ahead = told["num_waiting_tokens"] + candidates.num_reserved_tokens
        may: NDArray[np.bool_] = told["connected"] & told["known"] & ~told["draining"]
        may &= ahead <= self._config.max_steps_ahead * told["max_num_batched_tokens"]
        may &= (told["num_open_slots"] > candidates.num_reserved) & (_num_open_blocks(candidates) > 0)
        return may

    def _note_cost(self, held: _Held, num_cached_tokens: int, now: float) -> None:
        num_new_tokens = held.pending.query.num_prompt_tokens - num_cached_tokens
        held.prefill_s = self._config.prefill.seconds(num_cached_tokens, num_new_tokens)
        self._note_due(held, now)

    def _note_due(self, held: _Held, now: float) -> None:
        held.due_s = self._config.objective.next_due_s(held.pending.arrival_s, held.prefill_s, now)


def _num_open_blocks(candidates: Candidates) -> Ints:
    open_blocks: Ints = candidates.told["num_open_blocks"] - candidates.num_reserved_blocks
    return open_blocks
