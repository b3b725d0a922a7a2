"""Rows of logits by the native library: maxima, draws and log-probabilities, without sorting a row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal_kernels.draws import Draw, LogProbabilities
from shoal_kernels.native_library import last_error, library

MAX_TOP_K = 2**62
C_DRAW = np.dtype(
    [("temperature", "f4"), ("least_score", "f4"), ("top_k", "i8"), ("top_p", "f8"), ("uniform", "f8")], align=True
)


def row_maxima(x: Tensor) -> tuple[Tensor, Tensor]:
    """``ops.row_maxima`` of contiguous float32 rows."""
    values, places = torch.empty(x.shape[0]), torch.empty(x.shape[0], dtype=torch.int64)
    library().shoal_row_maxima(x.data_ptr(), *x.shape, values.data_ptr(), places.data_ptr())
    return values, places


def draw(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw], decoder: int | None = None) -> list[int]:
    """``ops.draw`` of contiguous float32 logits, by the threads of a decoder (its handle) if given."""
    numbers = _numbers(logits, rows, draws)
    how = np.array([(d.divisor, d.least_score, min(d.top_k, MAX_TOP_K), d.top_p, d.uniform) for d in draws], C_DRAW)
    places = np.empty(len(draws), np.int64)
    _check(
        library().shoal_draw(
            decoder,
            logits.data_ptr(),
            logits.shape[1],
            numbers.ctypes.data,
            len(numbers),
            how.ctypes.data,
            places.ctypes.data,
        )
    )
    found: list[int] = places.tolist()
    return found


def log_probabilities(
    logits: Tensor, rows: Sequence[int], token_ids: Sequence[int], counts: Sequence[int], decoder: int | None = None
) -> list[LogProbabilities]:
    """``ops.log_probabilities`` of contiguous float32 logits, by the threads of a decoder (its handle) if given."""
    numbers, vocab_size = _numbers(logits, rows, counts), logits.shape[1]
    chosen = np.array(token_ids, np.int64)
    if len(chosen) != len(numbers) or not 0 <= chosen.min() <= chosen.max() < vocab_size:
        raise ValueError(f"token_ids: must be {len(numbers)} below {vocab_size}")
    num_top = np.minimum(np.array(counts, np.int64), vocab_size)
    stride, count = int(num_top.max()), len(numbers)
    values = np.empty(count, np.float32)
    top_places, top_values = np.empty((count, stride), np.int64), np.empty((count, stride), np.float32)
    _check(
        library().shoal_log_probabilities(
            decoder,
            logits.data_ptr(),
            vocab_size,
            numbers.ctypes.data,
            count,
            chosen.ctypes.data,
            num_top.ctypes.data,
            stride,
            values.ctypes.data,
            top_places.ctypes.data,
            top_values.ctypes.data,
        )
    )
    found = zip(values.tolist(), top_places.tolist(), top_values.tolist(), counts, strict=True)
    return [LogProbabilities(value, tuple(zip(p[:n], v[:n], strict=True))) for value, p, v, n in found]


def _numbers(logits: Tensor, rows: Sequence[int], others: Sequence[object]) -> NDArray[np.int64]:
    """The row numbers as the library takes them, which reads whatever they point to."""
    if logits.dtype != torch.float32 or not logits.is_contiguous() or logits.ndim != 2:
        raise ValueError("logits: must be contiguous float32 rows")
    if not 0 < len(rows) == len(others) or not 0 <= min(rows) <= max(rows) < len(logits):
        raise ValueError(f"rows: got {len(rows)} for {len(others)}; must be numbers below {len(logits)}")
    return np.array(rows, np.int64)


def _check(status: int) -> None:
    if status != 0:
        raise MemoryError(last_error())
