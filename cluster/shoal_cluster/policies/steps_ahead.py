"""How much a replica may have to compute before a request that is sent to it.

News of a step reach the gateway when the next one has begun, with what was there by then. So that no step runs with
less than it could, a step's worth of prompts has to be there behind those that the running one takes. But who is sent
can go nowhere else any more, nor be put off. That is no loss for a prompt that the next step ends, where replicas go by
due dates: another one as busy would end it no sooner, and who is due before it passes it. Nor is it much of one for a
prompt longer than a step that fills what room the next one has and is ended by the one after: else the last tokens of a
prompt a little longer than a step have a step to themselves, which reads all weights for them. Longer ones would be
bound for many steps, and where order is that of arrival others would be bound behind them: these wait at the gateway
until no more than ``max_steps_ahead`` is left to do there. A step is counted with all its tokens. Decodes take theirs
of them first: beside many, what is sent takes some steps more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import Floats


@dataclass(frozen=True, slots=True)
class StepsAhead:
    """The rule. Ahead of a request is what is due no later, for replicas go by due dates, and all that was promised."""

    max_steps_ahead: float

    def most(self, told: NDArray[np.void], at: list[int] | slice = slice(None)) -> Floats:
        """Tokens ahead of any prompt, however short, at replicas that ``told`` so; see ``Candidates``. Only of those
        ``at`` some places, if given.
        """
        step = told["max_num_batched_tokens"][at]  # whole records would be copied the other way round
        most: Floats = self.max_steps_ahead * step + told["by_due"][at] * (step - 1)
        return most

    def most_at(self, replicas: Candidates, place: int) -> float:
        """The same at one of them."""
        if (stats := replicas.stats[place]) is None:
            return 0.0
        step = stats.max_num_batched_tokens
        return self.max_steps_ahead * step + stats.by_due * (step - 1)

    def may_start(self, num_tokens: int, num_ahead: int, replicas: Candidates, place: int) -> bool:
        """Whether a prompt with ``num_tokens`` to compute may be sent to the replica at ``place``."""
        if (stats := replicas.stats[place]) is None:
            return False
        step = stats.max_num_batched_tokens
        if num_ahead <= self.max_steps_ahead * step:
            return True
        room = (self.max_steps_ahead + 1) * step - num_ahead  # in the next step
        most = room + step if num_tokens > step and room > 0 else room
        return stats.by_due and num_tokens <= most
