"""The shape of a decoder, read once from its checkpoint's folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal_replica.config_fields import size
from shoal_replica.errors import ConfigError, NotFound
from shoal_replica.model_family import family_fields, rotated_share, text_config
from shoal_replica.moe_config import MoeConfig
from shoal_replica.rope import read_rope
from shoal_replica.weight_formats import GROUP_SIZE, LAYER_BITS, StoredQuantization, read_stored

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder, read from a Hugging Face ``config.json``.

    ``dtype`` applies to weights, activations and the KV cache. ``max_model_len`` counts prompt and generated tokens.
    ``quantization``, a key of LAYER_BITS, rounds weights when they are loaded, and activations while they are
    multiplied with them, if it is also a key of ACTIVATION_BITS; KV keeps the dtype. In a checkpoint that is ``stored``
    quantized, it applies to the tensors that are stored so; on CPUs all others (embedding, head) keep the dtype.

    ``rotary_size`` is how much of a head is rotated, None for all; queries and keys of ``unrotated_layers`` are not.
    Layers with a window are rotated by ``window_rope_theta``, unscaled, unless that is None. All have the
    ``sliding_window`` but ``full_layers``. If ``has_packed_projections``, checkpoints have queries, keys and values in
    one tensor, and gates and ups. Of a model with several parts, only tensors whose names begin with one of
    ``text_prefixes`` are read; each prefix comes with its replacement, as in a checkpoint of the text model alone.

    ``norm_placement`` tells where in a layer norms are: before attention and MLP ("pre"), after them ("post"), or
    "both". If ``has_offset_norms``, checkpoints store their weights less one. ``qk_norm`` norms each head of queries
    and keys, or if ``qk_norm_spans_heads`` all of them together. Embeddings are multiplied by ``embedding_scale``,
    scores by ``attention_scale`` (None: 1 / sqrt(head size)), and logits divided by ``logits_divisor``. ``activation``
    is that of the MLP's gates.
    """

    folder: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_model_len: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    qk_norm: bool = False
    moe: MoeConfig | None = None
    quantization: str = "none"
    stored: StoredQuantization | None = None
    rotary_size: int | None = None
    unrotated_layers: tuple[int, ...] = ()
    window_rope_theta: float | None = None
    full_layers: tuple[int, ...] = ()
    has_packed_projections: bool = False
    text_prefixes: tuple[tuple[str, str], ...] = ()
    norm_placement: str = "pre"
    has_offset_norms: bool = False
    qk_norm_spans_heads: bool = False
    activation: str = "silu"
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    logits_divisor: float = 1.0
    num_extra_layers: int = 0

    @classmethod
    def from_folder(
        cls, folder: str | Path, dtype: str = "auto", max_model_len: int | None = None, quantization: str = "none"
    ) -> ModelConfig:
        """Read ``folder/config.json``.

        Raises:
            NotFound: no such folder, or it holds no config.json.
            ConfigError: Shoal does not serve the architecture, dtype, length or quantization, or a size is missing.
        """
        path = Path(folder)
        if not path.is_dir():
            raise NotFound(f"model: no folder {str(folder)!r}")
        raw = read_json(path / "config.json")
        if raw is None:
            raise NotFound(f"model: {str(folder)!r} holds no config.json")
        architecture, raw = text_config(raw)
        if dtype == "auto":
            dtype = "float32" if (raw.get("dtype") or raw.get("torch_dtype")) == "float32" else "bfloat16"
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype: got {dtype!r}; must be 'auto' or one of {', '.join(DTYPE_BYTES)}")
        if quantization not in LAYER_BITS:
            raise ConfigError(f"quantization: got {quantization!r}; must be one of {', '.join(LAYER_BITS)}")
        family = family_fields(architecture, raw, dtype)
        stored = read_stored(raw)
        num_heads = size(raw, "num_attention_heads")
        num_kv_heads = size(raw, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ConfigError(f"model: {num_heads} attention heads cannot share {num_kv_heads} KV heads evenly")
        head_size = size(raw, "head_dim") if raw.get("head_dim") else size(raw, "hidden_size") // num_heads
        if max_model_len is not None and type(max_model_len) is not int:
            raise ConfigError(f"max_model_len: got {max_model_len!r}; must be an integer")
        rope = read_rope(raw, head_size, rotated_share(architecture, raw), max_model_len)
        if max_model_len is not None and not 1 <= max_model_len <= rope.max_model_len:
            raise ConfigError(f"max_model_len: got {max_model_len}; the model allows 1 to {rope.max_model_len}")
        return cls(
            folder=str(path),
            architecture=architecture,
            vocab_size=size(raw, "vocab_size"),
            hidden_size=size(raw, "hidden_size"),
            intermediate_size=size(raw, "intermediate_size"),
            num_layers=size(raw, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            rotary_size=rope.size,
            window_rope_theta=rope.window_theta,
            max_model_len=max_model_len or rope.max_model_len,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            eos_token_ids=_eos_token_ids(path, raw),
            dtype=dtype,
            quantization=quantization if stored is None else stored.format(quantization),
            stored=stored,
            **family,
        )

    def text_name(self, stored: str) -> str | None:
        """What a stored tensor, or module, of a model with several parts is called where there is no other part; None
        if it belongs to another part.
        """
        for prefix, own in self.text_prefixes:
            if stored.startswith(prefix):
                return own + stored.removeprefix(prefix)
        return None

    @property
    def num_parameters(self) -> int:
        """Number of the decoder's weights; tied embeddings count once."""
        d, h = self.hidden_size, self.head_size
        attention = d * h * (2 * self.num_heads + 2 * self.num_kv_heads)
        attention += (self.num_heads + 2 * self.num_kv_heads) * h * self.qkv_bias + d * self.output_bias
        norms = (4 if self.norm_placement == "both" else 2) * d
        if self.qk_norm:
            norms += (self.num_heads + self.num_kv_heads) * h if self.qk_norm_spans_heads else 2 * h
        mlp = 3 * d * self.intermediate_size + (2 * self.intermediate_size + d) * self.mlp_bias
        mlps = self.num_layers * mlp
        if self.moe is not None:
            experts = self.moe.num_experts * (d + 3 * d * self.moe.intermediate_size + bool(self.moe.router_bias))
            mlps += len(self.moe.layers) * (experts + 3 * d * self.moe.shared_size - mlp)
        embeddings = self.vocab_size * d * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * (attention + norms) + mlps + d

    @property
    def has_plain_tables(self) -> bool:
        """Whether embedding and head keep the dtype."""
        return self.quantization == "none" or self.stored is not None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory; if rounded, with embedding and head in 8 bits as on CPUs."""
        bits = LAYER_BITS[self.quantization]
        if bits is None:
            return self.num_parameters * DTYPE_BYTES[self.dtype]
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        layers = self.num_parameters - tables
        # Of a group: 8 bits have a 16-bit scale, 4 bits a minimum as well.
        table_bits = GROUP_SIZE * 8 * DTYPE_BYTES[self.dtype] if self.has_plain_tables else 8 * GROUP_SIZE + 16
        layer_bits = bits * GROUP_SIZE + (16 if bits == 8 else 32)
        return (tables * table_bits + layers * layer_bits) // (8 * GROUP_SIZE)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one KV block over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * block_size * DTYPE_BYTES[self.dtype]


def read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model: {path} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"model: {path} does not hold a JSON object")
    return value


def _eos_token_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json takes precedence over config.json, as in transformers."""
    generation = read_json(folder / "generation_config.json") or {}
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    if eos is None:
        return ()
    listed = eos if isinstance(eos, list) else [eos]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in listed):
        raise ConfigError(f"model: eos_token_id is {eos!r}; must be a token id, or a list of them")
    return tuple(listed)
