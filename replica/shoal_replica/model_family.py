"""What tells families of decoders apart, read from a Hugging Face ``config.json``."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shoal_replica.config_fields import fields_of, number, refusal, size
from shoal_replica.errors import ConfigError
from shoal_replica.moe_config import read_all_layers, read_last_layers, read_some_layers
from shoal_replica.rope import FULL, LOCAL_THETA, NAME_OF_SHARE, WINDOW, in_one_spelling

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def text_config(raw: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The architecture that a ``config.json`` names, and the fields of its decoder for text, which may be one part of
    it, with those that its family leaves out, and rotary embeddings in one spelling.

    Raises:
        ConfigError: the architecture is not served, or the spellings of its rotary embeddings are at odds.
    """
    named = raw.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else "?"
    if architecture not in _FAMILIES:
        raise ConfigError(f"model: architecture {architecture!r} is not one of {', '.join(_FAMILIES)}")
    given = raw | fields_of(raw, "text_config")
    if raw.get("eos_token_id") is not None:  # that of the part may be its family's default alone
        given["eos_token_id"] = raw["eos_token_id"]
    # No window, or no token that ends sequences, is not the same as none given.
    given = {key: value for key, value in given.items() if value is not None or key in _MAY_BE_NULL}
    own = _LEFT_OUT.get(architecture, {}) | given
    if architecture == "Olmo3ForCausalLM":  # whose rope_scaling is not that of layers with a window
        own.setdefault(LOCAL_THETA, own["rope_theta"])
    return architecture, in_one_spelling(own)


