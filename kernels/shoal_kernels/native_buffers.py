"""Reused memory for inputs and results of the native decoder's steps: allocating it would show in small steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


class RowMaxima(NamedTuple):
    """For each row of logits the largest value (NaN if the row contains one), and its first index."""

    largest: Sequence[float]
    places: list[int]


class Results:
    """The buffers of a step's logits and their maxima: those of the last step, if they are large enough."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._whole = torch.empty((num_rows, vocab_size), dtype=torch.float32)
        self._largest, self._places = np.empty(num_rows, np.float32), np.empty(num_rows, np.int64)
        self.logits = self._whole
        self._maxima = self._largest.data, self._places.data
        self.addresses = self._whole.data_ptr(), self._largest.ctypes.data, self._places.ctypes.data

    def of(self, num_rows: int) -> Results:
        """These buffers cut to ``num_rows`` rows, or new, larger ones."""
        if num_rows > len(self._whole):
            return Results(num_rows, self._whole.shape[1])
        if num_rows != len(self.logits):
            self.logits = self._whole[:num_rows]
            self._maxima = self._largest.data[:num_rows], self._places.data[:num_rows]
        return self

    @property
    def maxima(self) -> RowMaxima:
        largest, places = self._maxima
        return RowMaxima(largest.tolist(), places.tolist())


class KeptArray:
    """A step's input, copied to reused memory: asking numpy for an address would show in a step of one sequence."""

    def __init__(self, dtype: type[np.integer[Any]]) -> None:
        self._array = np.empty(0, dtype)
        self._address = 0

    def put(self, values: Sequence[int] | NDArray[np.integer[Any]]) -> int:
        """The address of a copy of ``values``, valid until the next call."""
        if len(values) > len(self._array):
            self._array = np.empty(2 * len(values), self._array.dtype)
            self._address = self._array.ctypes.data
        self._array[: len(values)] = values
        return self._address
