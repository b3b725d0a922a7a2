"""Prefill and decode replicas: some compute prompts, the others generate what follows.

A step that computes part of a prompt takes many times as long as one that only decodes, and every sequence beside it
waits for it. Where replicas share the work out by phase, as DistServe and Splitwise propose, time between tokens no
longer depends on who else has just asked. Here a role belongs to routing alone: every replica can do both, gateways
agree on the roles by the replicas' ids, and when one leaves, or the share changes, another takes its role at once.
"""

from __future__ import annotations

from itertools import compress

import numpy as np

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import CAPACITY, LOAD, ROOM, Phase
from shoal_cluster.policies.ranking import RouteQuery, uncached_tokens
from shoal_cluster.policies.view import ClusterView
from shoal_replica.guest_table import LEAST_LEFT

SHORT_S = 0.02
"""A prompt that takes no longer is computed where it is decoded: to bring its blocks there and back takes as long."""


def num_prefills(num_replicas: int, share: float) -> int:
    """How many of so many replicas compute prompts: about that share, but at least one of each kind, or none at all."""
    if share <= 0 or num_replicas < 2:
        return 0
    return min(num_replicas - 1, max(1, round(share * num_replicas)))


def phase_at_arrival(query: RouteQuery, cluster: Candidates, num_held_tokens: int, ttft_s: float) -> Phase:
    """Where a request goes first: to compute its prompt, or straight to decode where so much of the prompt is cached
    that the rest takes no longer than a step there, or than ``SHORT_S``. Anywhere, if the replicas that compute prompts
    need more than ``ttft_s`` for what they have and for ``num_held_tokens``: then others help, and tokens come less
    evenly for a while.
    """
    takes, told = cluster.columns[CAPACITY] >= 0, cluster.told
    prefills, decodes = takes & ~cluster.serves("decode"), takes & cluster.serves("decode")
    token_s = told["token_s"].max(initial=0.0)  # of any: those that decode may have measured none
    num_waiting = cluster.columns[LOAD][prefills].sum() + num_held_tokens
    if num_waiting * token_s > ttft_s * np.count_nonzero(prefills):
        return ""
    place = int((cluster.num_matched_blocks * decodes).argmax())
    takes_s = uncached_tokens(query, cluster.num_matched_blocks.item(place)) * token_s
    is_short = decodes[place] and 0 < takes_s <= max(SHORT_S, told["step_s"][place])
    return "decode" if is_short else "prefill"


class Handovers:
    """Requests whose prompts are computed where they do not go on, and the blocks that they will need elsewhere. The
    gateway owns it.
    """

    def __init__(self) -> None:
        self._expected: dict[str, int] = {}  # blocks, by request
        self._num_blocks = 0

    def expect(self, query: RouteQuery) -> None:
        """A request is sent for its prompt alone."""
        self.forget(query.request_id)
        self._expected[query.request_id] = query.num_blocks_needed
        self._num_blocks += query.num_blocks_needed

    def forget(self, request_id: str) -> None:
        """Its prompt is computed, or never will be."""
        self._num_blocks -= self._expected.pop(request_id, 0)

    def have_room(self, query: RouteQuery, cluster: Candidates, num_held_blocks: int) -> bool:
        """Whether a replica that decodes has room for a request's blocks now, beside all that are expected and those
        that wait for the same at the gateway. Otherwise it stays where its prompt is computed: its blocks might soon be
        given away there, and would have to be computed again.
        """
        capacity = cluster.columns[CAPACITY]
        room = np.maximum(cluster.columns[ROOM] - capacity // LEAST_LEFT, 0) * cluster.serves("decode")
        fits = (room >= query.num_blocks_needed - cluster.num_matched_blocks) & (room > 0)
        fits &= capacity >= query.num_blocks_needed
        return bool(fits.any()) and room.sum() >= self._num_blocks + num_held_blocks + query.num_blocks_needed


class Roles:
    """Gives the replicas that take requests their roles. The gateway owns it; nothing else sets roles in ``view``.

    Attributes:
        share: of these replicas, those that compute prompts; 0 for no roles.
    """

    def __init__(self, view: ClusterView) -> None:
        self.share = 0.0
        self._view = view
        self._seen: tuple[float, tuple[str, ...], bytes] = (0.0, (), b"")

    def look(self, now: float) -> None:
        """Renew the roles where replicas have come, gone, or begun or ceased to take requests. By id: all gateways come
        to the same.
        """
        if not self.share and not self._seen[0]:
            return
        cluster = self._view.present(now)
        takes = cluster.columns[CAPACITY] >= 0
        seen = self.share, cluster.replica_ids, takes.tobytes()
        if seen == self._seen:
            return
        self._seen = seen
        open_ids = [*compress(cluster.replica_ids, takes)]
        count = num_prefills(len(open_ids), self.share)
        roles: dict[str, Phase] = {r: "prefill" if place < count else "decode" for place, r in enumerate(open_ids)}
        self._view.set_roles(roles if count else {})
