"""The native library through ctypes: the declarations of ``csrc/shoal_native.h``."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).with_name("_native.so")
REBUILD = "python setup.py build_ext --inplace, or install the package again"
EXCHANGE_LINE_BYTES = 64
LOST_RANK = -2
GATHER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)


class CShape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in (
            "dtype", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
            "head_size", "block_size", "num_blocks", "num_threads", "sliding_window", "max_positions",
            "tied_embeddings", "vocab_begin", "vocab_rows", "is_first_stage", "is_last_stage", "norms_span_heads",
            "gelu", "num_experts", "first_expert", "held_experts", "experts_per_token", "expert_size",
            "shared_size", "renormalizes_experts", "sigmoid_router",
        )),
        *((name, ctypes.c_float) for name in (
            "rms_norm_eps", "embedding_scale", "attention_scale", "expert_scale",
        )),
        ("kernels", ctypes.c_char * 16),
    )  # fmt: skip


class CStep(ctypes.Structure):
    _fields_ = (
        ("num_tokens", ctypes.c_int32),
        ("num_seqs", ctypes.c_int32),
        ("num_samples", ctypes.c_int32),
        ("input_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("query_start_loc", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("sample_rows", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("maxima_alone", ctypes.c_int32),
        ("adapters", ctypes.c_void_p),
    )


class CExchange(ctypes.Structure):
    _fields_ = (
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("capacity", ctypes.c_int64),
        ("memory", ctypes.c_void_p),
        ("gather", GATHER),
        ("timeout_s", ctypes.c_double),
    )


def _load(path: Path | None = None) -> ctypes.CDLL | None:
    path = path or LIBRARY
    if not path.is_file():
        return None
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(f"{path} cannot be loaded on this machine ({error}): {REBUILD}") from error
    pointer = ctypes.c_void_p
    for name, result, arguments in (
        ("shoal_decoder_create", pointer, [pointer, pointer]),
        ("shoal_decoder_destroy", None, [pointer]),
        ("shoal_decoder_set", ctypes.c_int, [pointer, ctypes.c_int32, ctypes.c_int32, pointer, ctypes.c_int64]),
        (
            "shoal_decoder_set_integers",
            ctypes.c_int,
            [pointer, *[ctypes.c_int32] * 4, pointer, pointer, pointer, ctypes.c_int64],
        ),
        ("shoal_decoder_set_rotary", ctypes.c_int, [pointer, ctypes.c_int32, pointer]),
        ("shoal_decoder_set_layer", ctypes.c_int, [pointer, *[ctypes.c_int32] * 3]),
        ("shoal_decoder_add_adapter", ctypes.c_int, [pointer]),
        ("shoal_decoder_set_factors", ctypes.c_int, [pointer, *[ctypes.c_int32] * 4, pointer, pointer]),
        ("shoal_decoder_remove_adapter", ctypes.c_int, [pointer, ctypes.c_int32]),
        ("shoal_decoder_step", ctypes.c_int, [pointer, pointer, pointer, pointer]),
        ("shoal_decoder_copy_blocks", ctypes.c_int, [pointer, pointer, ctypes.c_int32]),
        ("shoal_decoder_block_bytes", ctypes.c_int64, [pointer]),
        ("shoal_decoder_read_blocks", None, [pointer, pointer, ctypes.c_int32, pointer]),
        ("shoal_decoder_write_blocks", None, [pointer, pointer, ctypes.c_int32, pointer]),
        ("shoal_decoder_progress", ctypes.c_uint64, [pointer]),
        ("shoal_row_maxima", None, [pointer, ctypes.c_int64, ctypes.c_int64, pointer, pointer]),
        ("shoal_draw", ctypes.c_int, [pointer, pointer, ctypes.c_int64, pointer, ctypes.c_int64, pointer, pointer]),
        (
            "shoal_log_probabilities",
            ctypes.c_int,
            [*[pointer] * 2, ctypes.c_int64, pointer, ctypes.c_int64, *[pointer] * 2, ctypes.c_int64, *[pointer] * 3],
        ),
        ("shoal_decoder_kernels", ctypes.c_char_p, [pointer]),
        ("shoal_supported_kernels", ctypes.c_char_p, []),
        ("shoal_error", ctypes.c_char_p, []),
        ("shoal_struct_bytes", pointer, []),
    ):
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise RuntimeError(f"{path} was built from other sources ({error}): {REBUILD}") from error
        function.restype, function.argtypes = result, arguments
    structs = (CShape, CStep, CExchange)
    there = (ctypes.c_int64 * len(structs)).from_address(library.shoal_struct_bytes())
    if (found := list(there)) != (here := list(map(ctypes.sizeof, structs))):
        raise RuntimeError(f"{path} was built from other sources (structs of {found} bytes, not {here}): {REBUILD}")
    return library


_LIBRARY = _load()


def library() -> Any:
    if _LIBRARY is None:
        raise RuntimeError(f"the native kernels were not built: no {LIBRARY.name} beside this module")
    return _LIBRARY


def is_built() -> bool:
    return _LIBRARY is not None


def supported_kernels() -> tuple[str, ...]:
    """Instruction sets that were built and that this machine supports, best first; none without a library."""
    return tuple(library().shoal_supported_kernels().decode().split(",")) if is_built() else ()


def last_error() -> str:
    return f"native decoder: {library().shoal_error().decode()}"
