"""Mixtures of experts, as a Hugging Face ``config.json`` describes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal_replica.config_fields import number, refusal, size
from shoal_replica.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """The mixture of experts that replaces the MLP in some layers.

    ``renormalize`` makes the weights of a token's chosen experts add up to 1, before they are multiplied by ``scale``;
    ``scores`` is "softmax" or "sigmoid", see ``ops.select_experts``. ``layers`` lists the layers with experts.
    ``shared_size`` is the intermediate size of the MLP that all tokens pass through beside them, if there is one.

    ``stored_in`` is a layer's module that holds them in checkpoints, ``router`` the one within it that chooses,
    ``router_bias`` the bias that counts for its choice alone, if it has one, and ``projections`` each expert's gate, up
    and down; or ``stacked`` all experts' gates and ups together, and all downs. ``shared_in`` is the layer's module
    that holds the MLP for all tokens, by ``shared_projections``: gate, up and down, or both of the first as one.
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
    scores: str = "softmax"
    scale: float = 1.0
    router_bias: str = ""
    shared_size: int = 0
    shared_in: str = "mlp.shared_experts"
    shared_projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")


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


def read_last_layers(raw: dict[str, Any]) -> MoeConfig | None:
    """As DeepSeek-V3 has it: in all layers but the first few, scored by sigmoids, beside an MLP for all tokens. None if
    that leaves none.
    """
    for key in ("n_group", "topk_group"):
        if raw.get(key) not in (None, 1):
            raise ConfigError(f"model: {key} in config.json is {raw[key]!r}; groups of experts are not supported")
    num_experts, inner = size(raw, "n_routed_experts"), size(raw, "moe_intermediate_size")
    first = raw.get("first_k_dense_replace", 0)
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise refusal("first_k_dense_replace", first, "an integer of at least 0")
    moe = MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=_num_per_token(raw, num_experts),
        intermediate_size=inner,
        renormalize=bool(raw.get("norm_topk_prob", False)),
        layers=tuple(range(first, size(raw, "num_hidden_layers"))),
        scores="sigmoid",
        scale=number(raw, "routed_scaling_factor", 1.0),
        router_bias="gate.e_score_correction_bias",
        shared_size=inner * (size(raw, "n_shared_experts") if raw.get("n_shared_experts") else 0),
    )
    return moe if moe.layers else None


def read_all_layers(raw: dict[str, Any], name: str, renormalize: bool = True, **more: Any) -> MoeConfig:
    """In every layer so many as ``name`` says, each of ``intermediate_size``; ``more`` as in MoeConfig."""
    num_experts = size(raw, name)
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=_num_per_token(raw, num_experts),
        intermediate_size=size(raw, "intermediate_size"),
        renormalize=renormalize,
        layers=tuple(range(size(raw, "num_hidden_layers"))),
        **more,
    )


def _num_per_token(raw: dict[str, Any], num_experts: int) -> int:
    num_per_token = size(raw, "num_experts_per_tok")
    if num_per_token > num_experts:
        raise ConfigError(
            f"model: num_experts_per_tok in config.json is {num_per_token}; must be at most {num_experts}"
        )
    return num_per_token
