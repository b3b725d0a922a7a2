"""The packed parameters of a native decoder: their names, and which of them a shape has."""

from __future__ import annotations

from shoal_kernels.native_shape import DecoderShape

# Packed parameter names and their numbers in shoal_native.h.
GLOBAL_PARAMETERS = {"embed_tokens.weight": 0, "lm_head.weight": 1, "norm.weight": 2}
LAYER_PARAMETERS = {
    "attention_norm.weight": 3,
    "mlp_norm.weight": 4,
    "q_norm.weight": 5,
    "k_norm.weight": 6,
    "qkv_proj.weight": 7,
    "qkv_proj.bias": 8,
    "o_proj.weight": 9,
    "o_proj.bias": 10,
    "gate_up_proj.weight": 11,
    "gate_up_proj.bias": 12,
    "down_proj.weight": 13,
    "down_proj.bias": 14,
    "attention_post_norm.weight": 15,
    "mlp_post_norm.weight": 16,
    "router.weight": 17,
    "experts.gate_up_proj.weight": 18,
    "experts.down_proj.weight": 19,
    "router.bias": 20,
    "shared_mlp.gate_up_proj.weight": 21,
    "shared_mlp.down_proj.weight": 22,
}
VECTORS = {
    number
    for name, number in (GLOBAL_PARAMETERS | LAYER_PARAMETERS).items()
    if "norm." in name or name == "router.bias"
}
ATTENTION = ("qkv_proj.weight", "o_proj.weight")
MLP = ("gate_up_proj.weight", "down_proj.weight")
EXPERTS = ("router.weight", "experts.gate_up_proj.weight", "experts.down_proj.weight")
SHARED = ("shared_mlp.gate_up_proj.weight", "shared_mlp.down_proj.weight")


def required(shape: DecoderShape) -> set[str]:
    """Names of the parameters that every decoder of this shape has: all but biases and query and key norms."""
    names = {name for name in GLOBAL_PARAMETERS if place_of(shape, name) is not None}
    for layer in range(shape.first_layer, shape.first_layer + shape.num_layers):
        has_experts = shape.experts is not None and layer in shape.experts.layers
        of_layer = (*ATTENTION, *(EXPERTS if has_experts else MLP), *(f"{norm}.weight" for norm in shape.norms))
        if has_experts and shape.experts is not None and shape.experts.shared_size:
            of_layer += SHARED
        names |= {f"layers.{layer}.{name}" for name in of_layer}
    return names


def place_of(shape: DecoderShape, name: str) -> tuple[int, int] | None:
    """A parameter's number and its layer in a shard; None if the shard does not need it. The embedding of a tied model
    is its head, which the first and the last stage need.
    """
    if name not in GLOBAL_PARAMETERS:
        layer, _, of_layer = name.removeprefix("layers.").partition(".")
        return LAYER_PARAMETERS[of_layer], int(layer) - shape.first_layer
    is_first, is_last, is_tied = shape.is_first_stage, shape.is_last_stage, shape.tied_embeddings
    if name == "embed_tokens.weight":
        is_held = is_first and not is_tied
    else:
        is_held = is_last or (name == "lm_head.weight" and is_first and is_tied)
    return (GLOBAL_PARAMETERS[name], 0) if is_held else None


def product_size(shape: DecoderShape, name: str) -> tuple[int, int]:
    """Outputs and inputs of a product that can be adapted. Raises ValueError if ``name`` is none."""
    queries, kv = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    sizes = {
        "qkv_proj": (queries + 2 * kv, shape.hidden_size),
        "o_proj": (shape.hidden_size, queries),
        "gate_up_proj": (2 * shape.intermediate_size, shape.hidden_size),
        "down_proj": (shape.hidden_size, shape.intermediate_size),
    }
    prefix, _, product = name.rpartition(".")
    if (size := sizes.get(product)) is None:
        raise ValueError(f"{name}: must be one of {', '.join(sizes)} of a layer")
    mixtures = {f"layers.{layer}" for layer in shape.experts.layers} if shape.experts is not None else ()
    if prefix in mixtures and f"{product}.weight" in MLP:
        raise ValueError(f"{name}: the layer has experts, which cannot be adapted")
    return size
