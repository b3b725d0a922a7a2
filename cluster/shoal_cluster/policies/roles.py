"""Prefill and decode replicas: some compute prompts, the others generate what follows.

A step that computes part of a prompt takes many times as long as one that only decodes, and every sequence beside it
waits for it. Where replicas share the work out by phase, as DistServe and Splitwise propose, time between tokens no
longer depends on who else has just asked. Here a role belongs to routing alone: every replica can do both, gateways
agree on the roles by the replicas' ids, and when one leaves, or the share changes, another takes its role at once.
"""

from __future__ import annotations

from itertools import compress

from shoal_cluster.policies.columns import CAPACITY, Phase
from shoal_cluster.policies.view import ClusterView


def num_prefills(num_replicas: int, share: float) -> int:
    """How many of so many replicas compute prompts: about that share, but at least one of each kind, or none at all."""
    if share <= 0 or num_replicas < 2:
        return 0
    return min(num_replicas - 1, max(1, round(share * num_replicas)))


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
