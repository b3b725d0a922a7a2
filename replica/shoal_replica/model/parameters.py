"""A decoder's packed parameters, and the pieces of stored tensors that fill them on a rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shoal_replica.model_config import ModelConfig
from shoal_replica.moe_config import MoeConfig
from shoal_replica.shard import Shard

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"

# The norms of a layer by their placement: packed and stored names, the latter by transformers' order of layers.
NORMS: dict[str, dict[str, str]] = {
    "pre": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "post": {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
    "both": {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
}


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows and, unless it is a vector, columns of a stored tensor of the given shape. If it has three dimensions, rows
    are those of all its matrices, one after the other, and whole matrices are taken.
    """

    name: str
    shape: tuple[int, ...]
    rows: range
    columns: range | None


@dataclass(frozen=True, slots=True)
class Parameter:
    """A packed parameter: pieces with the same number of columns, stacked on top of each other. With ``adds_one``, 1 is
    added to each value. With either flag it is kept in float32.
    """

    name: str
    pieces: tuple[Piece, ...]
    adds_one: bool = False
    is_exact: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        num_rows = sum(len(piece.rows) for piece in self.pieces)
        columns = self.pieces[0].columns
        return (num_rows,) if columns is None else (num_rows, len(columns))


@dataclass(frozen=True, slots=True)
class _Linear:
    """A stored projection [out_size, in_size] and a rank's part of it: ``rows`` of a column-parallel projection, in the
    order in which they are packed, or ``columns`` of a row-parallel one, whose bias is added on one rank only."""

    stored: str
    out_size: int
    in_size: int
    rows: tuple[range, ...]
    columns: range

    def weight(self) -> Iterator[Piece]:
        return (Piece(f"{self.stored}.weight", (self.out_size, self.in_size), rows, self.columns) for rows in self.rows)

    def bias(self) -> Iterator[Piece]:
        return (Piece(f"{self.stored}.bias", (self.out_size,), rows, None) for rows in self.rows)


def parameters(config: ModelConfig, shard: Shard) -> Iterator[Parameter]:
    """Every packed parameter of a rank; those of layer i are named ``layers.{i}.…``."""
    tied = config.tie_word_embeddings
    if shard.is_first_stage or (tied and shard.is_last_stage):
        yield _table(EMBEDDING, "model.embed_tokens.weight", config, shard)
    for layer in shard.layers:
        yield from _attention(config, shard, layer)
        if config.moe is not None and layer in config.moe.layers:
            yield from _experts(config, shard, layer)
        else:
            yield from _mlp(config, shard, layer)
    if shard.is_last_stage:
        yield _norm("norm.weight", "model.norm.weight", config.hidden_size, config)
        if not tied:
            yield _table(HEAD, HEAD, config, shard)


def _attention(config: ModelConfig, shard: Shard, layer: int) -> Iterator[Parameter]:
    hidden, head = config.hidden_size, config.head_size
    prefix, stored = f"layers.{layer}.", f"model.layers.{layer}."
    for norm, stored_norm in NORMS[config.norm_placement].items():
        yield _norm(f"{prefix}{norm}.weight", f"{stored}{stored_norm}.weight", hidden, config)
    if config.qk_norm:
        for norm, num_heads in (("q_norm", config.num_heads), ("k_norm", config.num_kv_heads)):
            normed = range(num_heads if config.qk_norm_spans_heads else 1)
            yield _head_norm(f"{prefix}{norm}.weight", f"{stored}self_attn.{norm}.weight", normed, config)
    num_q, num_kv = config.num_heads * head, config.num_kv_heads * head
    query, everything = range(shard.heads.start * head, shard.heads.stop * head), range(hidden)
    if config.has_packed_projections:
        first_key, first_value, num_rows = num_q, num_q + num_kv, num_q + 2 * num_kv
        rows = (
            *_rotated_rows(config, shard.heads, 0),
            *_rotated_rows(config, shard.kv_heads, first_key),
            *_head_rows(config, shard.kv_heads, first_value),
        )
        projections: tuple[_Linear, ...] = (_Linear(f"{stored}self_attn.qkv_proj", num_rows, hidden, rows, everything),)
    else:
        keys, values = _rotated_rows(config, shard.kv_heads), _head_rows(config, shard.kv_heads)
        projections = (
            _Linear(f"{stored}self_attn.q_proj", num_q, hidden, _rotated_rows(config, shard.heads), everything),
            _Linear(f"{stored}self_attn.k_proj", num_kv, hidden, keys, everything),
            _Linear(f"{stored}self_attn.v_proj", num_kv, hidden, values, everything),
        )
    yield from _packed(f"{prefix}qkv_proj", projections, config.qkv_bias)
    out = _Linear(f"{stored}self_attn.o_proj", hidden, num_q, (everything,), query)
    yield from _packed(f"{prefix}o_proj", (out,), config.output_bias and shard.tensor_rank == 0)


def _head_rows(config: ModelConfig, heads: range, first: int = 0) -> tuple[range, ...]:
    """The rows of ``heads`` in a projection whose heads begin at row ``first``."""
    return (range(first + heads.start * config.head_size, first + heads.stop * config.head_size),)


