"""A gateway in simulated time: the real policies on a view and a queue of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from random import Random
from typing import Protocol

from shoal_cluster.policies.admission import NOTHING_QUEUED, Queued, admit, lateness_s, misfit, overflow, stay
from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.named_placement import placement_by
from shoal_cluster.policies.pending import PendingQueue
from shoal_cluster.policies.pending_request import RESUMED_PRIORITY, PendingRequest
from shoal_cluster.policies.phases import Kind, PhaseRule
from shoal_cluster.policies.ranking import is_eligible
from shoal_cluster.policies.route_query import RouteQuery, priced_steps, uncached_blocks, uncached_tokens
from shoal_cluster.policies.routing import route
from shoal_cluster.policies.slowness import Slowness
from shoal_cluster.policies.stall import Stalls
from shoal_cluster.policies.view import ClusterView
from shoal_cluster.policies.wishes import Wish
from shoal_cluster.sim.book import Book
from shoal_cluster.sim.config import SimConfig
from shoal_cluster.sim.credit import Credit
from shoal_cluster.sim.event_loop import EventLoop
from shoal_cluster.sim.phases import SimPhases
from shoal_cluster.sim.replica import FeedMessage, Order, Promise
from shoal_cluster.sim.workload import SimRequest
from shoal_replica.errors import ResourceExhausted
from shoal_replica.prefix_cache import BlockHash
from shoal_replica.request import FinishReason, TokenDelta
from shoal_replica.stats import ReplicaStats

LOOK_S = 1.0
MIN_WAKE_S = 0.001


class Target(Protocol):
    """What a gateway can ask of a replica; see ``SimReplica``."""

    @property
    def draining(self) -> bool: ...

    def place(self, order: Order, request: SimRequest, block_hashes: tuple[BlockHash, ...]) -> None: ...

    def hand_back(self, request_id: str) -> bool: ...

    def wish(self, gateway_id: str, wishes: tuple[Wish, ...]) -> None: ...


class SimGateway:
    """Admits, holds and places requests, by what it has heard from the replicas.

    Args:
        targets: the live replicas, by id; the cluster's own mapping, not a copy.
    """

    def __init__(
        self,
        gateway_id: str,
        config: SimConfig,
        loop: EventLoop,
        book: Book,
        targets: Mapping[str, Target],
        view: ClusterView,
        rng: Random,
    ) -> None:
        self.view = view
        self.gateway_id = gateway_id
        self._is_one_of_many = config.num_gateways > 1
        self.queue = PendingQueue(config.hold, self._is_one_of_many) if config.hold is not None else None
        self._is_due = False  # a dispatch is scheduled
        self._config = config
        self._loop = loop
        self._book = book
        self.targets = targets
        self._rng = rng
        self._named = placement_by(config.routing)
        self._stalls = Stalls(view, pause_s=math.inf)  # a simulated gateway itself never pauses
        self._slowness = Slowness(view)
        rule = PhaseRule(self.queue, config.objective.ttft_s, config.num_gateways)
        self._phases = SimPhases(view, rule, config.prefill_share)
        self._credit = Credit(gateway_id, view, book, targets)
        self._sent: dict[str, PendingRequest] = {}  # requests sent from the queue, until their first token

    def take(self, request: SimRequest) -> None:
        """A request arrives at this gateway."""
        self._book.arrive(request.request_id, self.gateway_id, self._loop.now)
        config, now, query = self._config, self._loop.now, self._query(request.request_id)
        if self.queue is not None:
            self.queue.push(PendingRequest(query=query, arrival_s=now, tenant=request.tenant))
            self._take_turn()
            if request.request_id not in self.queue:
                return
            if not self.view.present(now).has_open():
                self._push_out(self.queue)
                self._look_whether_late(request.request_id, query)
                return
        candidates = self.view.candidates(query.block_hashes, now)
        if self.queue is not None:
            self.queue.know_match(request.request_id, candidates)
        queued = NOTHING_QUEUED if self.queue is None else Queued(*self.queue.before(request.request_id))
        admission = admit(query, candidates, config.limits, queued.at_all(config.num_gateways))
        if not admission.admitted:
            self._refuse(request.request_id, admission.reason)
        elif self.queue is None:
            self._place(query, candidates)
        else:
            self._push_out(self.queue)
            self._look_whether_late(request.request_id, query)

    def _push_out(self, queue: PendingQueue) -> None:
        """Refuse the last request in order if more is held than may be."""
        queued = Queued(queue.num_tokens, len(queue) - 1).at_all(self._config.num_gateways)
        found = overflow(queue, queued, self.view, self._config.limits, self._loop.now)
        if found is not None:
            last, record = found
            self._refuse(last.query.request_id, record.admission.reason)

    def _look_whether_late(self, request_id: str, query: RouteQuery) -> None:
        """Refuse a held request once it can no longer meet its objective, if the limits have one; until then, check
        again later.
        """
        limits, now = self._config.limits, self._loop.now
        outcome = self._book.outcomes[request_id]
        if self.queue is None or limits.objective is None or request_id not in self.queue or outcome.num_output_tokens:
            return
        waited_s, candidates = now - outcome.arrival_s, self.view.candidates(query.block_hashes, now)
        admission = stay(query, candidates, limits, waited_s)
        if admission.admitted:
            left_s = -lateness_s(query, candidates, limits, waited_s)
            self._loop.after(min(left_s, LOOK_S) + MIN_WAKE_S, partial(self._look_whether_late, request_id, query))
        else:
            self._refuse(request_id, admission.reason)

    def _refuse(self, request_id: str, reason: str) -> None:
        """A request ends here, held or not."""
        if self.queue is not None:
            self.queue.remove(request_id)
        self._phases.forget(request_id)
        self._book.refuse(request_id, reason)

    def resume(self, request_id: str) -> None:
        """Continue a request elsewhere, after the tokens received so far: its replica cut it off or is gone."""
        self._place_again(request_id)
        outcome = self._book.outcomes[request_id]
        outcome.num_resumes += self.queue is not None or outcome.is_open

    def end_part(self, delta: TokenDelta, replica_id: str) -> None:
        """A replica has done what it was asked for of a request that came to this gateway."""
        if delta.finish_reason is FinishReason.PREFILLED:
            self._phases.note_prefilled(delta.request_id, replica_id)
            self._place_again(delta.request_id)
        else:
            self._phases.forget(delta.request_id)

    def _place_again(self, request_id: str) -> None:
        request, outcome = self._book.requests[request_id], self._book.outcomes[request_id]
        query = self._query(request_id)
        outcome.replica_id = None
        self.view.release(request_id)
        self._sent.pop(request_id, None)
        if self.queue is None:
            self._place(query, self.view.candidates(query.block_hashes, self._loop.now))
            return
        pending = PendingRequest(
            query=query,
            arrival_s=outcome.arrival_s,
            is_admitted=True,
            tenant=request.tenant,
            priority=RESUMED_PRIORITY if outcome.num_output_tokens else 0,
        )
        self.queue.push(pending)
        self._take_turn()
        self._look_whether_late(request_id, query)

    def _query(self, request_id: str) -> RouteQuery:
        """The query that places a request, after the tokens received so far."""
        request, outcome = self._book.requests[request_id], self._book.outcomes[request_id]
        block_size = self._config.cache.block_size
        num_tokens = request.num_prompt_tokens + outcome.num_output_tokens
        query = RouteQuery(
            request_id=request_id,
            block_hashes=self._book.block_hashes(request_id),
            num_prompt_tokens=num_tokens,
            num_blocks_needed=-(-(num_tokens + 1) // block_size),
            block_size=block_size,
            decode_steps=priced_steps(request.max_tokens, outcome.num_output_tokens),
        )
        kind: Kind = "begun" if outcome.num_output_tokens else "new" if request.num_output_tokens > 1 else "one token"
        return self._phases.of(query, kind, self._loop.now)

    def meet(self, replica_id: str, stats: ReplicaStats) -> None:
        """A replica has joined, with an empty cache. Refuse held requests that turn out too large for every replica."""
        self.view.join(replica_id)
        self.view.apply_snapshot(replica_id, stats, (), self._loop.now)
        self._phases.roles.look(self._loop.now)
        candidates = self.view.candidates((), self._loop.now)
        for pending in tuple(self.queue or ()):
            if self.queue is not None and (reason := misfit(pending.query, candidates)):
                self._refuse(pending.query.request_id, reason)

    def lose(self, replica_id: str) -> None:
        """A replica is gone, and with it all prompts in flight there."""
        self.view.leave(replica_id)
        if self._named is not None:
            self._named.forget(replica_id)
        self._phases.roles.look(self._loop.now)
        self._credit.lose(replica_id)

    def hear(self, replica_id: str, message: FeedMessage) -> None:
        """Take in a replica's feed message."""
        now = self._loop.now
        self._stalls.hear(replica_id, message.stats, now)
        self.view.apply_update(replica_id, message.stats, message.stored, message.removed, now)
        self._slowness.look(now)
        self._phases.roles.look(now)
        stalls = self._stalls.look(now)
        for stalled_id, _ in stalls.found:
            self._loop.after(self._config.feed_delay_s, partial(self._recall, stalled_id))
        if message.added:
            self.view.settle(message.added)
        for delta in message.deltas:
            self.view.computed(delta.request_id)
            self._sent.pop(delta.request_id, None)
            self._credit.computed(delta.request_id)
        if self._is_one_of_many:
            self._credit.hear(replica_id, message)
        if self.queue:
            self._take_turn()

    def _take_turn(self) -> None:
        """Dispatch now or, with several gateways, after a delay: they take turns, and each sees what earlier ones have
        promised.
        """
        if self.queue is None or self._is_due:
            return
        num_delays = self.queue.turn(self.view, self._config.num_gateways, self._loop.now, self._rng)
        if num_delays == 0:
            self._dispatch()
        else:
            self._is_due = True
            self._loop.after(num_delays * self._config.feed_delay_s, self._dispatch)

    def _dispatch(self) -> None:
        """Send the requests that can start now, and tell the other gateways about the rest."""
        self._is_due = False
        if self.queue is None:
            return
        self._send_startable(self.queue)
        if self._is_one_of_many:
            self._credit.wish(self.queue.wishes())

    def _send_startable(self, queue: PendingQueue) -> None:
        config, now = self._config, self._loop.now
        while queue:
            dispatch = queue.next(self.view, config.weights, now, self._rng)
            if dispatch is None:
                return
            self._book.num_decisions += 1
            query = dispatch.pending.query
            if self._send(query, dispatch.decision.best, dispatch.candidates, dispatch.due_s, dispatch.yields):
                self._sent[query.request_id] = dispatch.pending
            else:  # the replica has begun to drain
                self._hold_again(dispatch.pending, dispatch.decision.best)

    def _recall(self, replica_id: str) -> None:
        """A replica has stalled: hold its unstarted requests again, if another replica could take them."""
        outcomes, replica = self._book.outcomes, self.targets.get(replica_id)
        candidates = self.view.candidates((), self._loop.now)
        for request_id, pending in tuple(self._sent.items()):
            if outcomes[request_id].replica_id != replica_id or replica is None:
                continue
            query = _without(pending.query, replica_id)
            if not is_eligible(query, candidates).any() or not replica.hand_back(request_id):
                continue
            del self._sent[request_id]
            outcomes[request_id].num_moves += 1
            outcomes[request_id].replica_id = None
            self.view.release(request_id)
            self.view.computed(request_id)
            self._hold_again(pending, replica_id)
        self._take_turn()

    def _hold_again(self, pending: PendingRequest, replica_id: str) -> None:
        """Put a request back in the queue, for any replica but this one."""
        if self.queue is not None:
            query = _without(pending.query, replica_id)
            self.queue.push(replace(pending, query=query, is_admitted=True))
            self._look_whether_late(query.request_id, query)

    def _place(self, query: RouteQuery, candidates: Candidates) -> None:
        config = self._config
        if self._named is None:
            decision = route(query, candidates, config.weights, self._rng)
        else:
            decision = self._named.rule_for(query, candidates).decide(query, candidates, config.weights, self._rng)
        self._book.num_decisions += 1
        for replica_id in decision.ranked:
            if self._send(query, replica_id, candidates):
                if self._named is not None:
                    self._named.note(query, replica_id)
                return
        self._refuse(query.request_id, decision.reason if not decision.ranked else "every replica refused")

    def _send(
        self,
        query: RouteQuery,
        replica_id: str,
        candidates: Candidates,
        due_s: float = math.inf,
        yields: bool = False,
    ) -> bool:
        request, config = self._book.requests[query.request_id], self._config
        replica = self.targets.get(replica_id)
        if replica is None or replica.draining:
            return False
        outcome, num_matched_blocks = self._book.outcomes[query.request_id], candidates.matched_by(replica_id)
        num_blocks, num_tokens = uncached_blocks(query, num_matched_blocks), uncached_tokens(query, num_matched_blocks)
        promise = Promise(query.request_id, self.gateway_id, num_blocks, num_tokens) if self._is_one_of_many else None
        try:
            offer = None if config.transfer_s is None else self._phases.offer(query, candidates, replica_id)
            has_parts = request.num_output_tokens > 1 and not outcome.num_output_tokens
            is_part = has_parts and self._phases.rule.is_part(query, replica_id, candidates)
            order = Order(query.request_id, due_s, yields, outcome.num_output_tokens, promise, offer, is_part)
            replica.place(order, request, query.block_hashes or request.block_hashes(query.block_size))
        except ResourceExhausted:
            return False
        if is_part:
            self._phases.rule.expect(query)
        outcome.replica_id = replica_id
        if outcome.first_token_s is None:  # later placements do not count, as for ``num_cached_tokens``
            num_cached_tokens = num_matched_blocks * query.block_size
            outcome.num_predicted_tokens = min(num_cached_tokens, query.num_prompt_tokens - 1)
        self.view.reserve(query.request_id, replica_id, num_blocks, num_tokens)
        self.view.expect(query.request_id, replica_id, query.block_hashes, num_matched_blocks)
        return True


def _without(query: RouteQuery, replica_id: str) -> RouteQuery:
    return replace(query.anew(), excluded=query.excluded | {replica_id}, phase="")
