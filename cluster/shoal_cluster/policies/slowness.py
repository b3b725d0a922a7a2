"""How much longer each replica takes for a prompt than the fastest: machines differ, or something slows one down."""

from __future__ import annotations

import math
from collections.abc import Mapping

from shoal_cluster.policies.columns import CAPACITY
from shoal_cluster.policies.view import ClusterView

LOOK_S = 1.0
UP, DOWN = 0.7, 0.5  # doublings by which a replica must differ from its last estimate; like ones differ by less


class Slowness:
    """How slow replicas are, as one gateway sees it. The gateway owns it; nothing else sets slowness in ``view``.

    It compares the fastest full step that each has reported lately (``full_token_s``); a replica without one counts as
    fast. The result is in whole doublings and kept until it is clearly off: full steps of like replicas differ by less.
    """

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._doublings: dict[str, int] = {}  # slower than the fastest
        self._looked_s = -math.inf

    def look(self, now: float) -> None:
        """Tell the view how slow replicas are. It may be called at all news, and looks every ``LOOK_S`` at most."""
        if now - self._looked_s < LOOK_S:
            return
        self._looked_s = now
        present = self._view.present(now)
        open_ones = zip(present.replica_ids, present.stats, present.columns[CAPACITY].tolist(), strict=True)
        paces = {r: s.full_token_s for r, s, capacity in open_ones if s is not None and capacity >= 0}
        known = {replica_id: token_s for replica_id, token_s in paces.items() if token_s > 0}
        self._doublings = doublings_from_fastest(known, self._doublings)
        for replica_id in paces:
            self._view.set_slowness(replica_id, 2.0 ** self._doublings.get(replica_id, 0))


def doublings_from_fastest(token_s: Mapping[str, float], before: Mapping[str, int]) -> dict[str, int]:
    """By how many doublings each replica is slower than the fastest: as ``before``, unless that is clearly off."""
    fastest, doublings = min(token_s.values(), default=0.0), {}
    for replica_id, its_token_s in token_s.items():
        exact, was = math.log2(its_token_s / fastest), before.get(replica_id, 0)
        doublings[replica_id] = was if was - DOWN <= exact <= was + UP else round(exact)
    return doublings
