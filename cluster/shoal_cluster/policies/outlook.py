"""What the replicas can start now, seen all together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import CAPACITY, LOAD, ROOM, URGENT, Ints
from shoal_cluster.policies.steps_ahead import StepsAhead


class Outlook(NamedTuple):
    """What decides whether a look is worth it, and by when requests can begin.

    Attributes:
        num_startable: how many replicas may start something, if it is urgent.
        num_idle: as ``Candidates.num_idle``, by the same columns as the rest.
        least_capacity: blocks of the largest request that all accepting replicas can take; 0 if none accepts requests.
        most_room: free blocks for a newcomer where there are most, at least -1; without a free slot a replica has -1.
        wait_s: seconds until some replica can begin with a prompt that is sent now: the running step has to end, and
            what was sent before comes first. 0 if none may start anything.
    """

    num_startable: int
    num_idle: int
    least_capacity: int
    most_room: int
    wait_s: float

    @classmethod
    def of(cls, snapshot: Candidates, columns: Ints, steps_ahead: StepsAhead, token_s: float) -> Outlook:
        """The outlook by these ``columns`` where a prompt token takes ``token_s``."""
        told, capacity = snapshot.told, columns[CAPACITY]
        takes = capacity >= 0
        may_start = steps_ahead.may_start_urgent(told, columns)
        waits_s = columns[URGENT] * token_s + told["step_s"] * (told["num_running"] > 0)
        least_s = float(waits_s[may_start].min(initial=np.inf))
        return cls(
            int(np.count_nonzero(may_start)),
            int(np.count_nonzero(takes & (columns[LOAD] == 0))),
            int(capacity[takes].min()) if takes.any() else 0,
            int(columns[ROOM].max(initial=-1)),
            least_s if least_s < np.inf else 0.0,
        )
