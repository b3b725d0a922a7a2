"""Replicas that make no progress: nothing new goes there, and requests that have not started go elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import CAPACITY, SEQUENCES
from shoal_cluster.policies.ranking import MAX_AGE_S
from shoal_cluster.policies.view import ClusterView
from shoal_replica.stats import ReplicaStats

STALL_S = 1.0
STALL_FACTOR = 4.0
LOOK_S = 0.1
PAUSE_S = 0.5  # a longer gap between looks: the gateway itself stood still; it then has as long to read what it missed


@dataclass(frozen=True, slots=True)
class Progress:
    """What a replica had done when it was last seen to make progress, or to be idle, and when that was."""

    busy_s: float
    time_s: float
    is_idle: bool

    def after(self, stats: ReplicaStats, now: float) -> Progress:
        """The same after its next stats."""
        is_idle = not stats.num_running + stats.num_waiting
        if stats.busy_s == self.busy_s and not (is_idle or self.is_idle):
            return self
        return Progress(stats.busy_s, now, is_idle)


class StallLook(NamedTuple):
    """Replicas found to have stalled, with the reason; and those that had stalled and may get requests again."""

    found: tuple[tuple[str, str], ...] = ()
    released: tuple[str, ...] = ()


def stalled(candidates: Candidates, quiet_s: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which replicas have stalled [n]: those that are silent; and, while another takes requests and makes progress,
    those busy with a step for more than ``STALL_S`` and ``STALL_FACTOR`` times the length of their last step and of a
    full one (at their measured pace) together. ``quiet_s``: seconds since each was last seen to make progress [n].
    """
    told, silent = candidates.told, is_silent(candidates)
    longest_s = told["max_num_batched_tokens"] * told["token_s"] + told["step_s"]
    is_slow: NDArray[np.bool_] = quiet_s > np.maximum(STALL_S, STALL_FACTOR * longest_s)
    is_slow &= (told["token_s"] > 0) & told["connected"] & (candidates.columns[SEQUENCES] > 0)
    others = (candidates.columns[CAPACITY] > 0) & ~(is_slow | silent)
    has_stalled: NDArray[np.bool_] = silent | (is_slow & others.any())
    return has_stalled


def is_silent(candidates: Candidates) -> NDArray[np.bool_]:
    """Which replicas have been silent for so long that it is no longer known what they have free [n]."""
    told = candidates.told
    silent: NDArray[np.bool_] = told["connected"] & told["known"] & (candidates.age_s > MAX_AGE_S)
    return silent


class Stalls:
    """Which replicas have stalled, as one gateway sees it. Owned and written by it; only this tells ``view``."""

    def __init__(self, view: ClusterView, pause_s: float = PAUSE_S) -> None:
        self._view = view
        self._pause_s = pause_s
        self._resumed_s = -np.inf  # when the gateway was last found to have stood still itself
        self._progress: dict[str, Progress] = {}
        self._stalled: set[str] = set()
        self._suspects: set[str] = set()  # those that had stalled at the last look
        self._looked_s = -np.inf

    def hear(self, replica_id: str, stats: ReplicaStats | None, now: float) -> bool:
        """Take a replica's news, None for the same as before. Whether it had stalled and makes progress now."""
        progress = self._progress.get(replica_id, Progress(-1.0, now, True))
        if stats is not None:
            progress = self._progress[replica_id] = progress.after(stats, now)
        if replica_id not in self._stalled or not (progress.is_idle or progress.time_s == now):
            return False
        self._release(replica_id)
        return True

    def look(self, now: float) -> StallLook:
        """Find the replicas that have stalled; the view says so for as long as it is so. Those that have left are
        forgotten. It may be called at all news, and looks every ``LOOK_S`` at most. Two looks in a row have to agree,
        and neither may come just after a pause of the gateway itself, which has yet to read what it was told meanwhile.
        """
        if now - self._looked_s < LOOK_S:
            return StallLook()
        if now - self._looked_s > self._pause_s:
            self._resumed_s = now
        self._looked_s = now
        if now - self._resumed_s < self._pause_s < np.inf:
            self._suspects = set()
            return StallLook()
        candidates = self._view.present(now)
        ids = candidates.replica_ids
        seen = [self._progress.get(replica_id) for replica_id in ids]
        self._progress = {replica_id: one for replica_id, one in zip(ids, seen, strict=True) if one is not None}
        # An idle replica reports rarely; once it has something to do it reports within a heartbeat.
        quiet_s = np.array([0.0 if one is None or one.is_idle else now - one.time_s for one in seen])
        before, self._suspects = self._suspects, {ids[i] for i in stalled(candidates, quiet_s).nonzero()[0].tolist()}
        released = sorted(self._stalled - before - self._suspects)  # no other takes requests now, or it speaks again
        for replica_id in released:
            self._release(replica_id)
        found = sorted((before & self._suspects) - self._stalled)
        self._stalled.update(found)
        for replica_id in found:
            self._view.set_stalled(replica_id, True)
        reasons = [_reason(candidates, ids.index(replica_id), quiet_s) for replica_id in found]
        there = tuple(replica_id for replica_id in released if self._view.is_connected(replica_id))
        return StallLook(tuple(zip(found, reasons, strict=True)), there)

    def forget(self, replica_id: str) -> None:
        """The replica begins anew, with a new feed."""
        self._progress.pop(replica_id, None)
        self._stalled.discard(replica_id)

    def _release(self, replica_id: str) -> None:
        self._stalled.discard(replica_id)
        self._view.set_stalled(replica_id, False)


def _reason(candidates: Candidates, place: int, quiet_s: NDArray[np.float64]) -> str:
    if is_silent(candidates)[place]:
        return f"not a word for {candidates.age_s[place]:.1f} s"
    return f"no step has ended for {quiet_s[place]:.1f} s"
