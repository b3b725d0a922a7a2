"""What tells families of decoders apart, read from a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal_replica.config_fields import fields_of, number, size
from shoal_replica.errors import ConfigError

NAME_OF_SHARE = "partial_rotary_factor"


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


def family_fields(architecture: str, raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of ModelConfig in which the architecture, or its config, departs from the first Llama.

    Raises:
        ConfigError: the architecture is not served, or a size is missing or impossible.
    """
    if architecture not in _FAMILIES:
        raise ConfigError(f"model: architecture {architecture!r} is not one of {', '.join(_FAMILIES)}")
    has_bias = bool(raw.get("attention_bias", False))
    shared = {
        "qkv_bias": has_bias,
        "output_bias": has_bias,
        "mlp_bias": bool(raw.get("mlp_bias", False)),
        "sliding_window": None,
    }
    return shared | _FAMILIES[architecture](raw)


def _window(raw: dict[str, Any], is_default: bool = True) -> int | None:
    """The window of all layers."""
    is_used = raw.get("use_sliding_window", is_default)
    return size(raw, "sliding_window") if is_used and raw.get("sliding_window") else None


def _no_window(raw: dict[str, Any]) -> dict[str, Any]:
    """For families that use it in some layers only, if they are told to."""
    if _window(raw, is_default=False):
        raise ConfigError("model: use_sliding_window mixes window and full layers, which is not supported")
    return {}


def rotated_share(architecture: str, raw: dict[str, Any]) -> float:
    """How much of each head is rotated."""
    if architecture != "Phi3ForCausalLM":
        return 1.0
    return number(fields_of(raw, "rope_parameters"), NAME_OF_SHARE, number(raw, NAME_OF_SHARE, 1.0))


def _llama(raw: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": _window(raw)}


def _qwen2(raw: dict[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": True, "output_bias": False} | _no_window(raw)


def _qwen3(raw: dict[str, Any]) -> dict[str, Any]:
    return {"qk_norm": True} | _no_window(raw)


def _qwen3_moe(raw: dict[str, Any]) -> dict[str, Any]:
    num_experts = size(raw, "num_experts" if "num_experts" in raw else "num_local_experts")
    step, dense = size(raw, "decoder_sparse_step", 1), set(raw.get("mlp_only_layers") or ())
    layers = tuple(i for i in range(size(raw, "num_hidden_layers")) if i not in dense and (i + 1) % step == 0)
    moe = MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=_num_per_token(raw, num_experts),
        intermediate_size=size(raw, "moe_intermediate_size"),
        renormalize=bool(raw.get("norm_topk_prob", False)),
        layers=layers,
    )
    return {"qk_norm": True, "moe": moe if layers else None} | _no_window(raw)


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
    return {"moe": moe, "sliding_window": _window(raw)}


def _phi3(raw: dict[str, Any]) -> dict[str, Any]:
    return {"has_packed_projections": True, "sliding_window": _window(raw)}


def _smollm3(raw: dict[str, Any]) -> dict[str, Any]:
    num_layers, rotated = size(raw, "num_hidden_layers"), raw.get("no_rope_layers")
    if rotated is None:  # despite its name, it has a 1 for each layer with rotary embeddings
        interval = size(raw, "no_rope_layer_interval", 4)
        rotated = [int((i + 1) % interval != 0) for i in range(num_layers)]
    if not isinstance(rotated, list) or len(rotated) < num_layers:
        raise ConfigError(f"model: no_rope_layers in config.json is {rotated!r}; must be a list of {num_layers}")
    return {"unrotated_layers": tuple(i for i in range(num_layers) if not rotated[i])} | _no_window(raw)


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
