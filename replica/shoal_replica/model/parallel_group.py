"""What the ranks of a replica do together: sums and gathers within a stage, and the hand-over between stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal_replica.ranks.runner import CollectiveError

# The older name warns since torch 2.13; before that the newer one is not there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ParallelGroup(Protocol):
    """The collectives of one rank. ``tensor_*`` are over the ranks of its stage, all of which make the same calls.

    Attributes:
        num_calls: collectives begun; of ranks that wait for each other, the one to blame has the lowest. Who repeats
            calls without these methods, as a graph does, adds them.
    """

    num_calls: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``; ``x`` may be overwritten."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' ``x`` [n, m], n above 0, side by side in rank order: [n, size * m]."""
        ...

    def send_to_next_stage(self, x: Tensor) -> None: ...

    def receive_from_previous_stage(self, x: Tensor) -> Tensor:
        """Fill ``x`` with what the same rank of the previous stage sent."""
        ...


class SoleRank:
    """A group of one, which costs nothing."""

    num_calls = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def send_to_next_stage(self, x: Tensor) -> None:
        raise RuntimeError("there is only one stage")

    def receive_from_previous_stage(self, x: Tensor) -> Tensor:
        raise RuntimeError("there is only one stage")


class RankGroup:
    """The collectives of ``torch.distributed``, whose default group must have been made of all ranks."""

    def __init__(self, rank: int, tensor_size: int, num_stages: int) -> None:
        self.num_calls = 0
        self._size = tensor_size
        self._previous, self._next = rank - tensor_size, rank + tensor_size
        stages = [range(i * tensor_size, (i + 1) * tensor_size) for i in range(num_stages)]
        # Every rank makes every group, in one order, as torch demands.
        groups = [dist.new_group(list(ranks)) for ranks in stages] if num_stages > 1 else [dist.group.WORLD]
        self._group = groups[rank // tensor_size]

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._size > 1:
            self.num_calls += 1
            with _blaming_others():
                dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        if self._size == 1:
            return x
        self.num_calls += 1
        gathered = x.new_empty(self._size * x.shape[0], x.shape[1])
        with _blaming_others():
            _all_gather(gathered, x.contiguous(), group=self._group)
        return torch.cat(gathered.chunk(self._size), dim=-1)

    def send_to_next_stage(self, x: Tensor) -> None:
        self.num_calls += 1
        with _blaming_others():
            dist.send(x.contiguous(), self._next)

    def receive_from_previous_stage(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        with _blaming_others():
            dist.recv(x, self._previous)
        return x


@contextmanager
def _blaming_others() -> Iterator[None]:
    """A collective fails because another rank has gone."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(f"lost another rank: {error}") from error
