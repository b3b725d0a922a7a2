"""How ranks that share each layer exchange their parts of a sum, from within the native decoder's step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shoal_kernels.native_library import EXCHANGE_LINE_BYTES, GATHER, CExchange


class LostRank(RuntimeError):
    """Another rank did not take part in an exchange."""


class Exchange(Protocol):
    """One rank's end of an exchange, for one decoder. Size and capacity are the same on all ranks.

    Attributes:
        native: the struct for the library; valid as long as this object lives.
        failure: the error that the function carrying the parts raised.
    """

    native: CExchange
    failure: BaseException | None

    @property
    def num_calls(self) -> int:
        """Exchanges that this rank has begun; read by another thread."""
        ...


def shared_bytes(size: int, capacity: int) -> int:
    """Bytes of memory of a ``SharedExchange`` between ``size`` ranks with parts of ``capacity`` floats."""
    return size * EXCHANGE_LINE_BYTES + 2 * size * capacity * 4


class SharedExchange:
    """For ranks on one host, over memory that all have mapped: a rank waits on the counters of the others.

    Args:
        memory: ``shared_bytes`` bytes, writable, aligned to a line, zeroed before the first rank uses them.
        timeout_s: the longest wait for another rank.
    """

    def __init__(self, memory: memoryview, rank: int, size: int, capacity: int, timeout_s: float) -> None:
        if memory.nbytes < shared_bytes(size, capacity):
            raise ValueError(f"memory: got {memory.nbytes} bytes; must be {shared_bytes(size, capacity)}")
        self._memory = np.frombuffer(memory, dtype=np.uint8)  # keeps it alive
        self._turn = self._memory[rank * EXCHANGE_LINE_BYTES :][:4].view(np.uint32)
        self.failure: BaseException | None = None
        self.native = CExchange(rank, size, capacity, self._memory.ctypes.data, GATHER(), timeout_s)

    @property
    def num_calls(self) -> int:
        return int(self._turn[0])


class CarriedExchange:
    """For ranks anywhere. ``gather`` gets this rank's part, float32 [count], and fills all ranks' parts, [size, count].

    The decoder's step raises what ``gather`` raises.
    """

    def __init__(self, gather: Callable[[Tensor, Tensor], None], rank: int, size: int, capacity: int) -> None:
        self.num_calls = 0
        self.failure: BaseException | None = None
        self._gather = gather
        self._size = size
        self.native = CExchange(rank, size, capacity, None, GATHER(self._carry), 0.0)

    def _carry(self, part: int, count: int, parts: int) -> int:
        """Called from C, so no exception may leave it."""
        self.num_calls += 1
        try:
            self._gather(_floats(part, count), _floats(parts, self._size * count).view(self._size, count))
        except BaseException as error:
            self.failure = error
            return -1
        return 0


def _floats(address: int, count: int) -> Tensor:
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)
