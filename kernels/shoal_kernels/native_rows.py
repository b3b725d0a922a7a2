"""Rows of logits by the native library: maxima, draws and log-probabilities, without sorting a row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shoal_kernels.draws import Draw, LogProbabilities
from shoal_kernels.native_library import library

MAX_TOP_K = 2**62
C_DRAW = np.dtype(
    [("temperature", "f4"), ("least_score", "f4"), ("top_k", "i8"), ("top_p", "f8"), ("uniform", "f8")], align=True
)


def row_maxima(x: Tensor) -> tuple[Tensor, Tensor]:
    """``ops.row_maxima`` of contiguous float32 rows."""
    values, places = torch.empty(x.shape[0]), torch.empty(x.shape[0], dtype=torch.int64)
    library().shoal_row_maxima(x.data_ptr(), *x.shape, values.data_ptr(), places.data_ptr())
    return values, places


def draw(logits: Tensor, draws: Sequence[Draw], decoder: int | None = None) -> list[int]:
    """``ops.draw`` of contiguous float32 rows, by the threads of a decoder (its handle) if given."""
    how = np.array([(d.divisor, d.least_score, min(d.top_k, MAX_TOP_K), d.top_p, d.uniform) for d in draws], C_DRAW)
    places = np.empty(len(draws), np.int64)
    library().shoal_draw(decoder, logits.data_ptr(), *logits.shape, how.ctypes.data, places.ctypes.data)
    found: list[int] = places.tolist()
    return found


def log_probabilities(
    logits: Tensor, token_ids: Sequence[int], counts: Sequence[int], decoder: int | None = None
) -> list[LogProbabilities]:
    """``ops.log_probabilities`` of contiguous float32 rows, by the threads of a decoder (its handle) if given."""
    num_rows, vocab_size = logits.shape
    num_top = np.minimum(np.array(counts, np.int64), vocab_size)
    stride, chosen = int(num_top.max()), np.array(token_ids, np.int64)
    values = np.empty(num_rows, np.float32)
    top_places, top_values = np.empty((num_rows, stride), np.int64), np.empty((num_rows, stride), np.float32)
    library().shoal_log_probabilities(
        decoder,
        logits.data_ptr(),
        num_rows,
        vocab_size,
        chosen.ctypes.data,
        num_top.ctypes.data,
        stride,
        values.ctypes.data,
        top_places.ctypes.data,
        top_values.ctypes.data,
    )
    rows = zip(values.tolist(), top_places.tolist(), top_values.tolist(), counts, strict=True)
    return [LogProbabilities(value, tuple(zip(p[:n], v[:n], strict=True))) for value, p, v, n in rows]
