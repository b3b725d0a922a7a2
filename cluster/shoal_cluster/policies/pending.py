"""Late binding: requests wait at the gateway and are placed when a replica can start them, not when they arrive.

A request that has been placed is stuck behind whatever its replica turns out to do. One that is held can still go to
the best of the replicas that become free first. Replicas therefore get only what they can start within about a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from random import Random

from shoal_cluster.policies.alike import Alike
from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import CAPACITY
from shoal_cluster.policies.considered import Assignment
from shoal_cluster.policies.dispatch import Dispatch
from shoal_cluster.policies.due_dates import DueDates
from shoal_cluster.policies.held import NOT_MATCHED, Held, Planned
from shoal_cluster.policies.held_order import HeldOrder
from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.policies.look import Basis, Look, look
from shoal_cluster.policies.objective import RENEWAL
from shoal_cluster.policies.outlook import Outlook
from shoal_cluster.policies.pending_request import PendingRequest, QueuePlace
from shoal_cluster.policies.plan import Plan
from shoal_cluster.policies.ranking import is_eligible
from shoal_cluster.policies.route_query import uncached_tokens
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.policies.tenants import FairShares
from shoal_cluster.policies.to_consider import Order, ToConsider, look_up
from shoal_cluster.policies.view import ClusterView
from shoal_cluster.policies.wishes import Wish
from shoal_cluster.policies.yielding import Yielding

TURN_DELAYS = 2.4  # feed delays per gateway: turns are spread over this long for each of them
MAX_SIZE_AGE_S = 1.0  # a held request's size (prompt tokens to compute) is looked up again when it is older
MOST_SIZES = 1000  # lookups per MAX_SIZE_AGE_S: with more requests held, each is looked up less often in proportion
NUM_SIZES_AT_ONCE = 64  # the least number of lookups in one pass
PHASE_PATIENCE = 0.25  # of the objective for first tokens: so long a request waits for replicas of one role
PATIENCE = 0.5  # of the time left to its objective: so long a request waits for the cheapest replica beside idle ones
URGENCY = 0.75  # the part of a turn's delay that depends on urgency; the rest is random


class PendingQueue:
    """The requests that a gateway holds. The gateway owns it and is its only writer.

    Order: priority; then heavy tenants last (``FairShares``); then the earliest due date (``DueDates``).

    Attributes:
        num_tokens: prompt tokens that they have to compute, each where most of it is cached as far as is known.
        num_blocks_to_decode: blocks of those that wait for replicas that only decode.
    """

    def __init__(self, config: HoldConfig, is_one_of_many: bool = False) -> None:
        self._config = config
        self.num_tokens = self.num_blocks_to_decode = 0
        self._num_in_phase = 0
        self._sizes_s = -math.inf  # when sizes were looked up last
        self._is_one_of_many = is_one_of_many
        self._has_unplanned = False
        self._held: dict[str, Held] = {}
        self._shares = FairShares()
        self._by_urgency = HeldOrder(self._shares, config.max_considered, RENEWAL * config.objective.ttft_s)
        self._dates = DueDates(config.objective, config.prefill, self._by_urgency)
        self._pace = self._dates.pace
        self._yielding = Yielding()
        self._alike = Alike()
        self._to_consider = ToConsider(self._shares, self._by_urgency, self._yielding, self._alike, is_one_of_many)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def __iter__(self) -> Iterator[PendingRequest]:
        """In order of arrival at this gateway."""
        return (held.pending for held in self._held.values())

    def push(self, pending: PendingRequest) -> None:
        """Hold a request until ``next`` returns it or ``remove`` takes it out. Raises ValueError if its id is held."""
        request_id = pending.query.request_id
        if request_id in self._held:
            raise ValueError(f"request {request_id!r} is held already")
        held = self._held[request_id] = Held(pending)
        self._shares.enter(pending.tenant, pending.arrival_s, pending.priority)
        held.asked_at = self._shares.clock
        self._resize(held, pending.query.num_prompt_tokens)
        self._dates.note(held, pending.arrival_s)
        self._count_phase(held, +1)
        self._has_unplanned = self._is_one_of_many

    def remove(self, request_id: str) -> PendingRequest | None:
        """Take a request out, say because its client has left or its deadline has passed. None if it is not held."""
        held = self._held.get(request_id)
        if held is None:
            return None
        self._resize(held, 0)  # its tenant no longer asks for it
        self._take_out(held)
        return held.pending

    def _take_out(self, held: Held) -> None:
        del self._held[held.pending.query.request_id]
        self.num_tokens -= held.num_new_tokens
        self._count_phase(held, -1)
        self._by_urgency.remove(held)
        self._alike.drop(held)
        self._shares.leave(held.pending.tenant, held.pending.priority)

    def _count_phase(self, held: Held, sign: int) -> None:
        query = held.pending.query
        self._num_in_phase += sign * bool(query.phase)
        if query.phase == "decode":
            self.num_blocks_to_decode += sign * query.num_blocks_needed

    def _widen(self, now: float) -> None:
        """Let requests go anywhere that have waited for replicas of one role for long: others may be idle."""
        if not self._num_in_phase:
            return
        patience_s = PHASE_PATIENCE * self._config.objective.ttft_s
        for held in [held for held in self._held.values() if held.pending.query.phase]:
            if held.in_phase_since_s is None:
                held.in_phase_since_s = now
            elif now - held.in_phase_since_s >= patience_s:
                self._count_phase(held, -1)
                self._by_urgency.remove(held)
                held.pending = replace(held.pending, query=replace(held.pending.query, phase=""))
                held.considered = held.assignment = None
                held.noted = NOT_MATCHED
                self._by_urgency.put(held)

    def know_match(self, request_id: str, candidates: Candidates) -> None:
        """Take in what is cached of a request's prompt, by ``candidates`` for it, before a look has found that out."""
        held = self._held[request_id]
        held.note_match(candidates.num_matched_blocks, candidates.replica_ids, candidates.now)
        held.sized_s = candidates.now
        if len(self._held) > 1:
            self._alike.note(held, candidates)
        self._resize(held, uncached_tokens(held.pending.query, int(held.matched.max(initial=0))))
        self._dates.note(held, candidates.now)

    def before(self, request_id: str) -> tuple[int, int]:
        """Prompt tokens of the other held requests that go before this one while its objective can be met, and how many
        these are: requests that come after it, such as those whose objective is lost, fill no queue for it.
        """
        held = self._held[request_id]
        return self._by_urgency.before(held, held.objective_s)

    def last(self) -> PendingRequest | None:
        """The request that is last in order, of those that may be refused: they have not been placed before."""
        return next((held.pending for held in reversed(self._by_urgency) if not held.pending.is_admitted), None)

    def up_to(self, request_id: str, now: float, limit: int) -> tuple[tuple[QueuePlace, ...], int]:
        """The last requests that come before this one, the most urgent first, then itself, at most ``limit``; and how
        many there are in all. Nothing if it is not held.
        """
        if (asked := self._held.get(request_id)) is None:
            return (), 0
        last, count = self._by_urgency.up_to(asked, limit)
        return tuple(held.queue_place(now) for held in last), count

    def turn(self, view: ClusterView, num_gateways: int, now: float, rng: Random) -> float:
        """How many feed delays to wait before the next look, where several gateways look at the same replicas: a later
        gateway sees what those before it have promised. The one with the least time left tends to go first; chance
        plays a part, lest equally urgent gateways collide. A request that is known to be the only one goes at once if a
        replica is idle, and by chance alone if most of them compute no prompt: others may have come in this moment.
        """
        if num_gateways == 1 or not self._held:
            return 0.0
        by_urgency = URGENCY
        if len(self._held) == 1 and not view.wishes(now):
            present = view.present(now)
            if present.num_idle():
                return 0.0
            if present.mostly_decode():
                by_urgency = 0.0
        left_s = self._by_urgency.begins_by_s - now
        urgency_share = min(1.0, max(0.0, left_s / self._config.objective.ttft_s))
        return TURN_DELAYS * num_gateways * (by_urgency * urgency_share + (1.0 - URGENCY) * rng.random())

    def next(self, view: ClusterView, weights: RouteWeights, now: float, rng: Random) -> Dispatch | None:
        """The request to send now, no longer held; None when none can start, or each is better off waiting.

        Requests are considered in order. Each is routed over all replicas, busy ones included. If the best one cannot
        start it, the request stays held and takes its place there in the plan before the next is considered. So a less
        urgent request may start elsewhere meanwhile, and requests that want the same replica spread as soon as waiting
        for it costs more than computing their prefix again. The caller reserves what it sends, and asks until None.
        """
        self._shares.fade(now)
        if not (self._held and len(view)):
            return None
        present = view.present(now)
        plan = Plan(present, weights, self._config.max_steps_ahead)
        outlook = plan.outlook(self._pace.token_s)
        if len(self._held) > 1 and not (self._has_unplanned or outlook.num_startable):
            return None
        plan.patience = self._patience(view, outlook.num_idle)
        begins_s = self._renew_dates(view, plan, outlook, present)
        if len(self._held) > self._config.max_considered:
            self._by_urgency.tell_apart(outlook.least_capacity)
        order = self._by_urgency.to_consider()
        has_room = len(self._held) == 1 or self._is_one_of_many or outlook.most_room > 0
        if not has_room and all(held.assignment for held, _ in order):
            return None  # nothing could start, and it is known of each where it is to wait, for whoever asks
        bases: dict[int, Basis] = {}

        def basis_of(number: int) -> Basis:
            held, _ = order[number]
            if held.seed is None:
                held.seed = rng.getrandbits(32)
            candidates = view.candidates(held.pending.query.block_hashes, now)
            held.note_match(candidates.num_matched_blocks, view.replica_ids, now)
            if len(self._held) > 1:
                self._alike.note(held, candidates)
            bases[number] = candidates, held.seed
            return bases[number]

        plans_all, self._has_unplanned = self._has_unplanned, False
        considered = self._to_consider.of(order, view, now)
        seen, assignments, sent = look(plan, considered, plans_all, basis_of, at_once=len(order) == 1)
        if bases:
            self._to_consider.forget()  # these have been looked up since
        self._note_all(order, assignments if sent is None else assignments[:-1], view, now, begins_s)
        if sent is None:
            return None
        self._has_unplanned = plans_all
        held = order[len(assignments) - 1][0]
        yields = self._send(held, assignments[-1][1], view, now)
        record = Look(
            snapshot=view.candidates((), now),
            weights=weights,
            max_steps_ahead=self._config.max_steps_ahead,
            patience=plan.patience,
            plans_all=plans_all,
            considered=tuple(seen),
            bases=bases,
            assignments=tuple(assignments),
        )
        return Dispatch.of(held.pending, seen[-1], sent, record, yields, now)

    def _patience(self, view: ClusterView, num_idle: int) -> float:
        """See ``Plan``. Nobody takes an idle replica out of turn unless there is one for each request that waits here,
        nor where it may be for requests of another phase.
        """
        num_held = len(self._held)
        if view.has_roles or (num_held > 1 and num_idle < num_held):
            return 0.0
        return PATIENCE * self._pace.alone.tokens_per_s

    def _renew_dates(self, view: ClusterView, plan: Plan, outlook: Outlook, present: Candidates) -> float:
        """Make due dates that can be met. Returns when a prompt that is sent now can begin."""
        now = present.now
        begins_s = now + outlook.wait_s
        is_due = self._pace.is_due(now)  # asked first: ``look`` changes the answer
        if self._pace.look(present, now):
            begins_s = now + plan.outlook(self._pace.token_s).wait_s
            self._dates.note_pace()
        self._dates.renew(self._held.values(), begins_s, now)
        if is_due:
            self._widen(now)
            if len(self._held) > 1:
                self._know_sizes(view, present, now)
            wishes = view.wishes(now) if self._is_one_of_many else ()
            self._dates.renew_together(self._held.values(), wishes, begins_s, present)
        return begins_s

    def _note_all(
        self, order: Order, assignments: Sequence[Assignment], view: ClusterView, now: float, begins_s: float
    ) -> None:
        """A look has decided where the first requests of ``order`` are to wait."""
        for (held, _), assignment in zip(order, assignments, strict=False):
            held.sized_s = now
            if assignment != held.assignment:
                self._note(held, assignment, view, begins_s)

    def _note(self, held: Held, assignment: Assignment, view: ClusterView, begins_s: float) -> None:
        """A look has decided anew where ``held`` is to wait."""
        held.assignment = place, num_matched = assignment
        if place < 0:
            held.planned = None
            return
        held.planned = Planned.at(view.replica_ids[place], held.pending.query, num_matched)
        self._resize(held, held.planned.num_tokens)
        self._dates.note(held, begins_s)

    def _send(self, held: Held, num_matched_blocks: int, view: ClusterView, now: float) -> bool:
        """Take out a request that is sent, and charge its tenant. Returns whether it yields to others."""
        pending = held.pending
        yields = self._shares.had_more(pending.tenant)
        if yields:
            self._yielding.note(pending.query.request_id, view)
        self._resize(held, uncached_tokens(pending.query, num_matched_blocks))
        self._shares.charge(pending.tenant, held.num_new_tokens, now, pending.priority)
        self._alike.send(held, num_matched_blocks)
        self._take_out(held)
        return yields

    def _know_sizes(self, view: ClusterView, present: Candidates, now: float) -> None:
        """Look up what newcomers have to compute where most is cached, and those that no look has come to for long."""
        takes = present.columns[CAPACITY] >= 0
        age_s = MAX_SIZE_AGE_S * max(1.0, len(self._held) / MOST_SIZES)
        part = min(1.0, (now - self._sizes_s) / age_s)
        num_left, self._sizes_s = max(NUM_SIZES_AT_ONCE, math.ceil(part * len(self._held))), now
        for held in self._held.values():
            if held.sized_s >= now - age_s or (held.sized_s > -math.inf and num_left == 0):
                continue
            num_left -= held.sized_s > -math.inf
            query, matched = held.pending.query, look_up(held, view, now)
            self._alike.note(held, present)
            takes_it = takes & is_eligible(query, present) if query.is_restricted else takes
            num_new_tokens = uncached_tokens(query, int(matched[takes_it].max(initial=0)))
            held.sized_s = now
            if num_new_tokens != held.num_new_tokens:
                held.assignment = None
            self._resize(held, num_new_tokens)
            self._dates.note(held, now)

    def _resize(self, held: Held, num_new_tokens: int) -> None:
        """The request has this many tokens to compute."""
        change = num_new_tokens - held.num_new_tokens
        self._shares.ask(held.pending.tenant, change, held.asked_at)
        held.num_new_tokens = num_new_tokens
        self.num_tokens += change

    def wishes(self) -> dict[str, tuple[Wish, ...]]:
        """For other gateways: requests held here, by the replica where each was planned last, most urgent first."""
        if not self._is_one_of_many:
            return {}
        wishes: dict[str, list[Wish]] = {}
        everyone = ((held, held.planned) for held in self._by_urgency if held.planned is not None)
        for held, planned in islice(everyone, self._config.max_considered):
            wish = held.wish(planned, self._by_urgency.rank(held), self._by_urgency.is_over(held))
            wishes.setdefault(planned.replica_id, []).append(wish)
        return {replica_id: tuple(of_it) for replica_id, of_it in wishes.items()}
