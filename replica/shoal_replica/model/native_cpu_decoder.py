"""A decoder on the native CPU kernels."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from shoal_kernels import native
from shoal_kernels.draws import RowOperators
from shoal_kernels.exchange import LostRank
from shoal_kernels.native_buffers import RowMaxima
from shoal_kernels.native_shape import DecoderShape, ExpertShape
from shoal_replica.adapter import AdapterConfig
from shoal_replica.config import CacheConfig, ParallelConfig
from shoal_replica.memory_plan import EXCHANGE_BYTES
from shoal_replica.model.lora import read_adapter
from shoal_replica.model.parallel_group import ParallelGroup, SoleRank
from shoal_replica.model.quantization import quantize
from shoal_replica.model.rotary import rotary_caches
from shoal_replica.model.sequence_table import StepArrays
from shoal_replica.model.weights import DTYPES, stream_weights
from shoal_replica.model_config import ModelConfig
from shoal_replica.ranks.runner import CollectiveError
from shoal_replica.shard import Shard, whole_shard


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

    def load_adapter(self, adapter: AdapterConfig) -> Generator[None]:
        pairs = read_adapter(adapter, self._model, self._shard, torch.device("cpu"))
        self._slots[adapter.name] = yield from self._native.add_adapter(pairs)

    def unload_adapter(self, name: str) -> None:
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

    @property
    def block_layout(self) -> str:
        shape = self._native.shape
        layers = f"layers {shape.first_layer} to {shape.first_layer + shape.num_layers - 1}"
        sizes = f"{shape.num_kv_heads} x {shape.block_size} x {shape.head_size}"
        return f"native {self.kernels} {self._model.dtype}, {layers}, {sizes}"

    @property
    def copies_beside_steps(self) -> bool:
        return True

    def read_blocks(self, block_ids: Sequence[int]) -> memoryview:
        return self._native.read_blocks(block_ids)

    def write_blocks(self, block_ids: Sequence[int], contents: memoryview) -> None:
        self._native.write_blocks(block_ids, contents)

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
        scores=moe.scores,
        scale=moe.scale,
        shared_size=len(shard.shared_mlp),
    )
