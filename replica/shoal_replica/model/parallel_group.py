"""Collectives of a replica's ranks: sums and gathers within a stage, and hand-over of activations between stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal_kernels.exchange import CarriedExchange, Exchange, SharedExchange, shared_bytes
from shoal_replica.model.shared_memory import Store, share
from shoal_replica.ranks.runner import CollectiveError

# The older name emits a warning since torch 2.13; before that the newer one does not exist.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ParallelGroup(Protocol):
    """The collectives of one rank. ``all_reduce`` and ``all_gather`` are over the ranks of its stage, which must all
    make the same calls.

    Attributes:
        num_calls: collectives begun; of ranks that wait for each other, the one to blame has the lowest count. A caller
            that repeats collectives without these methods, as a graph does, must add to it.
    """

    num_calls: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``; ``x`` may be overwritten."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' ``x`` [n, m], with n above 0, side by side in rank order: [n, size * m]."""
        ...

    def send_to_next_stage(self, x: Tensor) -> None: ...

    def receive_from_previous_stage(self, x: Tensor) -> Tensor:
        """Fill ``x`` with what the rank of the same number in the previous stage sent."""
        ...

    def all_agree(self, mine: bool) -> bool:
        """Whether ``mine`` is true on every rank of the replica, in all stages."""
        ...

    def exchange(self, capacity: int) -> Exchange | None:
        """The exchange that sums parts of ``capacity`` floats within the native decoder; None if a rank is alone in its
        stage.

        Every rank calls this once.
        """
        ...


class SoleRank:
    """A group of one rank, which costs nothing."""

    num_calls = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def send_to_next_stage(self, x: Tensor) -> None:
        raise RuntimeError("there is only one stage")

    def receive_from_previous_stage(self, x: Tensor) -> Tensor:
        raise RuntimeError("there is only one stage")

    def all_agree(self, mine: bool) -> bool:
        return mine

    def exchange(self, capacity: int) -> Exchange | None:
        return None


class RankGroup:
    """Collectives by ``torch.distributed``, whose default group must consist of all ranks.

    Args:
        store: where ranks on one host find the memory that they share.
        timeout_s: how long the native decoder waits for another rank.

    Attributes:
        awaited_rank: the rank of another stage that this one is waiting for; read by another thread.
    """

    def __init__(self, rank: int, tensor_size: int, num_stages: int, store: Store, timeout_s: float) -> None:
        self.num_calls = 0
        self._rank = rank
        self._size = tensor_size
        self._store = store
        self._timeout_s = timeout_s
        self.awaited_rank: int | None = None
        self._exchange: Exchange | None = None
        self._previous, self._next = rank - tensor_size, rank + tensor_size
        stages = [range(i * tensor_size, (i + 1) * tensor_size) for i in range(num_stages)]
        # Every rank creates every group, in the same order, as torch requires.
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
        with self._waiting_for(self._next):
            dist.send(x.contiguous(), self._next)

    def receive_from_previous_stage(self, x: Tensor) -> Tensor:
        with self._waiting_for(self._previous):
            dist.recv(x, self._previous)
        return x

    def all_agree(self, mine: bool) -> bool:
        return self._is_unanimous(mine, dist.group.WORLD)

    def exchange(self, capacity: int) -> Exchange | None:
        """Through shared memory if all ranks of the stage can map it, else carried by ``torch.distributed``."""
        if self._size == 1:
            return None
        stage, place = divmod(self._rank, self._size)
        with _blaming_others():
            shared = share(self._store, f"exchange/{stage}", place == 0, shared_bytes(self._size, capacity))
            is_shared = self._is_unanimous(shared.memory is not None, self._group)
            shared.settle()
        if is_shared and shared.memory is not None:
            self._exchange = SharedExchange(shared.memory, place, self._size, capacity, self._timeout_s)
        else:
            self._exchange = CarriedExchange(self._carry, place, self._size, capacity)
        return self._exchange

    @property
    def num_exchanges(self) -> int:
        """Sums begun within the native decoder; read by another thread."""
        return self._exchange.num_calls if self._exchange is not None else 0

    @contextmanager
    def _waiting_for(self, rank: int) -> Iterator[None]:
        self.num_calls += 1
        self.awaited_rank = rank
        with _blaming_others():
            yield
        self.awaited_rank = None

    def _carry(self, part: Tensor, parts: Tensor) -> None:
        with _blaming_others():
            _all_gather(parts.view(-1), part, group=self._group)

    @staticmethod
    def _is_unanimous(mine: bool, group: Any) -> bool:
        votes = torch.tensor([int(mine)], dtype=torch.int32)
        with _blaming_others():
            dist.all_reduce(votes, dist.ReduceOp.MIN, group=group)
        return bool(votes.item())


@contextmanager
def _blaming_others() -> Iterator[None]:
    """Turn a failed collective into a CollectiveError: it fails because another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(f"lost another rank: {error}") from error
