"""When the requests that a gateway holds are due."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.held import Held
from shoal_cluster.policies.held_order import HeldOrder
from shoal_cluster.policies.objective import LatencyObjective, PrefillTime
from shoal_cluster.policies.overload import Backlog, Claim, met_together
from shoal_cluster.policies.pace import PACE_AGE_S, Pace
from shoal_cluster.policies.wishes import PlacedWish, Rank, Wish

EPSILON_S = 1e-9
MOST_TOGETHER = 1000
"""Dates are made together for so many of the most urgent requests. With that many before them, the others start no
sooner for dates of their own, and all tokens that go through the gateway would wait for these to be made. With n times
as many held, dates are made n times less often, and so they are made for all, each by itself, as the pace changes.
"""


class DueDates:
    """Makes due dates. One that can no longer be met, alone or together with the others, is put off
    (``LatencyObjective.next_due_s``): a request whose objective is lost does not cost others theirs, and none gives way
    for ever (``MOST_LENGTHS``). Owned by a queue, whose order it keeps up to date.

    Attributes:
        pace: how long prompts take.
    """

    def __init__(self, objective: LatencyObjective, prefill: PrefillTime, by_urgency: HeldOrder) -> None:
        self.pace = Pace(prefill)
        self._objective = objective
        self._by_urgency = by_urgency
        self._together_s = -math.inf  # when dates were made for all together
        self._all_s = -math.inf  # when they were made for all, each by itself
        self._is_pace_new = False  # since then

    def note_pace(self) -> None:
        """The pace has changed."""
        self._is_pace_new = True

    def renew(self, everybody: Collection[Held], begins_s: float, now: float) -> None:
        """Make due dates anew such that each can be met by itself: of all requests if the pace has changed, else of
        those that cannot be met any more. ``begins_s``: when a replica can begin with more work. A lost request gets no
        earlier date here.
        """
        if self._is_pace_new and now - self._all_s >= PACE_AGE_S * len(everybody) / MOST_TOGETHER:
            self._is_pace_new, self._all_s = False, now
            for held in everybody:
                self._date(held, begins_s)
                _keep_if_lost(held)
            self._by_urgency.move_all()
        else:
            self._renew_missed(begins_s)

    def _renew_missed(self, begins_s: float) -> None:
        if begins_s < self._by_urgency.begins_by_s - EPSILON_S:
            return
        for held in self._by_urgency.that_begin_by(begins_s + EPSILON_S):
            if held.due_s < begins_s + held.takes_s:
                self.note(held, begins_s)
                _keep_if_lost(held)

    def renew_together(
        self, everybody: Collection[Held], wishes: Sequence[PlacedWish], begins_s: float, replicas: Candidates
    ) -> None:
        """Make dates that can be met together, with other gateways' wishes. Called as often as the pace is read."""
        now, num_held = replicas.now, len(everybody)
        if num_held == 1 and not next(iter(everybody)).is_lost:
            return
        if now - self._together_s < PACE_AGE_S * num_held / MOST_TOGETHER:
            return
        self._together_s = now
        if num_held > MOST_TOGETHER:
            urgent = self._by_urgency.first(MOST_TOGETHER)
            everybody = [held for held in everybody if held in urgent]
        backlog = Backlog.of(replicas, self.pace.token_s)
        if not backlog.levels:
            return
        claims = [self._claim(held, begins_s) for held in everybody]
        block_size = next(iter(everybody)).pending.query.block_size
        claims += [self._wished(other.wish, begins_s, block_size) for other in wishes]
        for held, claim, due_s in zip(everybody, claims, met_together(claims, backlog), strict=False):
            if due_s != held.due_s:
                is_lost = due_s > claim.arrival_s + claim.length_s
                held.not_before_s = due_s if is_lost else -math.inf
                self.note(held, begins_s)

    def note(self, held: Held, begins_s: float) -> None:
        """Set what its prompt takes at the present pace, and when it is due if it begins at ``begins_s`` or later."""
        self._date(held, begins_s)
        self._by_urgency.put(held)

    def _date(self, held: Held, begins_s: float) -> None:
        num_tokens = held.num_new_tokens
        num_cached_tokens = held.pending.query.num_prompt_tokens - num_tokens
        alone_s, takes_s = self.pace.seconds(num_cached_tokens, num_tokens)
        held.length_s = self._objective.due_in_s(alone_s)
        due_s = self._objective.next_due_s(held.pending.arrival_s, alone_s, begins_s + takes_s)
        held.due_s, held.takes_s = max(due_s, held.not_before_s), takes_s
        held.is_lost = held.due_s > held.objective_s

    def _claim(self, held: Held, begins_s: float) -> Claim:
        rank, is_over = self._by_urgency.rank(held), self._by_urgency.is_over(held)
        return self._as_of(begins_s, rank, held.takes_s, held.pending.arrival_s, held.length_s, is_over)

    def _wished(self, wish: Wish, begins_s: float, block_size: int) -> Claim:
        """The claim of another gateway's request, which that gateway puts off just as this one would."""
        _, takes_s = self.pace.seconds(wish.num_cached_blocks * block_size, wish.num_tokens)
        return self._as_of(begins_s, wish.rank, takes_s, wish.arrival_s, wish.length_s, wish.is_over)

    def _as_of(
        self, begins_s: float, rank: Rank, takes_s: float, arrival_s: float, length_s: float, is_over: bool
    ) -> Claim:
        """A claim in which a lost request is due as soon as it can be met."""
        *group, due_s = rank
        if due_s > arrival_s + length_s + EPSILON_S:
            due_s = self._objective.renewed_s(arrival_s, length_s, begins_s + takes_s)
        return Claim((group[0], group[1]), due_s, takes_s, arrival_s, length_s, is_over)


def _keep_if_lost(held: Held) -> None:
    """A lost request gets no earlier date until dates are made for all together."""
    if held.is_lost:
        held.not_before_s = held.due_s
