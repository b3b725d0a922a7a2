"""Replicas whose step does not end: they get nothing new, and what waits there and has not started goes elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import CAPACITY, SEQUENCES
from shoal_cluster.policies.view import ClusterView
from shoal_replica.stats import ReplicaStats

STALL_S = 1.0
STALL_FACTOR = 4.0
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Progress:
    """What a replica had done when it was last seen to get on, or to have nothing to do, and when that was."""

    busy_s: float
    time_s: float
    is_idle: bool

    def after(self, stats: ReplicaStats, now: float) -> Progress:
        """With its next stats."""
        is_idle = not stats.num_running + stats.num_waiting
        if stats.busy_s == self.busy_s and not (is_idle or self.is_idle):
            return self
        return Progress(stats.busy_s, now, is_idle)


def stalled(candidates: Candidates, quiet_s: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which replicas have stalled [n]: a step takes ``STALL_FACTOR`` times as long as a full one at the pace that they
    have measured, and ``STALL_S`` at least; while another takes requests and gets on. ``quiet_s``: since each was last
    seen to get on.
    """
    told = candidates.told
    longest_s = told["max_num_batched_tokens"] * told["token_s"] + told["step_s"]
    has_stalled: NDArray[np.bool_] = quiet_s > np.maximum(STALL_S, STALL_FACTOR * longest_s)
    has_stalled &= (told["token_s"] > 0) & told["connected"] & (candidates.columns[SEQUENCES] > 0)
    others = (candidates.columns[CAPACITY] > 0) & ~has_stalled
    return has_stalled & bool(others.any())


class Stalls:
    """Who has stalled, as one gateway sees it; its owner and only writer."""

    def __init__(self) -> None:
        self._progress: dict[str, Progress] = {}
        self._stalled: dict[str, ReplicaStats] = {}  # with what they told last
        self._suspects: set[str] = set()  # as of the last look
        self._looked_s = -np.inf

    def hear(self, replica_id: str, stats: ReplicaStats, now: float) -> ReplicaStats:
        """A replica's news, as the view is to take them: one that has stalled takes nothing until its step ends."""
        progress = self._progress.get(replica_id, Progress(-1.0, now, True)).after(stats, now)
        self._progress[replica_id] = progress
        if progress.time_s == now:
            self._stalled.pop(replica_id, None)
        if replica_id not in self._stalled:
            return stats
        self._stalled[replica_id] = stats
        return replace(stats, draining=True)

    def look(self, view: ClusterView, now: float) -> list[tuple[str, float]]:
        """Replicas that are found to have stalled, and since how many seconds; ``view`` says so from now on, as long as
        it is so. Those that have left are forgotten. It may be called at all news, and looks now and then. Two looks in
        a row have to agree: the first one after a pause of the gateway itself comes before it has read what the others
        have told meanwhile.
        """
        if now - self._looked_s < LOOK_S:
            return []
        self._looked_s = now
        candidates = view.present(now)
        ids = candidates.replica_ids
        seen = [self._progress.get(replica_id) for replica_id in ids]
        self._progress = {replica_id: one for replica_id, one in zip(ids, seen, strict=True) if one is not None}
        # One with nothing to do seldom tells so; once it has something to do it tells within a beat.
        quiet_s = np.array([0.0 if one is None or one.is_idle else now - one.time_s for one in seen])
        found: list[tuple[str, float]] = []
        suspects = {ids[place] for place in stalled(candidates, quiet_s).nonzero()[0].tolist()}
        before, self._suspects = self._suspects, suspects
        for replica_id in sorted(self._stalled.keys() - before - suspects):  # it is the only one left to go to
            stats = self._stalled.pop(replica_id)
            if replica_id in ids:
                _tell(view, candidates, ids.index(replica_id), stats)
        for replica_id in sorted((before & suspects) - self._stalled.keys()):
            place = ids.index(replica_id)
            if (told := candidates.stats[place]) is not None:
                self._stalled[replica_id] = told
                _tell(view, candidates, place, replace(told, draining=True))
                found.append((replica_id, float(quiet_s[place])))
        return found

    def forget(self, replica_id: str) -> None:
        """It begins anew."""
        self._progress.pop(replica_id, None)
        self._stalled.pop(replica_id, None)


def _tell(view: ClusterView, candidates: Candidates, place: int, stats: ReplicaStats) -> None:
    """Put ``stats`` in the place of what was told, which gets no newer by that."""
    view.apply_update(candidates.replica_ids[place], stats, (), (), float(candidates.updated_s[place]))
