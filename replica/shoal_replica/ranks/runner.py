"""What a rank's process asks of its model."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from shoal_replica.config import EngineConfig
from shoal_replica.executor import SchedulerOutput, StepResult


class CollectiveError(RuntimeError):
    """Another rank did not take part in a collective."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks' store is, at which address this rank can be reached by the others, and which are on its host.

    ``listener`` is the store's open socket on the rank that keeps it, None elsewhere.
    """

    host: str
    port: int
    own_host: str
    ranks_here: tuple[int, ...]
    listener: socket.socket | None


class RankRunner(Protocol):
    """A rank's model. How far it is, another thread reads, until ``close``."""

    @property
    def num_collectives(self) -> int:
        """Collectives begun since the start."""
        ...

    @property
    def progress(self) -> int:
        """A number that differs once a step has gone on, be it between two collectives."""
        ...

    @property
    def awaited_rank(self) -> int | None:
        """The rank of another stage that it waits for, to hand a step over or to take it over."""
        ...

    @property
    def samples(self) -> bool:
        """Whether ``execute`` gives the step's tokens."""
        ...

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Compute this rank's part of a step. Raises CollectiveError when that is another rank's fault."""
        ...

    def take_sampled(self, tokens: Iterable[tuple[int, int]]) -> None:
        """The last step's tokens, when another rank has sampled them."""
        ...

    def close(self) -> None: ...


RunnerFactory = Callable[[EngineConfig, int, Rendezvous], RankRunner]