def _rotated_rows(config: ModelConfig, heads: range, first: int = 0) -> tuple[range, ...]:
    """The same of queries or keys, in the order in which they are rotated: number i of a head together with number
    head_size / 2 + i. Where only the first ``rotary_size`` are rotated, which checkpoints have paired among themselves,
    the rest goes between their halves, and behind them. Products of queries and keys are the same in any order.
    """
    if config.rotary_size is None:
        return _head_rows(config, heads, first)
    half, end = config.rotary_size // 2, config.rotary_size
    middle = (end + config.head_size) // 2
    parts = (range(half), range(end, middle), range(half, end), range(middle, config.head_size))
    starts = [first + head * config.head_size for head in heads]
    return tuple(range(start + part.start, start + part.stop) for start in starts for part in parts)


def _mlp(config: ModelConfig, shard: Shard, layer: int) -> Iterator[Parameter]:
    prefix, stored = f"layers.{layer}.", f"model.layers.{layer}.mlp."
    names = ("gate_up_proj", "down_proj") if config.has_packed_projections else ("gate_proj", "up_proj", "down_proj")
    gate_up, down = _gated(config.hidden_size, config.intermediate_size, shard.mlp, stored, names)
    yield from _packed(f"{prefix}gate_up_proj", gate_up, config.mlp_bias)
    yield from _packed(f"{prefix}down_proj", (down,), config.mlp_bias and shard.tensor_rank == 0)


def _gated(
    hidden: int, inner: int, columns: range, stored: str, names: tuple[str, ...]
) -> tuple[tuple[_Linear, ...], _Linear]:
    """The projections of a gated MLP of ``inner`` columns, of which a rank has some: gate and up, under one name or
    two, and down, the last one.
    """
    *first, last = names
    if len(first) == 1:
        rows = (columns, range(inner + columns.start, inner + columns.stop))
        gate_up: tuple[_Linear, ...] = (_Linear(f"{stored}{first[0]}", 2 * inner, hidden, rows, range(hidden)),)
    else:
        gate_up = tuple(_Linear(f"{stored}{name}", inner, hidden, (columns,), range(hidden)) for name in first)
    return gate_up, _Linear(f"{stored}{last}", hidden, inner, (range(hidden),), columns)


def _experts(config: ModelConfig, shard: Shard, layer: int) -> Iterator[Parameter]:
    """The whole router, and the MLP for all tokens; then of this rank's experts all gate and up projections, expert by
    expert, then all downs.
    """
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    prefix, stored = f"layers.{layer}.", f"model.layers.{layer}.{moe.stored_in}."
    inner = moe.intermediate_size
    router = _Linear(f"{stored}{moe.router}", moe.num_experts, hidden, (range(moe.num_experts),), range(hidden))
    yield from _packed(f"{prefix}router", (router,), False)
    if moe.router_bias:
        piece = Piece(f"{stored}{moe.router_bias}", (moe.num_experts,), range(moe.num_experts), None)
        yield Parameter(f"{prefix}router.bias", (piece,), is_exact=True)
    if moe.shared_size:
        shared = f"model.layers.{layer}.{moe.shared_in}."
        gate_up, one_down = _gated(hidden, moe.shared_size, shard.shared_mlp, shared, moe.shared_projections)
        yield from _packed(f"{prefix}shared_mlp.gate_up_proj", gate_up, False)
        yield from _packed(f"{prefix}shared_mlp.down_proj", (one_down,), False)
    if moe.stacked is not None:
        gate_up_name, down_name = moe.stacked
        yield _matrices(f"{prefix}experts.gate_up_proj.weight", stored + gate_up_name, shard, moe, (2 * inner, hidden))
        yield _matrices(f"{prefix}experts.down_proj.weight", stored + down_name, shard, moe, (hidden, inner))
        return
    gate, up, down_name = moe.projections
    gate_up = tuple(
        _Linear(f"{stored}experts.{expert}.{name}", inner, hidden, (range(inner),), range(hidden))
        for expert in shard.experts
        for name in (gate, up)
    )
    down = tuple(
        _Linear(f"{stored}experts.{expert}.{down_name}", hidden, inner, (range(hidden),), range(inner))
        for expert in shard.experts
    )
    yield from _packed(f"{prefix}experts.gate_up_proj", gate_up, False)
    yield from _packed(f"{prefix}experts.down_proj", down, False)


def _matrices(name: str, stored: str, shard: Shard, moe: MoeConfig, size: tuple[int, int]) -> Parameter:
    """Those of the rank's experts, of a tensor that has them of all."""
    rows = range(shard.experts.start * size[0], shard.experts.stop * size[0])
    return Parameter(name, (Piece(stored, (moe.num_experts, *size), rows, range(size[1])),))


def _packed(name: str, linears: tuple[_Linear, ...], has_bias: bool) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", tuple(piece for linear in linears for piece in linear.weight()))
    if has_bias:
        yield Parameter(f"{name}.bias", tuple(piece for linear in linears for piece in linear.bias()))


def _norm(name: str, stored: str, size: int, config: ModelConfig) -> Parameter:
    return Parameter(name, (Piece(stored, (size,), range(size), None),), config.has_offset_norms)


def _head_norm(name: str, stored: str, heads: range, config: ModelConfig) -> Parameter:
    """Of one head, or of all together: in the order of their rows."""
    shape = (len(heads) * config.head_size,)
    pieces = tuple(Piece(stored, shape, rows, None) for rows in _rotated_rows(config, heads))
    return Parameter(name, pieces, config.has_offset_norms)


def _table(name: str, stored: str, config: ModelConfig, shard: Shard) -> Parameter:
    shape = (config.vocab_size, config.hidden_size)
    return Parameter(name, (Piece(stored, shape, shard.vocab, range(config.hidden_size)),))
