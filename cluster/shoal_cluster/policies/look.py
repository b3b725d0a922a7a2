"""One look over the held requests: which one is sent where, and where the others are planned. Pure, and recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.considered import Assignment, Considered
from shoal_cluster.policies.pending_request import QueuePlace
from shoal_cluster.policies.plan import Plan
from shoal_cluster.policies.route_decision import RouteDecision
from shoal_cluster.policies.routing import RouteWeights, choose, may_be_sooner_elsewhere

NUM_FIRST = 4
"""Of requests that are made ready one after another, a look takes in so many before the rest: often one of them goes.
"""

Basis = tuple[Candidates, int]
"""What the final decision for a request that seems able to start goes by: a fresh snapshot, with the blocks of its
prompt that are cached, and the seed that breaks ties.
"""


class Sent(NamedTuple):
    """How the request that goes was placed: ``route`` with these candidates and ``seed`` decides the same again."""

    candidates: Candidates
    seed: int
    decision: RouteDecision


class Look(NamedTuple):
    """A look with all its inputs.

    Attributes:
        snapshot: the cluster, for no prompt in particular.
        patience: as in ``Plan``.
        plans_all: whether requests are planned even when no replica may start anything more.
        considered: requests, the most urgent first, as far as the look went.
        bases: of the requests that seemed able to start, by their number.
        assignments: what was decided for each; the last one was sent.
    """

    snapshot: Candidates
    weights: RouteWeights
    max_steps_ahead: float
    patience: float
    plans_all: bool
    considered: tuple[Considered, ...]
    bases: dict[int, Basis]
    assignments: tuple[Assignment, ...]

    @property
    def num_bytes(self) -> int:
        """About how many bytes the data per replica takes, without the snapshot."""
        return sum(one.num_bytes for one in self.considered)

    def queue(self) -> tuple[QueuePlace, ...]:
        """The requests that came before the one that was sent, with where they wait, then that one."""
        ids, now = self.snapshot.replica_ids, self.snapshot.now
        return tuple(
            QueuePlace(one.query.request_id, ids[place] if place >= 0 else "", one.due_s - now)
            for one, (place, _) in zip(self.considered, self.assignments, strict=True)
        )

    def replay(self) -> tuple[tuple[Assignment, ...], bool]:
        """Decide again from the record: equal to ``assignments``; and whether the last request is sent."""
        plan = Plan(self.snapshot, self.weights, self.max_steps_ahead, self.patience)
        at_once = 0 in self.bases  # if there was a try before it, that has changed nothing
        again = look(plan, self.considered, self.plans_all, self.bases.__getitem__, at_once=at_once)
        return tuple(again.assignments), again.sent is not None


class LookResult(NamedTuple):
    """What a look has come to: its requests as far as it went, what was decided for each, and how the last one goes, if
    it is sent.
    """

    considered: list[Considered]
    assignments: list[Assignment]
    sent: Sent | None


def look(
    plan: Plan, considered: Iterable[Considered], plans_all: bool, basis_of: Callable[[int], Basis], *, at_once: bool
) -> LookResult:
    """Decide on ``considered`` in order, up to the first that is sent or (without ``plans_all``) until no replica may
    start anything more.

    Each request is placed on the best replica, which may be busy; if that cannot start it, it is planned there before
    the next is considered. One that seems able to start is placed by ``basis_of``: by what is cached now. With
    ``at_once`` the first is so without a try, as a request that is alone usually goes.
    """
    seen: list[Considered] = []
    assignments: list[Assignment] = []
    waiting = iter(considered)
    for count in (None,) if isinstance(considered, list | tuple) else (NUM_FIRST, None):
        seen += islice(waiting, count)
        while len(assignments) < len(seen):
            number = len(assignments)
            if at_once and number == 0:
                plan.foresee(seen[0].before, seen[0].query.block_size)
            else:
                planned, may_start = plan.until_startable(seen[number:], plans_all)
                assignments += planned
                number = len(assignments)
                if number == len(seen):
                    break
                if not may_start:
                    return LookResult(seen[:number], assignments, None)
            one = seen[number]
            candidates, seed = basis_of(number)
            candidates = plan.seen_by_next(candidates)
            place, decision = choose(one.query, candidates, plan.weights, seed)
            most = plan.patience_tokens(one)
            if place >= 0 and most is not None and may_be_sooner_elsewhere(one.query, candidates, place, most):
                one = seen[number] = one.impatient(most)
                place, decision = choose(one.query, candidates, plan.weights, seed)
            num_matched = 0 if place < 0 else candidates.num_matched_blocks.item(place)
            assignments.append((place, num_matched))
            if place >= 0 and plan.can_start(one.query, place, num_matched, one.due_s):
                return LookResult(seen[: len(assignments)], assignments, Sent(candidates, seed, decision))
            if place >= 0:
                plan.give(one.query, place, num_matched)
    return LookResult(seen, assignments, None)