def family_fields(architecture: str, raw: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The fields of ModelConfig in which the architecture, or its config, departs from the first Llama.

    Raises:
        ConfigError: a size is missing or impossible, or something is asked for that is not served.
    """
    has_bias = bool(raw.get("attention_bias", False))
    name = "hidden_activation" if "hidden_activation" in raw else "hidden_act"
    if (activation := raw.get(name, "silu")) not in ACTIVATIONS:
        raise ConfigError(f"model: {name} {activation!r} is not supported, only {', '.join(ACTIVATIONS)}")
    shared = {
        "qkv_bias": has_bias,
        "output_bias": has_bias,
        "mlp_bias": bool(raw.get("mlp_bias", False)),
        "sliding_window": None,
        "activation": ACTIVATIONS[activation],
        "rms_norm_eps": number(raw, "rms_norm_eps", 1e-6),
    }
    fields = shared | _FAMILIES[architecture](raw)
    if fields.get("moe") and fields["activation"] != "silu":
        raise ConfigError(f"model: {name} {activation!r} is not supported in experts, only 'silu'")
    if architecture.startswith("Gemma3") and dtype == "bfloat16":  # it rounds the scale like what it multiplies
        fields["embedding_scale"] = _round_to_bfloat16(fields["embedding_scale"])
    return fields


def _round_to_bfloat16(value: float) -> float:
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits += 0x7FFF + (bits >> 16 & 1)
    (rounded,) = struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))
    return float(rounded)


def _window(raw: dict[str, Any], is_default: bool = True) -> int | None:
    """The window of all layers."""
    is_used = raw.get("use_sliding_window", is_default)
    return size(raw, "sliding_window") if is_used and raw.get("sliding_window") else None


def _no_window(raw: dict[str, Any]) -> dict[str, Any]:
    """For families that hardly ever have one."""
    if _window(raw, is_default=False):
        raise ConfigError(
            "model: use_sliding_window in config.json is set, which is not supported for this architecture"
        )
    return {}


def _windows(raw: dict[str, Any], has_window: Callable[[int], bool]) -> dict[str, Any]:
    """The window of some layers, if any has one."""
    full = _full_layers(raw, has_window)
    if raw.get("sliding_window") is None or len(full) == size(raw, "num_hidden_layers"):
        return {}
    return {"sliding_window": size(raw, "sliding_window"), "full_layers": full}


def _full_layers(raw: dict[str, Any], has_window: Callable[[int], bool]) -> tuple[int, ...]:
    """Those without a window: by ``layer_types``, or else all but those that ``has_window``."""
    num_layers = size(raw, "num_hidden_layers")
    types = raw.get("layer_types") or [WINDOW if has_window(layer) else FULL for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in (WINDOW, FULL) for kind in types):
        raise refusal("layer_types", types, f"a list of {num_layers}, each {WINDOW!r} or {FULL!r}")
    return tuple(layer for layer, kind in enumerate(types) if kind == FULL)


def _last_windows(raw: dict[str, Any]) -> dict[str, Any]:
    """For families that have it in their last layers, if they are told to."""
    if not _window(raw, is_default=False):
        return {}
    first = raw.get("max_window_layers", 28)
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise refusal("max_window_layers", first, "an integer of at least 0")
    return _windows(raw, lambda layer: layer >= first)


def rotated_share(architecture: str, raw: dict[str, Any]) -> float:
    """How much of each head is rotated."""
    if architecture not in _ROTATED_IN_PART:
        return 1.0
    share = number(raw, NAME_OF_SHARE, 1.0)
    if "rotary_dim" in raw:  # MiniMax's name
        share = size(raw, "rotary_dim") / size(raw, "head_dim")
    return number(fields_of(raw, "rope_parameters"), NAME_OF_SHARE, share)


def _llama(raw: dict[str, Any]) -> dict[str, Any]:
    return {}  # also where config.json has a window: transformers' Llama knows none


def _mistral(raw: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": _window(raw)}


def _qwen2(raw: dict[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": True, "output_bias": False} | _last_windows(raw)


def _qwen3(raw: dict[str, Any]) -> dict[str, Any]:
    return {"qk_norm": True} | _last_windows(raw)


def _qwen3_moe(raw: dict[str, Any]) -> dict[str, Any]:
    return {"qk_norm": True, "moe": read_some_layers(raw)} | _no_window(raw)


def _mixtral(raw: dict[str, Any]) -> dict[str, Any]:
    moe = read_all_layers(raw, "num_local_experts", stored_in="block_sparse_moe", projections=("w1", "w3", "w2"))
    return {"moe": moe, "sliding_window": _window(raw)}


def _olmoe(raw: dict[str, Any]) -> dict[str, Any]:
    if raw.get("clip_qkv"):
        raise ConfigError(f"model: clip_qkv in config.json is {raw['clip_qkv']!r}; it is not supported")
    moe = read_all_layers(raw, "num_experts", renormalize=bool(raw.get("norm_topk_prob", False)))
    return {"qk_norm": True, "qk_norm_spans_heads": True, "moe": moe}


def _granite_moe(raw: dict[str, Any]) -> dict[str, Any]:
    stacked = ("input_linear.weight", "output_linear.weight")
    moe = read_all_layers(
        raw, "num_local_experts", stored_in="block_sparse_moe", router="router.layer", stacked=stacked
    )
    return _granite(raw) | {"moe": moe}


def _granite_moe_shared(raw: dict[str, Any]) -> dict[str, Any]:
    fields, shared_size = _granite_moe(raw), raw.get("shared_intermediate_size", 1024)
    if not shared_size:
        return fields
    stored = {"shared_in": "shared_mlp", "shared_projections": ("input_linear", "output_linear")}
    raw = raw | {"shared_intermediate_size": shared_size}
    return fields | {"moe": replace(fields["moe"], shared_size=size(raw, "shared_intermediate_size"), **stored)}


def _glm4_moe(raw: dict[str, Any]) -> dict[str, Any]:
    """Further layers, which guess more tokens at once, are left unread."""
    return {
        "qk_norm": bool(raw.get("use_qk_norm", False)),
        "output_bias": False,
        "moe": read_last_layers(raw),
        "num_extra_layers": size(raw, key) if raw.get(key := "num_nextn_predict_layers") else 0,
    }


def _dots1(raw: dict[str, Any]) -> dict[str, Any]:
    first = raw.get("max_window_layers", 62)
    windows = _windows(raw, lambda layer: layer >= first) if raw.get("sliding_window") else {}
    return {"qk_norm": True, "moe": read_last_layers(raw)} | windows


def _minimax_m2(raw: dict[str, Any]) -> dict[str, Any]:
    """Its queries and keys are normed all heads together."""
    stored: dict[str, Any] = {"stored_in": "block_sparse_moe", "projections": ("w1", "w3", "w2")}
    moe = read_all_layers(raw, "num_local_experts", scores="sigmoid", router_bias="e_score_correction_bias", **stored)
    return {"qk_norm": True, "qk_norm_spans_heads": True, "moe": moe}


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


def _olmo2(raw: dict[str, Any]) -> dict[str, Any]:
    return {"norm_placement": "post", "qk_norm": True, "qk_norm_spans_heads": True}


def _olmo3(raw: dict[str, Any]) -> dict[str, Any]:
    return _olmo2(raw) | _windows(raw, lambda layer: (layer + 1) % 4 != 0)


def _exaone4(raw: dict[str, Any]) -> dict[str, Any]:
    """Where some layers have a window, the others know no positions."""
    fields: dict[str, Any] = {"norm_placement": "post", "qk_norm": True}
    if not raw.get("sliding_window"):
        return fields
    pattern = raw.get("sliding_window_pattern")
    period = len(pattern) if isinstance(pattern, str) and pattern else size(raw, "sliding_window_pattern", 4)

    def has_window(layer: int) -> bool:
        return (layer + 1) % period != 0

    return fields | _windows(raw, has_window) | {"unrotated_layers": _full_layers(raw, has_window)}


def _granite(raw: dict[str, Any]) -> dict[str, Any]:
    """What a layer adds to the residual stream is multiplied by ``residual_multiplier``. That is the same as a stream
    divided by it, as norms take no notice of their input's scale but for what they add to its mean square.
    """
    multiplier = number(raw, "residual_multiplier", 1.0)
    return {
        "embedding_scale": number(raw, "embedding_multiplier", 1.0) / multiplier,
        "rms_norm_eps": number(raw, "rms_norm_eps", 1e-6) / multiplier**2,
        "attention_scale": number(raw, "attention_multiplier", 1.0),
        "logits_divisor": number(raw, "logits_scaling", 1.0),
    }


def _gemma3(raw: dict[str, Any]) -> dict[str, Any]:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if raw.get(key):
            raise ConfigError(f"model: {key} in config.json is {raw[key]!r}; it is not supported")
    if raw.get("use_bidirectional_attention"):
        raise ConfigError("model: use_bidirectional_attention in config.json is set; only causal models are served")
    pattern = size(raw, "sliding_window_pattern")
    return {
        "norm_placement": "both",
        "has_offset_norms": True,
        "qk_norm": True,
        "embedding_scale": size(raw, "hidden_size") ** 0.5,
        "attention_scale": number(raw, "query_pre_attn_scalar") ** -0.5,
    } | _windows(raw, lambda layer: (layer + 1) % pattern != 0)


def _gemma3_with_images(raw: dict[str, Any]) -> dict[str, Any]:
    """Its decoder for text. Newer checkpoints have the second and third prefix."""
    prefixes = (("language_model.", ""), ("model.language_model.", "model."), ("lm_head.", "lm_head."))
    return _gemma3(raw) | {"text_prefixes": prefixes}


# Of families whose heads may be rotated in part.
_ROTATED_IN_PART = ("Glm4MoeForCausalLM", "MiniMaxM2ForCausalLM", "Phi3ForCausalLM")

_FAMILIES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "Dots1ForCausalLM": _dots1,
    "Exaone4ForCausalLM": _exaone4,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3_with_images,
    "Glm4MoeForCausalLM": _glm4_moe,
    "GraniteForCausalLM": _granite,
    "GraniteMoeForCausalLM": _granite_moe,
    "GraniteMoeSharedForCausalLM": _granite_moe_shared,
    "LlamaForCausalLM": _llama,
    "MiniMaxM2ForCausalLM": _minimax_m2,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Olmo2ForCausalLM": _olmo2,
    "Olmo3ForCausalLM": _olmo3,
    "OlmoeForCausalLM": _olmoe,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "SmolLM3ForCausalLM": _smollm3,
}

# What checkpoints may leave out because transformers has it as the family's default, where it is not everyone's.
_GEMMA3 = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "sliding_window_pattern": 6, "tie_word_embeddings": True, "max_position_embeddings": 131072,
    "rope_theta": 1e6, "rope_local_base_freq": 1e4, "eos_token_id": 1,
}  # fmt: skip
_MAY_BE_NULL = ("sliding_window", "eos_token_id")
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "Dots1ForCausalLM": {"sliding_window": 4096},
    "Exaone4ForCausalLM": {"sliding_window": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 2},
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Glm4MoeForCausalLM": {
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "max_position_embeddings": 131072,
    },
    "GraniteForCausalLM": {"eos_token_id": 2},
    "GraniteMoeForCausalLM": {"eos_token_id": 2},
    "GraniteMoeSharedForCausalLM": {"eos_token_id": 2},
    "LlamaForCausalLM": {"eos_token_id": 2},
    "MiniMaxM2ForCausalLM": {"rope_theta": 5e6, "eos_token_id": 200020, "max_position_embeddings": 196608},
    "MistralForCausalLM": {"sliding_window": 4096, "eos_token_id": 2, "max_position_embeddings": 131072},
    "MixtralForCausalLM": {
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        "max_position_embeddings": 131072,
    },
    "Olmo2ForCausalLM": {"rms_norm_eps": 1e-5, "eos_token_id": 50279},
    "Olmo3ForCausalLM": {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096, "eos_token_id": 50279},
    "OlmoeForCausalLM": {"rms_norm_eps": 1e-5, "eos_token_id": 50279, "max_position_embeddings": 4096},
    "Phi3ForCausalLM": {"rms_norm_eps": 1e-5, "eos_token_id": 32000, "max_position_embeddings": 4096},
    "Qwen2ForCausalLM": {"sliding_window": 4096, "max_position_embeddings": 32768},
    "Qwen3ForCausalLM": {"sliding_window": 4096, "max_position_embeddings": 32768},
    "Qwen3MoeForCausalLM": {"sliding_window": 4096, "max_position_embeddings": 32768},
    "SmolLM3ForCausalLM": {
        "tie_word_embeddings": True,
        "rope_theta": 2e6,
        "eos_token_id": 128001,
        "max_position_embeddings": 32768,
    },
}
