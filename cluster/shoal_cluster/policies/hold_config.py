"""How requests are held."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal_cluster.policies.objective import LatencyObjective, PrefillTime
from shoal_replica.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldConfig:
    """How requests are held.

    Attributes:
        objective: when a first token is due. It decides the order, how long a request waits for replicas of one role,
            and whom ``shed_late`` refuses.
        prefill: how long prompts take, until a replica has measured it.
        max_steps_ahead: a replica is sent a request when the prompt tokens that it computes first fill at most this
            many of its steps; short prompts go sooner (``StepsAhead``). One step keeps it busy while news travels; more
            gives up choices and gains nothing. Prompts there that are due later do not count: they go on after it.
        max_considered: how many requests one look considers, the most urgent first; one more for each of these that
            only some replicas may take.
    """

    objective: LatencyObjective = field(default_factory=LatencyObjective)
    prefill: PrefillTime = field(default_factory=PrefillTime)
    max_steps_ahead: float = 1.0
    max_considered: int = 32

    def __post_init__(self) -> None:
        if not self.max_steps_ahead > 0:
            raise ConfigError(f"max_steps_ahead: got {self.max_steps_ahead!r}; must be above 0")
        if self.max_considered < 1:
            raise ConfigError(f"max_considered: got {self.max_considered!r}; must be at least 1")
