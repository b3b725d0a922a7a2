"""One look over the held requests: which one is sent where, and where the others are planned. Pure, and recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import Ints
from shoal_cluster.policies.held import QueuePlace
from shoal_cluster.policies.plan import Plan
from shoal_cluster.policies.ranking import BYTES_PER_PASSED, RouteDecision, RouteQuery
from shoal_cluster.policies.routing import RouteWeights, choose
from shoal_cluster.policies.wishes import PlacedWish

MIN_PRICED, NUM_PRICES = 8, 4096
"""Requests are priced in batches: of at least ``MIN_PRICED``, or of as many as make ``NUM_PRICES`` prices."""

Draw = tuple[Candidates, int]
"""What a request is placed by once it seems able to go: the cluster for its prompt as of now, and a seed."""


class Considered(NamedTuple):
    """A held request as a look sees it.

    Attributes:
        due_s: when its first token is due, on the clock of ``Candidates.now``.
        matched: blocks cached on each replica, as looked up lately [n].
        before: other gateways' requests that come between it and the one considered before it.
    """

    query: RouteQuery
    due_s: float
    matched: Ints
    before: tuple[PlacedWish, ...] = ()


class Step(NamedTuple):
    """What a look decided for one request: the place of the replica that it is sent to or waits for; -1: none."""

    place: int
    num_matched_blocks: int
    is_sent: bool = False


class Sent(NamedTuple):
    """How the request that goes was placed: ``route`` with these candidates and ``seed`` decides the same again."""

    candidates: Candidates
    seed: int
    decision: RouteDecision


class Look(NamedTuple):
    """A look with all its inputs.

    Attributes:
        snapshot: the cluster, for no prompt in particular.
        plans_all: whether requests are planned even when no replica may start anything more.
        considered: requests, the most urgent first, as far as the look went.
        draws: by the number of the request.
        steps: what was decided for each.
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
        """About how many bytes the data per replica takes, without the snapshot."""
        return sum(one.matched.nbytes + BYTES_PER_PASSED * len(one.query.passed) for one in self.considered)

    def queue(self) -> tuple[QueuePlace, ...]:
        """The requests that came before the one that was sent, with where they wait, then that one."""
        ids, now = self.snapshot.replica_ids, self.snapshot.now
        return tuple(
            QueuePlace(one.query.request_id, ids[step.place] if step.place >= 0 else "", one.due_s - now)
            for one, step in zip(self.considered, self.steps, strict=True)
        )

    def replay(self) -> tuple[Step, ...]:
        """Decide again from the record: equal to ``steps``."""
        plan = Plan(self.snapshot, self.weights, self.max_steps_ahead)
        return look(plan, self.considered, self.plans_all, self.draws.__getitem__)[0]


class Earlier(Protocol):
    """What earlier looks have decided."""

    @property
    def may_stand(self) -> bool:
        """Whether some of it may still stand."""
        ...

    def again(self, one: Considered) -> Step | None:
        """What was decided for ``one``, if that stands; the plan then has it again."""
        ...


def look(
    plan: Plan,
    considered: Iterable[Considered],
    plans_all: bool,
    draw: Callable[[int], Draw],
    decided: Sequence[Step] = (),
    earlier: Earlier | None = None,
) -> tuple[tuple[Step, ...], Sent | None]:
    """Decide on ``considered`` in order, up to the first that is sent or (without ``plans_all``) until no replica may
    start anything more.

    Each request is placed on the best replica, which may be busy; if that cannot start it, it is planned there before
    the next is considered. The first is drawn at once, not priced, for it usually goes. ``decided`` are the first
    steps, which the plan already has: they would be decided the same again. Later ones stand if ``earlier`` says so.
    """
    steps = list(decided)
    waiting = islice(considered, len(steps), None)
    if not steps:
        batch = list(islice(waiting, 1))
    elif not (plans_all or plan.has_startable):
        return tuple(steps), None
    else:
        batch = _to_price(plan, waiting, plans_all, steps, earlier)
    while batch:
        for row, one in enumerate(batch):
            for other in one.before:
                plan.foresee(other, one.query.block_size)
            query, is_first = one.query, not steps
            place, may_go = (-1, True) if is_first else plan.best(row)
            matched = one.matched
            num_matched = 0 if place < 0 else matched.item(place)
            if is_first or (may_go and plan.can_start(query, place, num_matched, one.due_s)):
                candidates, seed = draw(len(steps))
                candidates = plan.seen_by_next(candidates)
                place, decision = choose(query, candidates, plan.weights, seed)
                matched = candidates.num_matched_blocks
                num_matched = 0 if place < 0 else matched.item(place)
                if place >= 0 and plan.can_start(query, place, num_matched, one.due_s):
                    steps.append(Step(place, num_matched, is_sent=True))
                    return tuple(steps), Sent(candidates, seed, decision)
            steps.append(Step(place, num_matched))
            if place < 0:
                continue
            plan.give(query, place, matched, one.due_s)
            if not (plans_all or plan.has_startable):
                return tuple(steps), None
        batch = _to_price(plan, waiting, plans_all, steps, earlier)
    return tuple(steps), None


def _to_price(
    plan: Plan, waiting: Iterator[Considered], plans_all: bool, steps: list[Step], earlier: Earlier | None
) -> list[Considered]:
    """The next few requests, priced for ``plan.best`` in this order; what stands before them goes to ``steps``."""
    while earlier is not None and earlier.may_stand:
        one = next(waiting, None)
        if one is None:
            return []
        step = earlier.again(one)
        if step is None:
            plan.consider([one.query], one.matched[np.newaxis])
            return [one]
        steps.append(step)
        if not (plans_all or plan.has_startable):
            return []
    return _priced(plan, waiting)


def _priced(plan: Plan, waiting: Iterator[Considered]) -> list[Considered]:
    """The next few requests, priced for ``plan.best`` in this order."""
    size = max(MIN_PRICED, NUM_PRICES // max(1, plan.num_replicas))
    batch = list(islice(waiting, size))
    if batch:
        plan.consider([one.query for one in batch], np.stack([one.matched for one in batch]))
    return batch
