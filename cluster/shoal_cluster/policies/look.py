"""One look over the held requests: who is sent, where, and where the others are planned. A pure function, recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from shoal_cluster.policies.candidates import Candidates, Ints
from shoal_cluster.policies.plan import Plan
from shoal_cluster.policies.ranking import RouteDecision, RouteQuery
from shoal_cluster.policies.routing import RouteWeights, choose
from shoal_cluster.policies.wishes import PlacedWish

MIN_PRICED, NUM_PRICES = 8, 4096
"""How many requests are priced at once: at least, and as many as need so many prices."""

Draw = tuple[Candidates, int]
"""By what a request is placed once it seems that it can go: the cluster for its prompt as of now, and a seed."""


@dataclass(frozen=True, slots=True, eq=False)
class Considered:
    """A held request as a look sees it.

    Attributes:
        due_in_s: seconds until its first token is due.
        matched: blocks cached on each replica, as looked up lately [n].
        before: what other gateways hold that comes before it and after the one considered before it.
    """

    query: RouteQuery
    due_in_s: float
    matched: Ints
    before: tuple[PlacedWish, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What a look decided of one request: the place of the replica it is sent to, or is to wait for; -1: for none."""

    place: int
    num_matched_blocks: int
    is_sent: bool = False


@dataclass(frozen=True, slots=True)
class Sent:
    """The request that goes: ``route`` with these candidates and ``seed`` decides the same again."""

    candidates: Candidates
    seed: int
    decision: RouteDecision


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """A look with all that made it.

    Attributes:
        snapshot: the cluster, for no prompt in particular.
        plans_all: whether those are planned too that come when no replica may start anything more.
        considered: the most urgent first, as far as the look went.
        draws: by number of the request.
        steps: what was decided of each.
    """

    snapshot: Candidates
    weights: RouteWeights
    max_steps_ahead: float
    plans_all: bool
    considered: tuple[Considered, ...]
    draws: dict[int, Draw]
    steps: tuple[Step, ...]

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays, but for those of the snapshot."""
        return sum(one.matched.nbytes for one in self.considered)

    def replay(self) -> tuple[Step, ...]:
        """Decide again from the record: equal to ``steps``."""
        plan = Plan(self.snapshot, self.weights, self.max_steps_ahead)
        return look(plan, self.considered, self.plans_all, self.draws.__getitem__)[0]


def look(
    plan: Plan, considered: Iterable[Considered], plans_all: bool, draw: Callable[[int], Draw]
) -> tuple[tuple[Step, ...], Sent | None]:
    """Decide of ``considered`` in order, up to the first that is sent or until no replica may start anything more.

    Each is placed, busy replicas included; if the best one cannot start it, it is planned there before the next is
    considered. The first is placed without a plan: mostly it goes.
    """
    steps: list[Step] = []
    for row, one in _priced(plan, considered):
        for other in one.before:
            plan.set_aside(other.place, other.wish.num_blocks, other.wish.num_tokens)
        query, is_first = one.query, not steps
        place, may_go = (-1, True) if is_first else plan.best(row)
        num_matched = 0 if place < 0 else int(one.matched[place])
        if is_first or (may_go and plan.can_start(query, place, num_matched, one.due_in_s)):
            candidates, seed = draw(len(steps))
            candidates = plan.seen_by_next(candidates)
            place, decision = choose(query, candidates, plan.weights, seed)
            num_matched = 0 if place < 0 else int(candidates.num_matched_blocks[place])
            if place >= 0 and plan.can_start(query, place, num_matched, one.due_in_s):
                steps.append(Step(place, num_matched, is_sent=True))
                return tuple(steps), Sent(candidates, seed, decision)
        steps.append(Step(place, num_matched))
        if place < 0:
            continue
        plan.give(query, place, num_matched)
        if not (plans_all or plan.may_start().any()):
            break
    return tuple(steps), None


def _priced(plan: Plan, considered: Iterable[Considered]) -> Iterator[tuple[int, Considered]]:
    """Each with its number for ``plan.best``: the first without a price, the others priced some at a time."""
    waiting = iter(considered)
    first = next(waiting, None)
    if first is None:
        return
    yield 0, first
    size = max(MIN_PRICED, NUM_PRICES // len(first.matched)) if len(first.matched) else MIN_PRICED
    while batch := list(islice(waiting, size)):
        plan.consider([one.query for one in batch], np.stack([one.matched for one in batch]))
        yield from enumerate(batch)
