"""How much a replica may have to compute before a request that is sent to it.

The report of a step reaches the gateway when the next step has begun, with what was there by then. So that every step
is as full as it can be, a step's worth of prompts has to wait there behind those that the running step computes. But a
request that was sent can no longer go elsewhere or be put off. That costs nothing for a prompt that the next step
completes, where replicas go by due dates: another replica as busy would complete it no sooner, and a request that is
due earlier passes it. It costs little for a prompt longer than a step that fills the room in the next step and is
completed by the one after: otherwise the last tokens of a prompt slightly longer than a step get a step to themselves,
which reads all weights for them. Longer prompts would be bound to the replica for many steps, and on replicas that go
by order of arrival every prompt would bind those behind it: such prompts wait at the gateway until the replica has no
more than ``max_steps_ahead`` left to do. A step counts with its full token budget. Decodes take their tokens out of it
first: beside many of them, what is sent takes some steps more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import CAPACITY, URGENT, Floats, Ints

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StepsAhead:
    """Decides whether a request may be sent to a replica now. Ahead of it are the tokens that the replica reports as
    due no later (replicas schedule by due date), and all that are promised but not reported yet.
    """

    max_steps_ahead: float

    def most(self, told: NDArray[np.void]) -> Floats:
        """The most tokens that may be ahead of a prompt, however short, at the replicas of ``told`` (see
        ``Candidates``).
        """
        step = told["max_num_batched_tokens"]
        most: Floats = self.max_steps_ahead * step + told["by_due"] * (step - 1)
        return most

    def may_start_urgent(self, told: NDArray[np.void], columns: Ints) -> Bools:
        """Which replicas may start something, if it is urgent, by these ``told`` and ``columns`` [n]."""
        may_start: Bools = columns[URGENT] <= self.most(told)
        may_start &= columns[CAPACITY] >= 0
        return may_start

    def may_start(self, num_tokens: int, num_ahead: int, replicas: Candidates, place: int) -> bool:
        """Whether a prompt with ``num_tokens`` to compute may be sent to ``place``, behind ``num_ahead`` tokens."""
        if (stats := replicas.stats[place]) is None:
            return False
        step = stats.max_num_batched_tokens
        if num_ahead <= self.max_steps_ahead * step:
            return True
        room = (self.max_steps_ahead + 1) * step - num_ahead  # room in the next step
        most = room + step if num_tokens > step and room > 0 else room
        return stats.by_due and num_tokens <= most
