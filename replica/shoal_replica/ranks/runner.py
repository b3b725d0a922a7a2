"""The interface between a rank's process and its model."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal_replica.adapter import AdapterConfig
from shoal_replica.config import EngineConfig
from shoal_replica.executor import BlockPart, SchedulerOutput, StepResult


class CollectiveError(RuntimeError):
    """Another rank did not take part in a collective."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The address of the ranks' store, this rank's own address, and the ranks on its host.

    ``listener`` is the store's open socket on the rank that keeps the store, None on the others.
    """

    host: str
    port: int
    own_host: str
    ranks_here: tuple[int, ...]
    listener: socket.socket | None


class RankRunner(Protocol):
    """A rank's model. Another thread may read its progress properties, until ``close``."""

    @property
    def num_collectives(self) -> int:
        """Collectives begun since the start."""
        ...

    @property
    def progress(self) -> int:
        """A number that changes as a step progresses, also between two collectives."""
        ...

    @property
    def awaited_rank(self) -> int | None:
        """The rank of another stage that it waits for, to send or to receive activations."""
        ...

    @property
    def samples(self) -> bool:
        """Whether ``execute`` returns the step's tokens."""
        ...

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Compute this rank's part of a step. Raises CollectiveError if another rank did not take part."""
        ...

    def load_adapter(self, adapter: AdapterConfig) -> None:
        """Let steps use this rank's shard of an adapter. Raises ConfigError, and then nothing has changed."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Free an adapter that no sequence uses."""
        ...

    def read_blocks(self, block_ids: Sequence[int]) -> BlockPart:
        """What this rank holds of some blocks."""
        ...

    def write_blocks(self, block_ids: Sequence[int], part: BlockPart) -> None:
        """Fill this rank's part of blocks. Raises ConfigError if the contents are of another kind."""
        ...

    def take_sampled(self, tokens: Iterable[tuple[int, int]]) -> None:
        """Pass on the last step's tokens, if another rank has sampled them."""
        ...

    def close(self) -> None: ...


RunnerFactory = Callable[[EngineConfig, int, Rendezvous], RankRunner]
