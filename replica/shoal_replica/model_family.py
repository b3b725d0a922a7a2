"""What tells families of decoders apart, read from a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal_replica.errors import ConfigError

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
# What each type needs besides its name.
_ROPE_NUMBERS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """The mixture of experts that replaces the MLP in some layers.

    ``renormalize`` makes the weights of a token's chosen experts add up to 1. ``layers`` lists the layers with experts.
    ``stored_in`` is a layer's module that holds them in checkpoints, and ``projections`` their gate, up and down there.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    renormalize: bool
    layers: tuple[int, ...]
    stored_in: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embeddings (Su et al. 2021): the base, how frequencies are scaled (see ``rotary_frequencies``; None for
    not at all), and the share of each head that is rotated.
    """

    theta: float
    scaling: dict[str, Any] | None
    share: float

    @property
    def num_positions(self) -> int:
        """Positions that the scaling is made for; 0 where the model's length says it."""
        if self.scaling is None or self.scaling["rope_type"] != "yarn":
            return 0
        return int(self.scaling["factor"] * self.scaling["original_max_position_embeddings"])

    def size_of(self, head_size: int) -> int | None:
        """How much of a head is rotated; None for all of it. Raises ConfigError if it cannot be cut so."""
        rotated = int(head_size * self.share)
        if not 0 < rotated <= head_size or rotated % 2 or head_size % 2:
            raise ConfigError(f"model: partial_rotary_factor in config.json rotates {rotated} of a head's {head_size}")
        if self.scaling is not None and self.scaling["rope_type"] == "longrope":
            for name in ("short_factor", "long_factor"):
                _check_divisors(name, self.scaling.get(name), rotated // 2)
        return None if rotated == head_size else rotated


def _check_divisors(name: str, divisors: object, count: int) -> None:
    numbers = divisors if isinstance(divisors, list) else []
    if len(numbers) != count or not all(isinstance(each, int | float) and each > 0 for each in numbers):
        raise ConfigError(f"model: {name} in config.json must be a list of {count} numbers above 0")


def family_fields(architecture: str, raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of ModelConfig in which the architecture, or its config, departs from the first Llama.

    Raises:
        ConfigError: the architecture is not served, or a size is missing or impossible.
    """
    if architecture not in _FAMILIES:
        raise ConfigError(f"model: architecture {architecture!r} is not one of {', '.join(_FAMILIES)}")
    has_bias = bool(raw.get("attention_bias", False))
    shared = {"qkv_bias": has_bias, "output_bias": has_bias, "mlp_bias": bool(raw.get("mlp_bias", False))}
    return shared | _FAMILIES[architecture](raw)


def read_rope(architecture: str, raw: dict[str, Any]) -> Rope:
    """Raises ConfigError: the type is not known, or lacks one of its numbers."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = "longrope" if rope.get("type") == "su" else rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ConfigError(f"model: rope type {kind!r} is not one of {', '.join(ROPE_TYPES)}")
    theta = float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))
    share = 1.0
    if architecture == "Phi3ForCausalLM":
        share = float(rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)))
    if kind == "default":
        return Rope(theta, None, share)
    length = int(raw.get("max_position_embeddings") or 2048)
    rope |= {"rope_type": kind}
    if kind in ("yarn", "longrope"):  # what they may leave out, as transformers fills it in
        if (original := raw.get("original_max_position_embeddings")) is not None:
            rope["original_max_position_embeddings"] = original
        original = rope.setdefault("original_max_position_embeddings", length)
        is_left_out = rope["factor"] is None if "factor" in rope else kind == "longrope"
        if is_left_out and isinstance(original, int | float) and original > 0:
            rope["factor"] = length / original
    for name in _ROPE_NUMBERS[kind]:
        if not isinstance(rope.get(name), int | float) or isinstance(rope[name], bool) or rope[name] <= 0:
            raise ConfigError(f"model: {name} of rope type {kind!r} is {rope.get(name)!r}; must be a number above 0")
    return Rope(theta, rope, share)


def size(raw: dict[str, Any], key: str) -> int:
    """A size in config.json. Raises ConfigError unless it is an integer of at least 1."""
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"model: {key} in config.json is {value!r}; must be an integer of at least 1")
    return value


def _llama(raw: dict[str, Any]) -> dict[str, Any]:
    return {}


def _qwen2(raw: dict[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": True, "output_bias": False}


def _qwen3(raw: dict[str, Any]) -> dict[str, Any]:
    return {"qk_norm": True}


def _qwen3_moe(raw: dict[str, Any]) -> dict[str, Any]:
    num_experts = size(raw, "num_experts" if "num_experts" in raw else "num_local_experts")
    step, dense = int(raw.get("decoder_sparse_step") or 1), set(raw.get("mlp_only_layers") or ())
    layers = tuple(i for i in range(size(raw, "num_hidden_layers")) if i not in dense and (i + 1) % step == 0)
    moe = MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=_num_per_token(raw, num_experts),
        intermediate_size=size(raw, "moe_intermediate_size"),
        renormalize=bool(raw.get("norm_topk_prob", False)),
        layers=layers,
    )
    return {"qk_norm": True, "moe": moe if layers else None}


def _mixtral(raw: dict[str, Any]) -> dict[str, Any]:
    num_experts = size(raw, "num_local_experts")
    moe = MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=_num_per_token(raw, num_experts),
        intermediate_size=size(raw, "intermediate_size"),
        renormalize=True,
        layers=tuple(range(size(raw, "num_hidden_layers"))),
        stored_in="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )
    return {"moe": moe}


def _phi3(raw: dict[str, Any]) -> dict[str, Any]:
    return {"has_packed_projections": True}


def _smollm3(raw: dict[str, Any]) -> dict[str, Any]:
    if raw.get("use_sliding_window") and raw.get("sliding_window"):
        raise ConfigError("model: use_sliding_window mixes window and full layers, which is not supported")
    num_layers, rotated = size(raw, "num_hidden_layers"), raw.get("no_rope_layers")
    if rotated is None:  # despite its name, it has a 1 for each layer with rotary embeddings
        interval = int(raw.get("no_rope_layer_interval") or 4)
        rotated = [int((i + 1) % interval != 0) for i in range(num_layers)]
    if not isinstance(rotated, list) or len(rotated) < num_layers:
        raise ConfigError(f"model: no_rope_layers in config.json is {rotated!r}; must be a list of {num_layers}")
    return {"unrotated_layers": tuple(i for i in range(num_layers) if not rotated[i])}


def _num_per_token(raw: dict[str, Any], num_experts: int) -> int:
    num_per_token = size(raw, "num_experts_per_tok")
    if num_per_token > num_experts:
        raise ConfigError(
            f"model: num_experts_per_tok in config.json is {num_per_token}; must be at most {num_experts}"
        )
    return num_per_token


_FAMILIES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _llama,
    "MixtralForCausalLM": _mixtral,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "SmolLM3ForCausalLM": _smollm3,
}
