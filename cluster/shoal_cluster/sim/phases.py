"""Requests that one simulated replica begins and another goes on with, where replicas have roles."""

from __future__ import annotations

from dataclasses import replace

from shoal_cluster.policies.block_offer import BlockOffer, best_offer
from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.pending import PendingQueue
from shoal_cluster.policies.roles import Handovers, Roles, phase_at_arrival
from shoal_cluster.policies.routing import RouteQuery
from shoal_cluster.policies.view import ClusterView


class SimPhases:
    """One gateway's part in them: it gives replicas their roles, and knows where a request's blocks are."""

    def __init__(self, view: ClusterView, queue: PendingQueue | None, prefill_share: float, ttft_s: float) -> None:
        self.roles = Roles(view)
        self.roles.share = prefill_share
        self._view = view
        self._queue = queue
        self._ttft_s = ttft_s
        self._handovers = Handovers()
        self._left: dict[str, str] = {}  # by request: the replica that has computed its prompt

    def of(self, query: RouteQuery, num_output_tokens: int, now: float) -> RouteQuery:
        """The query as it is placed next: for its prompt alone, for what follows, or for both."""
        if self._left.get(query.request_id, "") in self._view:
            query = query.comes_with(len(query.block_hashes))
        if query.excluded or not self._view.has_roles:
            return query
        cluster = self._view.candidates(query.block_hashes, now)
        if num_output_tokens:
            return replace(query, phase="decode" if self._can_decode(query, cluster) else "")
        num_held_tokens = 0 if self._queue is None else self._queue.num_tokens
        phase = phase_at_arrival(query, cluster, num_held_tokens, self._ttft_s)
        return replace(query, phase=phase, decode_steps=1 if phase == "prefill" else query.decode_steps)

    def is_part(self, query: RouteQuery, replica_id: str, cluster: Candidates) -> bool:
        """Whether the replica to which a request goes, which has more tokens to get, only computes its prompt."""
        is_prefill = cluster.states[cluster.place(replica_id)].role == "prefill"
        if not (is_prefill and self._can_decode(query, cluster)):
            return False
        self._handovers.expect(query)
        return True

    def note_prefilled(self, request_id: str, replica_id: str) -> None:
        """A replica has computed a request's prompt; another goes on."""
        self._left[request_id] = replica_id
        self._handovers.forget(request_id)

    def forget(self, request_id: str) -> None:
        """A request is over."""
        self._left.pop(request_id, None)
        self._handovers.forget(request_id)

    def offer(self, query: RouteQuery, candidates: Candidates, replica_id: str) -> BlockOffer | None:
        """Who has more of a request's blocks than the replica where it goes."""
        if (left := self._left.get(query.request_id)) is not None and left in self._view:
            return BlockOffer(left, len(query.block_hashes))
        return best_offer(candidates, replica_id)

    def _can_decode(self, query: RouteQuery, cluster: Candidates) -> bool:
        num_held_blocks = 0 if self._queue is None else self._queue.num_blocks_to_decode
        return self._handovers.have_room(query, cluster, num_held_blocks)
