"""Which phase of a request a placement is for, where replicas have roles (see ``Roles``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import CAPACITY, LOAD, OPEN_SLOTS, ROOM
from shoal_cluster.policies.pending import PendingQueue
from shoal_cluster.policies.route_query import RouteQuery, uncached_tokens
from shoal_replica.guest_table import LEAST_LEFT

SHORT_S = 0.02
"""A prompt that takes no longer is computed where it is decoded: to bring its blocks there and back takes as long."""

Kind = Literal["new", "whole", "one token", "begun"]
"""Of a request:

* new: it has not started; after its first token another replica may go on with it.
* whole: it must stay on one replica, as a beam search or a scored prompt.
* one token: it generates no more than that, so nothing is left to hand over.
* begun: another replica has generated tokens of it already.
"""


class PhaseRule:
    """Roles bend where the load does not fit them: strict ones collapse (``tests/benchmarks/PLACEMENT.md``). Owned by
    one gateway.

    Args:
        queue: where its requests wait; None if they do not.
        ttft_s: the objective for first tokens.
        num_gateways: others are taken to hold, and to have sent, as much as this one.
    """

    def __init__(self, queue: PendingQueue | None, ttft_s: float, num_gateways: int = 1) -> None:
        self._queue = queue
        self._ttft_s = ttft_s
        self._num_gateways = num_gateways
        self._expected: dict[str, int] = {}  # blocks of requests that are sent for their prompts alone
        self._num_blocks = 0

    def __len__(self) -> int:
        """How many requests are sent for their prompts alone."""
        return len(self._expected)

    def place(self, query: RouteQuery, kind: Kind, cluster: Candidates) -> RouteQuery:
        """The query as it is placed next, by ``cluster`` for it, in which replicas have roles.

        Anywhere, if no replica that decodes has room for it. Else to be decoded, if it has begun, or if so much of its
        prompt is cached there that the rest takes no longer than a step, or than ``SHORT_S``. Else for its prompt; but
        anywhere if that would wait for longer than the objective allows a first token: then others help, and tokens
        come less evenly for a while.
        """
        if query.excluded or (kind != "one token" and not self._can_decode(query, cluster)):
            return query
        if kind in ("begun", "whole") or (kind == "new" and _is_short(query, cluster)):
            return replace(query, phase="decode")
        if self._prefills_wait_s(cluster) > self._ttft_s:
            return query
        return replace(query, phase="prefill")

    def is_part(self, query: RouteQuery, replica_id: str, cluster: Candidates) -> bool:
        """Whether a new request goes to that replica for its prompt alone: if this is its role, and another has room to
        go on. Otherwise it stays: its blocks might soon be given away there, and would have to be computed again.
        """
        self.forget(query.request_id)
        is_prefill = cluster.states[cluster.place(replica_id)].role == "prefill"
        return is_prefill and self._can_decode(query, cluster)

    def expect(self, query: RouteQuery) -> None:
        """A request is sent for its prompt alone."""
        self._expected[query.request_id] = query.num_blocks_needed
        self._num_blocks += query.num_blocks_needed

    def forget(self, request_id: str) -> None:
        """Its prompt is computed, or never will be. Idempotent."""
        self._num_blocks -= self._expected.pop(request_id, 0)

    def _can_decode(self, query: RouteQuery, cluster: Candidates) -> bool:
        """Whether a replica that decodes has room for the request's blocks now, beside all that are expected and those
        that wait for the same at the gateways. When blocks come from another replica, some must stay free.
        """
        capacity = cluster.columns[CAPACITY]
        decodes = cluster.serves("decode") & (capacity >= 0)
        room = np.maximum(cluster.columns[ROOM] - capacity // LEAST_LEFT, 0) * decodes
        fits = (room >= query.num_blocks_needed - cluster.num_matched_blocks) & (room > 0)
        fits &= capacity >= query.num_blocks_needed
        num_before = self._num_blocks + (0 if self._queue is None else self._queue.num_blocks_to_decode)
        num_slots = np.maximum(cluster.columns[OPEN_SLOTS], 0)[decodes].sum()
        has_slots = num_slots > self._num_gateways * len(self._expected)
        has_blocks = room.sum() >= self._num_gateways * num_before + query.num_blocks_needed
        return bool(fits.any() and has_slots and has_blocks)

    def _prefills_wait_s(self, cluster: Candidates) -> float:
        """How long the replicas that compute prompts need for those that wait; 0 while no pace is known."""
        prefills = (cluster.columns[CAPACITY] >= 0) & ~cluster.serves("decode")
        num_held = 0 if self._queue is None else self._num_gateways * self._queue.num_tokens
        num_waiting = cluster.columns[LOAD][prefills].sum() + num_held
        return float(num_waiting * _token_s(cluster) / max(1, np.count_nonzero(prefills)))


def _is_short(query: RouteQuery, cluster: Candidates) -> bool:
    """Whether little of the prompt is left to compute at the replica that decodes and has most of it cached."""
    decodes = cluster.serves("decode") & (cluster.columns[CAPACITY] >= 0)
    place = int(np.where(decodes, cluster.num_matched_blocks, -1).argmax())
    takes_s = uncached_tokens(query, cluster.num_matched_blocks.item(place)) * _token_s(cluster)
    return bool(decodes[place]) and 0 < takes_s <= max(SHORT_S, cluster.told["step_s"].item(place))


def _token_s(cluster: Candidates) -> float:
    """The slowest replica's pace: those that decode may have measured none."""
    return float(cluster.told["token_s"].max(initial=0.0))
