"""The model with its weights and KV blocks, as the runner sees it: on torch operators or the native CPU kernels."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal_kernels import native, ops
from shoal_kernels.draws import RowOperators
from shoal_kernels.exchange import LostRank
from shoal_kernels.metadata import AttentionMetadata
from shoal_kernels.native_buffers import RowMaxima
from shoal_kernels.native_shape import DecoderShape, ExpertShape
from shoal_replica.adapter import AdapterConfig
from shoal_replica.config import CacheConfig, ModelConfig, ParallelConfig
from shoal_replica.memory_plan import EXCHANGE_BYTES
from shoal_replica.model.cpu_kernels import choose_kernels
from shoal_replica.model.llama import LlamaDecoder
from shoal_replica.model.lora import LoraPair, load_adapter, step_adapters
from shoal_replica.model.npu_memory import open_device
from shoal_replica.model.parallel_group import ParallelGroup, SoleRank
from shoal_replica.model.quantization import quantize, widen
from shoal_replica.model.rotary import rotary_caches
from shoal_replica.model.sequence_table import StepArrays
from shoal_replica.model.weights import DTYPES, stream_weights
from shoal_replica.ranks.runner import CollectiveError
from shoal_replica.shard import Shard, whole_shard

logger = logging.getLogger(__name__)


class Decoder(Protocol):
    """Computes steps over its own KV blocks: the cache's ``num_blocks``, and ``num_host_blocks`` rows in host memory.

    With several ranks, each computes its shard of every step; the rank that samples has the complete logits.
    """

    @property
    def progress(self) -> int:
        """A number that changes as a step progresses. Another thread may read it, until ``close``."""
        ...

    def compute(self, step: StepArrays, sample_rows: Sequence[int], wants_maxima_alone: bool = False) -> Tensor:
        """Write the KV of a step's tokens. Returns float32 logits [len(sample_rows), vocab_size], valid until the next
        call.

        Ranks that do not sample may return none, and so may one that has ``maxima`` if only these are wanted.

        Raises:
            CollectiveError: another rank did not take part.
        """
        ...

    @property
    def maxima(self) -> RowMaxima | None:
        """The maxima of the rows of the last ``compute``; None if the sampler has to find them."""
        ...

    @property
    def row_operators(self) -> RowOperators:
        """Operators on the logits that ``compute`` returns, by the threads that computed them."""
        ...

    def load(self, adapter: AdapterConfig) -> None:
        """Load an adapter, which steps then name.

        Raises:
            ConfigError: from ``load_adapter``.
        """
        ...

    def unload(self, name: str) -> None:
        """Free an adapter, which no later step names."""
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks; ``pairs`` are (source, destination), and every source is read as it was before the call."""
        ...

    def move_out(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to rows, pairs of (block, row). The blocks may be overwritten as soon as it returns."""
        ...

    def move_in(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy rows to blocks, pairs of (row, block)."""
        ...

    def close(self) -> None:
        """Release weights and KV blocks. No call may follow."""
        ...


def make_decoder(
    model: ModelConfig,
    cache: CacheConfig,
    parallel: ParallelConfig,
    shard: Shard | None = None,
    group: ParallelGroup | None = None,
) -> Decoder:
    """The decoder for the device: on an NPU its own; on a CPU the native kernels if they were built and support the
    model, else torch.

    Args:
        shard, group: what this rank holds and how it reaches the others; None means the whole model on one rank.

    Raises:
        NotFound, ConfigError: from ``stream_weights``.
    """
    if parallel.device == "npu":
        open_device()  # raises a clear error if torch_npu is missing
        from shoal_replica.model.npu_decoder import NpuDecoder

        return NpuDecoder(model, cache, parallel, shard, group)
    shard, group = shard or whole_shard(model), group or SoleRank()
    kernels = choose_kernels(model, cache, parallel)
    if group.all_agree(kernels.is_native):
        decoder = NativeCpuDecoder(model, cache, parallel, shard, group)
        logger.info("the native %s kernels serve", decoder.kernels)
        return decoder
    why = kernels.why_torch or "another rank has no native kernels"
    logger.warning("torch's operators serve, which are slower: %s", why)
    return TorchDecoder(model, cache, parallel, shard, group)


class TorchDecoder:
    """``LlamaDecoder`` on a CPU over zeroed blocks, [layers, 2, blocks, kv_heads, block_size, head_size] in one tensor.
    A CPU's memory is the host's, so the host rows are simply the last of these blocks.
    """

    def __init__(
        self,
        model: ModelConfig,
        cache: CacheConfig,
        parallel: ParallelConfig,
        shard: Shard | None = None,
        group: ParallelGroup | None = None,
    ) -> None:
        self._shard = shard = shard or whole_shard(model)
        self._device = torch.device(parallel.device)
        self._adapters: dict[str, dict[str, LoraPair]] = {}
        dtype = DTYPES[model.dtype]
        weights = widen(quantize(model, stream_weights(model, self._device, shard)), dtype)
        self._model = LlamaDecoder(model, dict(weights), shard, group)
        num_heads = len(shard.kv_heads)
        self._first_row = cache.num_blocks
        num_blocks = cache.num_blocks + cache.num_host_blocks
        shape = (len(shard.layers), 2, num_blocks, num_heads, cache.block_size, model.head_size)
        whole = torch.zeros(shape, dtype=dtype, device=self._device)
        self._caches = [(layer[0], layer[1]) for layer in whole]

    @property
    def progress(self) -> int:
        return self._model.num_layers_begun

    @property
    def maxima(self) -> None:
        return None

    @property
    def row_operators(self) -> RowOperators:
        return ops

    def load(self, adapter: AdapterConfig) -> None:
        self._adapters[adapter.name] = dict(load_adapter(adapter, self._model.config, self._shard, self._device))

    def unload(self, name: str) -> None:
        del self._adapters[name]

    def compute(self, step: StepArrays, sample_rows: Sequence[int], wants_maxima_alone: bool = False) -> Tensor:
        metadata = AttentionMetadata(
            query_start_loc=step.query_start_loc,
            seq_lens=step.seq_lens,
            block_tables=torch.from_numpy(step.block_tables).to(self._device),
            slot_mapping=torch.from_numpy(step.slot_mapping).to(self._device),
        )
        return self._model(
            torch.from_numpy(step.input_ids).to(self._device),
            torch.from_numpy(step.positions).to(self._device),
            self._caches,
            metadata,
            torch.tensor(sample_rows, dtype=torch.int64, device=self._device),
            step_adapters(step.adapters or (), step.query_start_loc, self._adapters),
        )

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for keys, values in self._caches:
            ops.copy_blocks(keys, values, pairs)

    def move_out(self, moves: Sequence[tuple[int, int]]) -> None:
        self.copy_blocks([(block, self._first_row + row) for block, row in moves])

    def move_in(self, moves: Sequence[tuple[int, int]]) -> None:
        self.copy_blocks([(self._first_row + row, block) for row, block in moves])

    def close(self) -> None:
        self._caches = []


class NativeCpuDecoder:
    """``shoal_kernels.native``: a step is one call, within which the ranks sum their partial products. Host rows are
    as in ``TorchDecoder``.
    """

    def __init__(
        self,
        model: ModelConfig,
        cache: CacheConfig,
        parallel: ParallelConfig,
        shard: Shard | None = None,
        group: ParallelGroup | None = None,
    ) -> None:
        cpu = torch.device("cpu")
        self._shard = shard = shard or whole_shard(model)
        self._group = group = group or SoleRank()
        self._model = model
        self._first_row = cache.num_blocks
        cos_sin, window_cos_sin = rotary_caches(model, torch.float32, cpu)
        exchange = group.exchange(max(EXCHANGE_BYTES // 4, model.hidden_size, shard.vocab_share))
        self._native = native.NativeDecoder(
            _native_shape(model, cache, parallel, shard),
            quantize(model, stream_weights(model, cpu, shard, lends_file=True)),
            cos_sin,
            window_cos_sin=None if window_cos_sin is cos_sin else window_cos_sin,
            exchange=exchange,
        )
        self._last: tuple[StepArrays | None, Sequence[int], bool] = None, (), False
        self._slots = {"": native.NO_ADAPTER}
        # What is left for torch is small, and its threads would go on spinning on the cores of the next step.
        torch.set_num_threads(1)

    @property
    def kernels(self) -> str:
        """The instruction set in use."""
        return self._native.kernels

    @property
    def progress(self) -> int:
        return self._native.progress

    @property
    def maxima(self) -> RowMaxima:
        return self._native.maxima

    @property
    def row_operators(self) -> RowOperators:
        return self._native

    def load(self, adapter: AdapterConfig) -> None:
        pairs = load_adapter(adapter, self._model, self._shard, torch.device("cpu"))
        self._slots[adapter.name] = self._native.add_adapter(pairs)

    def unload(self, name: str) -> None:
        self._last = None, (), False  # another may get its slot
        self._native.remove_adapter(self._slots.pop(name))

    def compute(self, step: StepArrays, sample_rows: Sequence[int], wants_maxima_alone: bool = False) -> Tensor:
        hidden: Tensor | None = None
        if self._shard.num_stages > 1:
            hidden = torch.empty(len(step.input_ids), self._model.hidden_size)
            if not self._shard.is_first_stage:
                self._group.receive_from_previous_stage(hidden)
        try:
            if step is self._last[0] and (sample_rows, wants_maxima_alone) == self._last[1:] and hidden is None:
                return self._native.forward_again(step.seq_lens)
            self._last = None, (), False  # a step that fails must not be continued
            logits = self._native.forward(
                input_ids=step.input_ids,
                positions=step.positions,
                query_start_loc=step.query_start_loc,
                seq_lens=step.seq_lens,
                block_tables=step.block_tables,
                slot_mapping=step.slot_mapping,
                sample_rows=sample_rows,
                hidden=hidden,
                wants_logits=self._shard.samples,
                wants_maxima_alone=wants_maxima_alone,
                adapters=None if step.adapters is None else [self._slots[name] for name in step.adapters],
            )
            self._last = step, sample_rows, wants_maxima_alone
        except LostRank as error:
            raise CollectiveError(f"lost another rank: {error}") from error
        if hidden is not None and not self._shard.is_last_stage:
            self._group.send_to_next_stage(hidden)
        return logits

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._native.copy_blocks(pairs)

    def move_out(self, moves: Sequence[tuple[int, int]]) -> None:
        self.copy_blocks([(block, self._first_row + row) for block, row in moves])

    def move_in(self, moves: Sequence[tuple[int, int]]) -> None:
        self.copy_blocks([(self._first_row + row, block) for row, block in moves])

    def close(self) -> None:
        self._native.close()


def _native_shape(model: ModelConfig, cache: CacheConfig, parallel: ParallelConfig, shard: Shard) -> DecoderShape:
    return DecoderShape(
        dtype=DTYPES[model.dtype],
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=len(shard.mlp),
        num_layers=len(shard.layers),
        num_heads=len(shard.heads),
        num_kv_heads=len(shard.kv_heads),
        head_size=model.head_size,
        rms_norm_eps=model.rms_norm_eps,
        tied_embeddings=model.tie_word_embeddings,
        sliding_window=model.sliding_window,
        max_positions=model.max_model_len,
        block_size=cache.block_size,
        num_blocks=cache.num_blocks + cache.num_host_blocks,
        num_threads=parallel.num_threads,
        first_layer=shard.layers.start,
        unrotated_layers=model.unrotated_layers,
        full_layers=model.full_layers,
        norm_placement=model.norm_placement,
        norms_span_heads=model.qk_norm_spans_heads,
        activation=model.activation,
        embedding_scale=model.embedding_scale,
        attention_scale=model.attention_scale,
        logits_divisor=model.logits_divisor,
        experts=_experts(model, shard),
        vocab=shard.vocab,
        is_first_stage=shard.is_first_stage,
        is_last_stage=shard.is_last_stage,
    )


def _experts(model: ModelConfig, shard: Shard) -> ExpertShape | None:
    moe = model.moe
    if moe is None:
        return None
    return ExpertShape(
        num_experts=moe.num_experts,
        num_experts_per_token=moe.num_experts_per_token,
        size=moe.intermediate_size,
        renormalize=moe.renormalize,
        layers=moe.layers,
        held=shard.experts,
    )
