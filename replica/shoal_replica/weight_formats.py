"""The formats of weights: which may be asked for, and which a quantized checkpoint has stored. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal_replica.config_fields import fields_of, refusal
from shoal_replica.errors import ConfigError

# Bits per weight of the layers' projections. Each group of GROUP_SIZE weights also has a scale and, with 4 bits, a
# minimum.
LAYER_BITS = {"none": None, "int8": 8, "int4": 4, "w8a8": 8, "w4a8": 4}
# Bits of the activations that these weights are multiplied with; with all others they keep the dtype, but for 16-bit
# integers in native kernels, and on NPUs 8-bit ones wherever weights have 8 bits.
ACTIVATION_BITS = {"w8a8": 8, "w4a8": 8}
GROUP_SIZE = 32
METHODS = ("gptq", "awq", "compressed-tensors", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """How a checkpoint stores its quantized projections: what its ``quantization_config`` says.

    Attributes:
        method: one of METHODS.
        bits: of a weight, 4 or 8.
        is_float: whether weights are 8-bit floating-point numbers (e4m3), not integers.
        group_size: inputs that share a scale; None for all of an output, or of a block of outputs.
        block: outputs and inputs that share a scale, where it belongs to a block.
        has_zero_points: whether groups have zero points of their own; otherwise they are in the middle.
        zero_point_shift: what is added to a stored zero point; GPTQ's first format stores one less.
        is_in_order: whether groups are of consecutive inputs. With GPTQ's activation order they are not.
        activation_bits: 8 if the checkpoint is meant for activations of 8 bits, else 16.
    """

    method: str
    bits: int
    is_float: bool = False
    group_size: int | None = None
    block: tuple[int, int] | None = None
    has_zero_points: bool = False
    zero_point_shift: int = 0
    is_in_order: bool = True
    activation_bits: int = 16

    @property
    def keeps_integers(self) -> bool:
        """Whether the stored integers are served as they are; otherwise weights are widened, and perhaps rounded."""
        return not self.is_float and self.is_in_order and (self.bits == 4 or not self.has_zero_points)

    def format(self, asked: str) -> str:
        """The key of LAYER_BITS as which the weights are served, if a deployment asks for ``asked``: "none" keeps what
        is stored where that is possible, widens floats to the dtype, and rounds all else to 8 bits.
        """
        if asked != "none" or self.is_float:
            return asked
        bits = self.bits if self.keeps_integers else 8
        return next(
            name
            for name, held in LAYER_BITS.items()
            if held == bits and ACTIVATION_BITS.get(name, 16) == self.activation_bits
        )


def read_stored(raw: dict[str, Any]) -> StoredQuantization | None:
    """What a ``config.json`` says of its weights' quantization; None if there is none.

    Raises:
        ConfigError: Shoal does not read weights that are stored so.
    """
    said = _told(fields_of(raw, "quantization_config") or fields_of(raw, "compression_config"))
    if not said:
        return None
    method = said.get("quant_method")
    if method == "gptq":
        return _gptq(said)
    if method == "awq":
        return _awq(said)
    if method == "compressed-tensors":
        return _compressed(said)
    if method == "fp8":
        return _fp8(said)
    raise _refusal("quant_method", method, f"one of {', '.join(METHODS)}")


def _gptq(said: dict[str, Any]) -> StoredQuantization:
    bits = _one_of(said, "bits", 4, 8)
    form = _one_of({"checkpoint_format": "gptq"} | said, "checkpoint_format", "gptq", "gptq_v2")
    return StoredQuantization(
        method="gptq",
        bits=bits,
        group_size=_group_size(said.get("group_size")),
        has_zero_points=not said.get("sym", True),
        zero_point_shift=1 if form == "gptq" else 0,
        is_in_order=not said.get("desc_act", False) or _group_size(said.get("group_size")) is None,
    )


def _awq(said: dict[str, Any]) -> StoredQuantization:
    _one_of({"version": "gemm"} | said, "version", "gemm", "GEMM")
    return StoredQuantization(
        method="awq",
        bits=_one_of({"bits": said.get("w_bit")} | said, "bits", 4),
        group_size=_group_size(said.get("group_size", said.get("q_group_size"))),
        has_zero_points=bool(said.get("zero_point", True)),
    )


def _compressed(said: dict[str, Any]) -> StoredQuantization:
    for key in ("sparsity_config", "transform_config"):
        held = fields_of(said, key)
        if held and held.get("format") != "dense":
            raise _refusal(key, held, "absent")
    groups = list(fields_of(said, "config_groups").values())
    if len(groups) != 1 or not isinstance(groups[0], dict):
        raise _refusal("config_groups", groups, "one group")
    weights, inputs = _told(fields_of(groups[0], "weights")), fields_of(groups[0], "input_activations")
    strategy = _one_of(weights, "strategy", "group", "channel", "tensor", "block")
    is_float = _one_of({"type": "int"} | weights, "type", "int", "float") == "float"
    bits = _one_of(weights, "num_bits", 8) if is_float else _one_of(weights, "num_bits", 4, 8)
    order = str(weights.get("actorder") or "static").lower()
    if order not in ("static", "weight", "dynamic", "group", "true"):
        raise _refusal("actorder", weights["actorder"], "'weight', 'static', 'group' or 'dynamic'")
    block = weights.get("block_structure") if strategy == "block" else None
    if not is_float and strategy in ("tensor", "block"):
        raise _refusal("strategy", strategy, "'group' or 'channel' for integers")
    return StoredQuantization(
        method="compressed-tensors",
        bits=bits,
        is_float=is_float,
        group_size=_group_size(weights.get("group_size")) if strategy == "group" else None,
        block=None if block is None else _block(block),
        has_zero_points=not weights.get("symmetric", True),
        is_in_order=order in ("static", "weight"),
        activation_bits=8 if inputs.get("num_bits") == 8 else 16,
    )


def _fp8(said: dict[str, Any]) -> StoredQuantization:
    block = said.get("weight_block_size")
    return StoredQuantization(method="fp8", bits=8, is_float=True, block=None if block is None else _block(block))


def _group_size(value: object) -> int | None:
    if value in (None, -1):
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value % GROUP_SIZE:
        raise _refusal("group_size", value, f"-1 or a multiple of {GROUP_SIZE}")
    return value


def _block(value: object) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(n, int) and n > 0 for n in value):
        raise _refusal("weight_block_size", value, "two numbers of at least 1")
    return value[0], value[1]


def _one_of(said: dict[str, Any], key: str, *allowed: Any) -> Any:
    value = said.get(key)
    if value not in allowed or type(value) is not type(allowed[0]):
        raise _refusal(key, value, " or ".join(map(repr, allowed)))
    return value


def _told(said: dict[str, Any]) -> dict[str, Any]:
    """Without nulls, which count as absent."""
    return {key: value for key, value in said.items() if value is not None}


def _refusal(key: str, value: object, what: str) -> ConfigError:
    return refusal(f"{key} of quantization_config", value, what)
