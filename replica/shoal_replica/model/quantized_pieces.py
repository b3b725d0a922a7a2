"""Reads pieces of quantized matrices from a checkpoint's tensors, each a few of which stand for a ``weight``.

Layouts are those of GPTQ (Frantar et al. 2022; ``qweight``, ``qzeros``, ``scales``, ``g_idx``), AWQ (Lin et al. 2023;
the same names), compressed-tensors (``weight_packed``, ``weight_scale``, ``weight_zero_point``), and of 8-bit
floating-point weights (``weight_scale``, or ``weight_scale_inv`` for blocks).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from shoal_kernels.integers import GROUP_SIZE, IntegerWeight, round_weight
from shoal_replica.errors import ConfigError
from shoal_replica.model.parameters import Piece
from shoal_replica.weight_formats import LAYER_BITS, StoredQuantization

WORD_BITS = 32
MIDDLE_OF_8 = 128
ONES_OF_4, ONES_OF_8 = 0x11111111, 0x01010101  # words of ones
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # in which of a word's nibbles each of eight outputs is
WEIGHT = ".weight"
# What a matrix may be stored as, besides its ``weight``; the first three stand for it, or say that it is not plain.
MARKS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")
COMPANIONS = (
    *MARKS, "qzeros", "scales", "g_idx", "weight_shape", "weight_zero_point", "weight_g_idx", "input_scale",
    "input_zero_point", "activation_scale", "output_scale",
)  # fmt: skip
KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale")  # of an attention, whose KV keeps the dtype
SCALE_DTYPES = ("F16", "BF16", "F32")


def is_quantized(name: str, stored: Mapping[str, Any]) -> bool:
    """Whether the matrix ``name`` is stored in a quantized form."""
    base = name.removesuffix(WEIGHT)
    return name.endswith(WEIGHT) and any(f"{base}.{mark}" in stored for mark in MARKS)


def matrix_of(name: str) -> str:
    """The ``weight`` that a tensor may belong to: ``name`` itself if it is none of COMPANIONS."""
    base, _, suffix = name.rpartition(".")
    return f"{base}{WEIGHT}" if suffix in COMPANIONS else name


@dataclass(frozen=True, slots=True)
class QuantizedPieces:
    """The quantized matrices among ``stored``, which maps a tensor's name to the open file that holds it.

    ``served_as`` is a key of LAYER_BITS: integers are kept where that is possible, and otherwise rounded again.
    """

    scheme: StoredQuantization
    served_as: str
    stored: Mapping[str, Any]

    def read(self, piece: Piece) -> Tensor | IntegerWeight:
        """A piece, as integers or in float32.

        Raises:
            ConfigError: it is no matrix, or a tensor is missing, of another shape than config.json says, or cut within
                a group.
        """
        if len(piece.shape) != 2:
            raise ConfigError(f"model: tensor {piece.name!r} of shape {piece.shape} is quantized; only matrices may be")
        assert piece.columns is not None
        bits = LAYER_BITS[self.served_as]
        if bits is not None and (piece.columns.start % GROUP_SIZE or len(piece.columns) % GROUP_SIZE):
            raise ConfigError(
                f"quantization: {piece.name} has {len(piece.columns)} inputs here, from {piece.columns.start} on; "
                f"{self.served_as} takes multiples of {GROUP_SIZE}"
            )
        if self.scheme.is_float:
            weight = self._floats(piece)
            return weight if bits is None else round_weight(weight, bits)
        values, scales, zeros = self._integers(piece)
        assert bits is not None
        groups = self._groups(piece)
        is_kept = self.scheme.keeps_integers and bits == self.scheme.bits
        if not is_kept or (bits == 8 and bool((zeros != MIDDLE_OF_8).any())):
            return round_weight((values.float() - zeros[:, groups]) * scales[:, groups], bits)
        # Zero points are multiplied with scales as they are kept, so that the middle of most groups is exact.
        kept = scales.bfloat16()
        minimums = (-zeros * kept.float()).bfloat16()
        own = groups[::GROUP_SIZE]
        if bits == 8:
            return IntegerWeight(8, (values.to(torch.int16) - MIDDLE_OF_8).to(torch.int8), kept[:, own])
        return IntegerWeight(4, values, kept[:, own], minimums[:, own])

    def _integers(self, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
        """Unsigned values uint8 [rows, columns]; of each group the scale and zero point, float32 [rows, groups]."""
        if self.scheme.method == "compressed-tensors":
            return self._compressed_integers(piece)
        is_awq = self.scheme.method == "awq"
        rows, columns, (outputs, inputs) = piece.rows, piece.columns, piece.shape
        assert columns is not None
        per_word, num_groups = WORD_BITS // self.scheme.bits, self._num_groups(piece)
        words, first = _words(rows, per_word)
        if is_awq:
            packed = self._slice(piece, "qweight", (inputs, outputs // per_word), "I32")
            values = self._unpack(packed[columns.start : columns.stop, words], AWQ_ORDER)[
                :, first : first + len(rows)
            ].T
        else:
            held, skipped = _words(columns, per_word)
            packed = self._slice(piece, "qweight", (inputs // per_word, outputs), "I32")
            across = self._unpack(packed[held, rows.start : rows.stop].T.contiguous())
            values = across[:, skipped : skipped + len(columns)]
        scales = self._slice(piece, "scales", (num_groups, outputs), *SCALE_DTYPES)[:, rows.start : rows.stop].float()
        zeros = self._slice(piece, "qzeros", (num_groups, outputs // per_word), "I32")[:, words]
        # One more in each of a word's integers, with the carries of the subtraction that they were stored by.
        zeros = zeros + self.scheme.zero_point_shift * (ONES_OF_4 if self.scheme.bits == 4 else ONES_OF_8)
        unpacked = self._unpack(zeros, AWQ_ORDER if is_awq else None)[:, first : first + len(rows)].float()
        return values, scales.T.contiguous(), unpacked.T.contiguous()

    def _compressed_integers(self, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
        rows, columns, (outputs, inputs) = piece.rows, piece.columns, piece.shape
        assert columns is not None
        middle = 1 << (self.scheme.bits - 1)
        per_word, num_groups = WORD_BITS // self.scheme.bits, self._num_groups(piece)
        if is_packed := f"{_base(piece)}.weight_packed" in self.stored:
            held, skipped = _words(columns, per_word)
            packed = self._slice(piece, "weight_packed", (outputs, -(-inputs // per_word)), "I32")
            values = self._unpack(packed[rows.start : rows.stop, held])[:, skipped : skipped + len(columns)]
        else:
            signed = self._slice(piece, "weight", piece.shape, "I8")
            part: Tensor = signed[rows.start : rows.stop, columns.start : columns.stop]
            values = (part.to(torch.int16) + middle).to(torch.uint8)
        stored = self._slice(piece, "weight_scale", (outputs, num_groups), *SCALE_DTYPES)
        scales: Tensor = stored[rows.start : rows.stop].float()
        if not self.scheme.has_zero_points:
            return values, scales, torch.full_like(scales, middle)
        if is_packed:
            words, first = _words(rows, per_word)
            packed = self._slice(piece, "weight_zero_point", (-(-outputs // per_word), num_groups), "I32")[words]
            return values, scales, self._unpack(packed.T.contiguous()).T[first : first + len(rows)].float()
        zeros = self._slice(piece, "weight_zero_point", (outputs, num_groups), "I8")[rows.start : rows.stop]
        return values, scales, zeros.float() + middle

    def _floats(self, piece: Piece) -> Tensor:
        rows, columns, (outputs, inputs) = piece.rows, piece.columns, piece.shape
        assert columns is not None
        stored: Tensor = self._slice(piece, "weight", piece.shape, "F8_E4M3")[
            rows.start : rows.stop, columns.start : columns.stop
        ]
        weight = stored.float()
        is_inverse = f"{_base(piece)}.weight_scale_inv" in self.stored
        suffix = "weight_scale_inv" if is_inverse else "weight_scale"
        high, wide = self.scheme.block or (1, self.scheme.group_size or inputs)
        scales = self._tensor(piece, suffix)
        if scales.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ConfigError(f"model: tensor {f'{_base(piece)}.{suffix}'!r} is of {scales.dtype}; must be of floats")
        if scales.numel() == 1:
            return weight * scales.float().flatten()
        if tuple(scales.shape) != (-(-outputs // high), -(-inputs // wide)):
            raise ConfigError(f"model: the scales of {piece.name!r} have shape {tuple(scales.shape)}")
        of_rows = scales.float()[torch.arange(rows.start, rows.stop) // high]
        return weight * of_rows[:, torch.arange(columns.start, columns.stop) // wide]

    def _num_groups(self, piece: Piece) -> int:
        return -(-piece.shape[1] // (self.scheme.group_size or piece.shape[1]))

    def _groups(self, piece: Piece) -> Tensor:
        """The group of each of a piece's columns."""
        assert piece.columns is not None
        groups = torch.arange(piece.columns.start, piece.columns.stop) // (self.scheme.group_size or piece.shape[1])
        name = next((name for name in ("g_idx", "weight_g_idx") if f"{_base(piece)}.{name}" in self.stored), "g_idx")
        if self.scheme.is_in_order and f"{_base(piece)}.{name}" not in self.stored:
            return groups
        stored = self._slice(piece, name, (piece.shape[1],), "I32", "I64")
        told: Tensor = stored[piece.columns.start : piece.columns.stop].long()
        if self.scheme.is_in_order and not torch.equal(told, groups):
            raise ConfigError(f"model: the groups of {piece.name!r} are out of order; desc_act must say so")
        if bool(((told < 0) | (told >= self._num_groups(piece))).any()):
            raise ConfigError(
                f"model: {name} of {piece.name!r} names groups beyond the {self._num_groups(piece)} there are"
            )
        return told

    def _unpack(self, words: Tensor, order: tuple[int, ...] | None = None) -> Tensor:
        """The integers of words int32 [a, b], the lowest bits first, uint8 [a, b * integers per word]."""
        shifts = torch.arange(0, WORD_BITS, self.scheme.bits, dtype=torch.int32)
        if order is not None:
            shifts = shifts[list(order)]
        values = words.unsqueeze(-1) >> shifts & ((1 << self.scheme.bits) - 1)
        return values.to(torch.uint8).flatten(1)

    def _slice(self, piece: Piece, suffix: str, shape: tuple[int, ...], *dtypes: str) -> Any:
        """An open slice of one of a matrix's tensors; ``dtypes`` as safetensors calls them."""
        name = self._named(piece, suffix)
        found = self.stored[name].get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise ConfigError(
                f"model: tensor {name!r} has shape {tuple(found.get_shape())}; config.json asks for {shape}"
            )
        if found.get_dtype() not in dtypes:
            raise ConfigError(f"model: tensor {name!r} is of {found.get_dtype()}; must be of {' or '.join(dtypes)}")
        return found

    def _tensor(self, piece: Piece, suffix: str) -> Tensor:
        name = self._named(piece, suffix)
        return cast(Tensor, self.stored[name].get_tensor(name))

    def _named(self, piece: Piece, suffix: str) -> str:
        name = f"{_base(piece)}.{suffix}"
        if name not in self.stored:
            raise ConfigError(f"model: tensor {name!r} is missing")
        return name


def _base(piece: Piece) -> str:
    return piece.name.removesuffix(WEIGHT)


def _words(part: range, per_word: int) -> tuple[slice, int]:
    """The words that hold ``part``, and how many integers of the first come before it."""
    return slice(part.start // per_word, -(-part.stop // per_word)), part.start % per_word
