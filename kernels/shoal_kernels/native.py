"""The native CPU decoder: a whole step in one call to C++ (``csrc``), with its own weights, KV pages and threads.

Optional: if the library was not built, or does not support a shape, the torch operators serve.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Generator, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal_kernels import native_library, native_rows
from shoal_kernels.draws import Draw, LogProbabilities
from shoal_kernels.exchange import Exchange, LostRank
from shoal_kernels.integers import IntegerWeight
from shoal_kernels.native_buffers import KeptArray, Results, RowMaxima
from shoal_kernels.native_library import LOST_RANK, CStep, last_error, library
from shoal_kernels.native_parameters import VECTORS, place_of, product_size, required
from shoal_kernels.native_shape import DecoderShape, c_shape

NO_ADAPTER = -1

FULL_ROTARY, WINDOW_ROTARY, UNROTATED = range(3)


def is_available() -> bool:
    """Whether the library was built with this installation."""
    return native_library.is_built()


class NativeDecoder:
    """Embedding, layers, final norm and head, over weights that it packs and KV blocks that it owns.

    A token's result depends neither on other sequences in its step nor on the number of threads; where its own prompt
    is cut into steps, it may differ in the last bits. Not thread-safe. For a shard, all ranks must make the same calls;
    ``exchange`` sums their partial products.

    Args:
        weights: parameters with their names (``embed_tokens.weight``, ``layers.{i}.qkv_proj.weight``, …), of the
            shape's dtype, norms also float32; repacked one by one. Matrices may be integers if that dtype is bfloat16.
        cos_sin: float32 [max_positions, head_size]: cosines, then sines.
        window_cos_sin: the same for layers with the window; None if they are rotated like the others.
        kernels: one of ``native_library.supported_kernels()``, or "" for the best.
        exchange: connects the ranks that share each layer; None if there is only one.

    Raises:
        ValueError: the shape is not supported, this machine does not support the instruction set, or a parameter is
            missing or of the wrong size.
    """

    def __init__(
        self,
        shape: DecoderShape,
        weights: Iterable[tuple[str, Tensor | IntegerWeight]],
        cos_sin: Tensor,
        kernels: str = "",
        window_cos_sin: Tensor | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self.shape = shape
        self._step = CStep()
        self._step_address = ctypes.addressof(self._step)
        self._forward = library().shoal_decoder_step
        self._seq_lens = KeptArray(np.int32)
        self._inputs: tuple[object, ...] = ()  # keeps the last step's inputs alive, which are read in place
        self._results = Results(0, shape.vocab_size)
        self._leaves_out = False  # whether the last step left out its logits
        self._exchange = exchange
        peers = ctypes.byref(exchange.native) if exchange is not None else None
        self._process = os.getpid()
        self._handle: int | None = library().shoal_decoder_create(ctypes.byref(c_shape(shape, kernels)), peers)
        if not self._handle:
            raise ValueError(last_error())
        missing = required(shape)
        for name, parameter in weights:
            if (place := place_of(shape, name)) is not None:
                if name == "norm.weight" and self.shape.logits_divisor != 1.0:
                    assert isinstance(parameter, Tensor)
                    parameter = parameter.float() / self.shape.logits_divisor
                self._set(*place, parameter)
                missing.discard(name)
        if missing:
            raise ValueError(f"weights: {min(missing)!r} is missing")
        self._set_rotary(cos_sin, window_cos_sin)

    @property
    def kernels(self) -> str:
        """The instruction set in use."""
        return str(library().shoal_decoder_kernels(self._open()).decode())

    @property
    def progress(self) -> int:
        """A number that changes as a step progresses. Another thread may read it, until ``close``."""
        return int(library().shoal_decoder_progress(self._open()))

    def forward(
        self,
        *,
        input_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        query_start_loc: Sequence[int] | NDArray[np.int32],
        seq_lens: Sequence[int] | NDArray[np.int32],
        block_tables: NDArray[np.int32],
        slot_mapping: NDArray[np.int64],
        sample_rows: Sequence[int] | NDArray[np.int64],
        hidden: Tensor | None = None,
        wants_logits: bool = True,
        wants_maxima_alone: bool = False,
        adapters: Sequence[int] | None = None,
    ) -> Tensor:
        """Compute a step's tokens, write their KV, and compute the logits of ``sample_rows``.

        Args: see ``AttentionMetadata``; ``input_ids``, ``positions``, ``slot_mapping`` [num_tokens], ``block_tables``
            [num_seqs, max_blocks].
            hidden: float32 [num_tokens, hidden_size], the activations passed between stages: read on all stages but
                the first, then written on all but the last.
            wants_logits: whether this rank of the last stage receives the logits.
            wants_maxima_alone: leave out the logits; ``maxima`` are then found without them where that is faster.
            adapters: each sequence's slot, as ``add_adapter`` returned it, or NO_ADAPTER. It pays to have sequences of
                the same adapter next to one another.

        Returns:
            float32 [num_samples, vocab_size], overwritten by the next call, because new pages for megabytes of logits
            would cost more than filling them. [0, vocab_size] if the logits are not wanted or left out, or if the
            stage is not the last.

        Raises:
            LostRank: another rank did not take part in an exchange. If a function carries the exchange, what it raised
                is raised instead.
            ValueError: a token, position, slot, block, row or adapter does not exist, or lengths contradict each other;
                nothing was computed.
        """
        if not (self.shape.is_first_stage and self.shape.is_last_stage):
            _check_hidden(hidden, len(input_ids), self.shape.hidden_size)
        counts = {"positions": len(positions), "slot_mapping": len(slot_mapping)}
        if wrong := [name for name, count in counts.items() if count != len(input_ids)]:
            raise ValueError(f"{wrong[0]}: has {counts[wrong[0]]} elements; must have {len(input_ids)}, as input_ids")
        if not len(seq_lens) == len(query_start_loc) - 1 == len(block_tables):
            raise ValueError(f"query_start_loc, block_tables: must be of {len(seq_lens)} sequences, as seq_lens")
        if adapters is not None and len(adapters) != len(seq_lens):
            raise ValueError(f"adapters: has {len(adapters)} elements; must have {len(seq_lens)}, as seq_lens")
        step = self._step
        step.num_tokens, step.num_seqs, step.num_samples = len(input_ids), len(seq_lens), len(sample_rows)
        longs = [np.ascontiguousarray(x, np.int64) for x in (input_ids, positions, slot_mapping, sample_rows)]
        ints = [np.ascontiguousarray(x, np.int32) for x in (query_start_loc, block_tables)]
        step.input_ids, step.positions, step.slots, step.sample_rows = (x.ctypes.data for x in longs)
        step.query_start_loc, step.block_tables = (x.ctypes.data for x in ints)
        step.table_stride = block_tables.shape[-1]
        num_logits = len(sample_rows) if wants_logits and self.shape.is_last_stage else 0
        results = self._results = self._results.of(num_logits)
        self._leaves_out = wants_maxima_alone and self._exchange is None
        step.logits = results.addresses[0] if num_logits else None
        step.maxima_alone = self._leaves_out
        step.hidden = hidden.data_ptr() if hidden is not None else None
        slots = None if adapters is None else np.ascontiguousarray(adapters, np.int32)
        step.adapters = None if slots is None else slots.ctypes.data
        self._inputs = (*longs, *ints, hidden, slots)
        return self.forward_again(seq_lens)

    def forward_again(self, seq_lens: Sequence[int] | NDArray[np.int32]) -> Tensor:
        """Run the last step again with the present contents of its arrays and these sequence lengths; a step must have
        run. Arrays that ``forward`` had to convert (other dtype, or not contiguous) keep their old contents.

        Returns, raises: as ``forward``.
        """
        results = self._results
        self._step.seq_lens = self._seq_lens.put(seq_lens)
        status = self._forward(self._open(), self._step_address, *results.addresses[1:])
        if status == LOST_RANK:
            assert self._exchange is not None
            raise self._exchange.failure or LostRank(last_error())
        self._check(status)
        return results.logits[:0] if self._leaves_out else results.logits

    @property
    def maxima(self) -> RowMaxima:
        """The maxima of the rows of the last logits, whether these were returned or left out."""
        return self._results.maxima

    def draw(self, logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[int]:
        """``ops.draw`` of contiguous float32 rows, by the decoder's threads."""
        return native_rows.draw(logits, rows, draws, self._open())

    def log_probabilities(
        self, logits: Tensor, rows: Sequence[int], token_ids: Sequence[int], counts: Sequence[int]
    ) -> list[LogProbabilities]:
        """``ops.log_probabilities`` of contiguous float32 rows, by the decoder's threads."""
        return native_rows.log_probabilities(logits, rows, token_ids, counts, self._open())

    def add_adapter(self, pairs: Iterable[tuple[str, tuple[Tensor, Tensor]]]) -> Generator[None, None, int]:
        """Add a low-rank adapter (LoRA), a product each time that an item is taken; no step may name it before the end.
        To the product of ``layers.{i}.qkv_proj`` and the like, y = x W^T, it adds (x down^T) up^T.

        Args:
            pairs: names, and (down [rank, in_size], up [out_size, rank]) of the shape's dtype; repacked one by one.

        Returns:
            its slot, by which steps name it.

        Raises:
            ValueError: a product cannot be adapted, or a factor is not of its size.
        """
        slot = int(library().shoal_decoder_add_adapter(self._open()))
        self._check(min(slot, 0))
        try:
            for name, (down, up) in pairs:
                self._set_factors(slot, name, down, up)
                yield
        except BaseException:
            self.remove_adapter(slot)
            raise
        return slot

    def remove_adapter(self, slot: int) -> None:
        """Free an adapter. Its slot may be that of the next one. Raises ValueError: there is none."""
        self._check(library().shoal_decoder_remove_adapter(self._open(), slot))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks; ``pairs`` are (source, destination), and every source is read as it was before the call.

        Raises:
            ValueError: a block does not exist.
        """
        flat = self._blocks(pairs).reshape(-1, 2)
        self._check(library().shoal_decoder_copy_blocks(self._open(), flat.ctypes.data, len(flat)))

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's keys and values in all layers."""
        return int(library().shoal_decoder_block_bytes(self._open()))

    def read_blocks(self, block_ids: Sequence[int]) -> memoryview:
        """The contents of blocks, ``block_bytes`` for each, which a decoder of the same shape and ``kernels`` can hold.

        Raises:
            ValueError: a block does not exist.
        """
        ids, contents = self._blocks(block_ids), np.empty(len(block_ids) * self.block_bytes, np.uint8)
        library().shoal_decoder_read_blocks(self._open(), ids.ctypes.data, len(ids), contents.ctypes.data)
        return contents.data

    def write_blocks(self, block_ids: Sequence[int], contents: memoryview) -> None:
        """Fill blocks, all different, with what ``read_blocks`` has returned for as many.

        Raises:
            ValueError: a block does not exist, or there are contents for more or fewer; nothing was changed.
        """
        ids, held = self._blocks(block_ids), np.frombuffer(contents, np.uint8)
        if held.size != len(ids) * self.block_bytes:
            raise ValueError(f"write_blocks: got {held.size} bytes; must be {len(ids)} times {self.block_bytes}")
        library().shoal_decoder_write_blocks(self._open(), ids.ctypes.data, len(ids), held.ctypes.data)

    def close(self) -> None:
        """Free weights, KV blocks and threads. No call may follow except another ``close``."""
        if self._handle:
            if self._process == os.getpid():  # its threads are not in a forked one, and would be waited for
                library().shoal_decoder_destroy(self._handle)
            self._handle = None

    def __del__(self) -> None:
        # If the constructor raised, there may be no handle; and when Python ends, memory goes anyway, modules first.
        if getattr(self, "_handle", None) and not sys.is_finalizing():
            self.close()

    def _blocks(self, numbers: Sequence[int] | Sequence[tuple[int, int]]) -> NDArray[np.int64]:
        """Raises ValueError if a block does not exist."""
        ids = np.ascontiguousarray(numbers, np.int64)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.shape.num_blocks):
            raise ValueError(f"got a block beyond the pool of {self.shape.num_blocks}")
        return ids

    def _open(self) -> int:
        if not self._handle:
            raise RuntimeError("the decoder is closed")
        return self._handle

    def _set(self, number: int, layer: int, parameter: Tensor | IntegerWeight) -> None:
        if isinstance(parameter, IntegerWeight):
            self._set_integers(number, layer, parameter)
            return
        if number in VECTORS:
            parameter = parameter.float()
        elif parameter.dtype != self.shape.dtype:
            raise ValueError(f"weights: got {parameter.dtype}; must be {self.shape.dtype}")
        held = parameter.contiguous()
        self._check(library().shoal_decoder_set(self._handle, number, layer, held.data_ptr(), held.numel()))

    def _set_rotary(self, cos_sin: Tensor, window_cos_sin: Tensor | None) -> None:
        shape = self.shape
        for number, table in ((FULL_ROTARY, cos_sin), (WINDOW_ROTARY, window_cos_sin)):
            if table is None:
                continue
            if table.shape != (shape.max_positions, shape.head_size):
                raise ValueError(f"cos_sin: got shape {tuple(table.shape)}")
            held = table.float().contiguous()
            self._check(library().shoal_decoder_set_rotary(self._handle, number, held.data_ptr()))
        for layer in range(shape.first_layer, shape.first_layer + shape.num_layers):
            has_window = shape.sliding_window is not None and layer not in shape.full_layers
            rotary = WINDOW_ROTARY if has_window and window_cos_sin is not None else FULL_ROTARY
            rotary = UNROTATED if layer in shape.unrotated_layers else rotary
            number = layer - shape.first_layer
            self._check(library().shoal_decoder_set_layer(self._handle, number, has_window, rotary))

    def _set_factors(self, slot: int, name: str, down: Tensor, up: Tensor) -> None:
        number, layer = place_of(self.shape, f"{name}.weight") or (-1, 0)
        sides, rank = [side.contiguous() for side in (down, up)], len(down)
        size = product_size(self.shape, name)
        if (down.shape, up.shape) != ((rank, size[1]), (size[0], rank)):
            raise ValueError(f"{name}: got {tuple(down.shape)} and {tuple(up.shape)}; must be {size} in rank {rank}")
        if any(side.dtype != self.shape.dtype for side in sides):
            raise ValueError(f"{name}: got {down.dtype} and {up.dtype}; must be {self.shape.dtype}")
        addresses = [side.data_ptr() for side in sides]
        self._check(library().shoal_decoder_set_factors(self._handle, slot, number, layer, rank, *addresses))

    def _set_integers(self, number: int, layer: int, weight: IntegerWeight) -> None:
        weight.check()
        parts = [part.contiguous() for part in (weight.values, weight.scales, weight.minimums) if part is not None]
        pointers = [part.data_ptr() for part in parts] + [None] * (3 - len(parts))
        self._check(
            library().shoal_decoder_set_integers(
                self._handle, number, layer, weight.bits, weight.activation_bits, *pointers, weight.values.numel()
            )
        )

    def _check(self, status: int) -> None:
        if status != 0:
            raise ValueError(last_error())


def _check_hidden(hidden: Tensor | None, num_tokens: int, size: int) -> None:
    if hidden is None or hidden.dtype != torch.float32 or hidden.shape != (num_tokens, size):
        raise ValueError(f"hidden: must be float32 [{num_tokens}, {size}]")
    if not hidden.is_contiguous():
        raise ValueError("hidden: must be contiguous")
