"""What a look has decided that still holds: the next look goes on after it."""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.given import Given
from shoal_cluster.policies.held import Held
from shoal_cluster.policies.look import Considered, Step
from shoal_cluster.policies.news import News
from shoal_cluster.policies.plan import Plan
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.policies.view import ClusterView
from shoal_replica.stats import DUE_WITHIN_S

MAX_MATCH_AGE_S = 0.5  # what is cached of a prompt is looked up again when its match is older
MAX_NEWS = 32  # with news of more replicas at once, everything is looked at again;
MAX_EARLIER = 128  # the same with more requests taken back: most of them have gone
EPSILON_S = 1e-9


@dataclass(slots=True, eq=False)
class Planned:
    """A held request and what a look decided for it, which holds ``until_s`` unless there is news."""

    held: Held
    due_s: float
    considered: Considered
    step: Step
    given: Given
    until_s: float


class StandingPlan:
    """A gateway's plan from look to look. Owned by its queue.

    For the requests in ``planned``, the first in order, any look would decide as was decided before; the property test
    compares this with looks that begin anew. Both go by matches of prompts that were looked up within
    ``MAX_MATCH_AGE_S``, not at one moment; the first request's is up to date.

    It lasts where the gateway is the only one and replicas share no cache: else each look begins anew. While a tenant
    is heavy, so does each look after a request was sent, and requests of other tenants are never kept.

    Attributes:
        was_settled: the last look planned everything; ``is_settled`` says whether that still holds.
    """

    def __init__(self) -> None:
        self.planned: list[Planned] = []
        self._after_gap: list[Planned] = []  # planned too, but not all requests before them are
        self._earlier: dict[Held, Planned] = {}  # requests taken back, in order: most of them stand
        self._offered: Planned | None = None
        self._made_way: tuple[list[Planned], dict[Held, Planned]] | None = None  # for a newcomer, and ``_earlier`` then
        self._again: dict[int, Planned] = {}  # what a look left as it was, by id of ``considered``
        self._plan: Plan | None = None
        self._made_for: tuple[object, ...] = ()
        self._num_evicted = -1
        self._order: Sequence[tuple[Held, float]] = ()  # the order that ``planned`` is the beginning of
        self._until_s = -math.inf  # the least of theirs
        self._is_lasting = self.was_settled = False
        self._news = News()

    def forget(self) -> None:
        """Begin anew."""
        self.planned, self._after_gap, self._plan, self.was_settled = [], [], None, False
        self.forget_earlier()

    def forget_earlier(self) -> None:
        """Requests that were taken back will not be asked for any more."""
        self._earlier.clear()
        if self._plan is not None:
            self._plan.mend(False)

    def settle(self) -> None:
        """A look has planned everything."""
        self.forget_earlier()
        if self._plan is not None and self.planned and len(self.planned) == len(self._order):
            self.was_settled = True
            self._plan.settle()

    def is_settled(
        self, order: Sequence[tuple[Held, float]], view: ClusterView, weights: RouteWeights, now: float
    ) -> bool:
        """Whether a look would plan all of ``order`` as the last one did. If so, it counts as taken."""
        news, plan = view.news, self._plan
        if (
            plan is None
            or not self.was_settled
            or order is not self._order
            or now >= self._until_s
            or news.rematched
            or len(news.changed) > MAX_NEWS
            or not all(map(operator.is_, (view, view.replica_ids, weights), self._made_for))
            or view.index.num_evicted != self._num_evicted
        ):
            return False
        columns = view.present(now).columns
        for place in news.changed:
            if not plan.stays_by(place, columns[:, place].tolist()):
                return False
        news.changed.clear()
        self.planned[0].held.matched_s = now
        return True

    def renew(self, view: ClusterView, present: Candidates, weights: RouteWeights, max_steps_ahead: float) -> Plan:
        """The plan for ``present``, the cluster as of now, with room for what is ``planned`` given away."""
        (changed, rematched), index, self.was_settled = view.news.take(), view.index, False
        made_for = (view, view.replica_ids, weights)
        self._is_lasting = index.is_by_replica
        if not (
            self._is_lasting
            and len(changed) <= MAX_NEWS
            and len(self._earlier) <= MAX_EARLIER
            and all(map(operator.is_, made_for, self._made_for))
            and index.num_evicted == self._num_evicted
        ):
            self.forget()
        if self._plan is None or not (self.planned or self._earlier or self._after_gap):
            plan = self._plan = Plan(present, weights, max_steps_ahead)
        else:
            plan = self._plan
            if self.planned:
                block_hashes = self.planned[0].held.pending.query.block_hashes
                for place in rematched:
                    slot = index.slot(view.replica_ids[place])
                    plan.know_matched(place, index.match_slot(slot, block_hashes))
                view.news.watch(block_hashes, plan.given[0].matched)
            self._set_back(plan, plan.keep(present, changed, len(self.planned)))
            if self._earlier:
                plan.differ(changed)
        self._made_for, self._num_evicted, self._news = made_for, index.num_evicted, view.news
        return plan

    def keep(self, plan: Plan, order: Sequence[tuple[Held, float]], now: float) -> int:
        """Requests are to be considered in this ``order``, each with its due date. Returns how many of the first are
        ``planned``; the others no longer are.
        """
        num_kept, self._made_way = len(self.planned), None
        if not num_kept:
            self._order, self._until_s = order, math.inf
            if not plan.is_untouched:
                self._set_back(plan, plan.take_back(0))
            return 0
        if order is not self._order or now >= self._until_s:
            for number, (planned, (held, due_s)) in enumerate(zip(self.planned, order, strict=False)):
                if held is not planned.held or due_s != planned.due_s or now >= planned.until_s:
                    num_kept = number
                    break
            num_kept = min(num_kept, len(order))
            after, earlier = self.planned[num_kept:], self._earlier
            self._set_back(plan, plan.take_back(num_kept))
            if after and num_kept < len(order) and all(order[num_kept][0] is not planned.held for planned in after):
                self._made_way = after, earlier
            self._order, self._until_s = order, min((planned.until_s for planned in self.planned), default=math.inf)
        if num_kept:  # its match is up to date: all news has been applied to it
            first = self.planned[0].held
            first.matched, first.matched_s = plan.given[0].matched, now
        return num_kept

    def close_ranks(self) -> None:
        """The look has sent the first request that was not planned, and decided for no other. If it was a newcomer to
        the order, all requests after it are planned again as before it came; that it was sent is news of its replica.
        """
        if self._made_way is None or self._plan is None:
            return
        (after, self._earlier), self._made_way = self._made_way, None
        self.planned += after
        self._until_s = min(planned.until_s for planned in self.planned)
        self._plan.mend(bool(self._earlier))
        self._plan.undo_take_back()

    def offer(self, number: int, held: Held, due_s: float, now: float) -> Considered | None:
        """``held`` comes next: as it was considered before, if what was decided then may stand."""
        self._offered = None
        if self._plan is None or (planned := self._earlier.get(held)) is None:
            return None
        if number and planned.given.least_blocks and due_s == planned.due_s and now < planned.until_s:
            self._offered = planned
            return planned.considered
        del self._earlier[held]
        self._plan.differ((planned.given.place,))
        return None

    @property
    def may_stand(self) -> bool:
        """Whether something that was taken back may still stand."""
        return bool(self._earlier)

    def again(self, one: Considered) -> Step | None:
        """What was decided for ``one``, if that stands; the plan then has it again. Requests before it in the order
        that have not been asked for are gone.
        """
        plan, offered = self._plan, self._offered
        if plan is None or offered is None or offered.considered is not one:
            return None
        for held in self._earlier:
            if held is offered.held:
                break
            plan.differ((self._earlier[held].given.place,))
        while self._earlier.pop(next(iter(self._earlier))) is not offered:
            pass
        if not plan.stands(offered.given):
            plan.differ((offered.given.place,))
            return None
        plan.give_again(offered.given)
        self._again[id(one)] = offered
        return offered.step

    def note_again(self, number: int, considered: Considered) -> bool:
        """Whether a look has left request ``number`` planned as it was; if so, it is kept."""
        planned = self._again.pop(id(considered), None)
        if planned is not None:
            self._append(number, planned)
        return planned is not None

    def note(self, number: int, held: Held, considered: Considered, step: Step, given: Given, now: float) -> None:
        """A look has planned ``held``. It is kept only if it is certain to be decided the same way again."""
        if not self._is_lasting:
            return
        place = bisect_left(DUE_WITHIN_S, considered.due_s - now)
        until_s = math.inf if number == 0 else held.matched_s + MAX_MATCH_AGE_S
        if place:
            until_s = min(until_s, considered.due_s - DUE_WITHIN_S[place - 1])
        if number == 0:
            self._news.watch(held.pending.query.block_hashes, given.matched)
        self._append(number, Planned(held, considered.due_s, considered, step, given, until_s - EPSILON_S))

    def _append(self, number: int, planned: Planned) -> None:
        if number == len(self.planned):
            self.planned.append(planned)
            self._until_s = min(self._until_s, planned.until_s)
        else:
            self._after_gap.append(planned)

    def _set_back(self, plan: Plan, taken: Sequence[Given]) -> None:
        """The plan has ``taken`` back the last of what was given: it may stand later."""
        set_back = [*self.planned[len(plan.given) :], *self._after_gap]
        del self.planned[len(plan.given) :]
        self._after_gap.clear()
        if set_back:
            self._earlier = {planned.held: planned for planned in set_back} | self._earlier
        plan.mend(bool(self._earlier))
        if self._earlier and len(taken) > len(set_back):
            known = {id(planned.given) for planned in set_back}
            plan.differ([given.place for given in taken if id(given) not in known])
