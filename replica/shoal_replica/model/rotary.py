"""The angles of rotary position embeddings (Su et al. 2021), with the scalings that make contexts longer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal_replica.model_config import ModelConfig


def rotary_caches(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """``rotary_cache`` of the layers that see all tokens, and of those with a window; the same tensor if they are
    rotated alike.
    """
    full = rotary_cache(config, dtype, device)
    if config.window_rope_theta is None:
        return full, full
    windows = replace(config, rope_theta=config.window_rope_theta, rope_scaling=None)
    return full, rotary_cache(windows, dtype, device)


def rotary_cache(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cosines, then sines, of every position's angles: [max_model_len, head_size], computed in float32. Pairs that are
    not rotated have angle 0 (see ``parameters`` for where they are in a head).
    """
    frequencies = rotary_frequencies(config)
    angles = torch.outer(torch.arange(config.max_model_len, dtype=torch.float32), frequencies)
    scale = _attention_factor(config.rope_scaling)
    rest = torch.zeros(config.max_model_len, config.head_size // 2 - len(frequencies))
    cosines, sines = angles.cos().mul_(scale), angles.sin_().mul_(scale)  # in place: long contexts have large tables
    return torch.cat((cosines, rest + 1.0, sines, rest), dim=-1).to(device=device, dtype=dtype)


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position for each pair that is rotated, float32, with the config's scaling."""
    size, scaling = config.rotary_size or config.head_size, config.rope_scaling
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    frequencies = 1.0 / (config.rope_theta**exponents)
    if scaling is None:
        return frequencies
    match scaling["rope_type"]:
        case "linear":
            return frequencies / float(scaling["factor"])
        case "llama3":
            return _llama3_frequencies(frequencies, scaling)
        case "yarn":
            return _yarn_frequencies(frequencies, size, config.rope_theta, scaling)
        case "longrope":
            # LongRoPE (Ding et al. 2024): each pair has a divisor of its own.
            return frequencies / torch.tensor(scaling["divisors"], dtype=torch.float32)
        case kind:
            raise ValueError(f"rope type {kind!r}")


def _llama3_frequencies(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths' frequencies are divided by ``factor``, short ones' kept, others interpolated."""
    factor, low, high = float(scaling["factor"]), scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    smooth = (context / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > context / low, frequencies / factor, between)
    return torch.where(wavelengths < context / high, frequencies, scaled)


def _yarn_frequencies(frequencies: Tensor, size: int, theta: float, scaling: dict[str, Any]) -> Tensor:
    """YaRN (Peng et al. 2023): pairs that turn often within the original context keep their frequencies, those that
    turn less than ``beta_slow`` times have them divided by ``factor``, and those between are interpolated.
    """
    context = scaling["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return size * math.log(context / (times * 2 * math.pi)) / (2 * math.log(theta))

    fast = pair_that_turns(scaling.get("beta_fast", 32))
    slow = pair_that_turns(scaling.get("beta_slow", 1))
    if scaling["truncate"]:
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, size - 1)
    ramp = (torch.arange(size // 2, dtype=torch.float32) - fast) / (slow - fast or 0.001)
    divided = ramp.clamp(0, 1)
    return frequencies / float(scaling["factor"]) * divided + frequencies * (1 - divided)


def _attention_factor(scaling: dict[str, Any] | None) -> float:
    """By what rotated queries and keys are multiplied."""
    if scaling is None or scaling["rope_type"] not in ("yarn", "longrope"):
        return 1.0
    if (given := scaling.get("attention_factor")) is not None:
        return float(given)
    factor = float(scaling["factor"])
    if factor <= 1.0:
        return 1.0
    if scaling["rope_type"] == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(scaling["original_max_position_embeddings"]))
    own, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if own and all_dim:
        return float((0.1 * own * math.log(factor) + 1.0) / (0.1 * all_dim * math.log(factor) + 1.0))
    # DeepSeek's distilled Qwen3 has the last one, and was measured with it; transformers ignores it, vLLM does not.
    return (0.1 * math.log(factor) + 1.0) * float(scaling.get("attn_factor", 1.0))
