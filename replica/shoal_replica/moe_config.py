"""Mixtures of experts, as a Hugging Face ``config.json`` describes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal_replica.config_fields import size
from shoal_replica.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """The mixture of experts that replaces the MLP in some layers.

    ``renormalize`` makes the weights of a token's chosen experts add up to 1. ``layers`` lists the layers with experts.
    ``stored_in`` is a layer's module that holds them in checkpoints, ``router`` the one within it that chooses, and
    ``projections`` each expert's gate, up and down; or ``stacked`` all experts' gates and ups together, and all downs.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    renormalize: bool
    layers: tuple[int, ...]
    stored_in: str = "mlp"
    router: str = "gate"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked: tuple[str, str] | None = None


def read_some_layers(raw: dict[str, Any]) -> MoeConfig | None:
    """As Qwen has it: every so many layers, but for some. None if that leaves none."""
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
    return moe if layers else None


def read_all_layers(raw: dict[str, Any], name: str, renormalize: bool = True, **stored: Any) -> MoeConfig:
    """In every layer so many as ``name`` says, each of ``intermediate_size``; ``stored`` as in MoeConfig."""
    num_experts = size(raw, name)
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=_num_per_token(raw, num_experts),
        intermediate_size=size(raw, "intermediate_size"),
        renormalize=renormalize,
        layers=tuple(range(size(raw, "num_hidden_layers"))),
        **stored,
    )


def _num_per_token(raw: dict[str, Any], num_experts: int) -> int:
    num_per_token = size(raw, "num_experts_per_tok")
    if num_per_token > num_experts:
        raise ConfigError(
            f"model: num_experts_per_tok in config.json is {num_per_token}; must be at most {num_experts}"
        )
    return num_per_token
