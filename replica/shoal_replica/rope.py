"""Rotary embeddings as a Hugging Face ``config.json`` describes them, in either of its spellings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal_replica.config_fields import fields_of, number, numbers, size
from shoal_replica.errors import ConfigError, shown

LOCAL_THETA = "rope_local_base_freq"
NAME_OF_SHARE = "partial_rotary_factor"
ORIGINAL = "original_max_position_embeddings"
DEFAULT_LENGTH = 2048
DEFAULT_THETA = 10000.0
WINDOW, FULL = "sliding_attention", "full_attention"  # kinds of layers, which may be rotated differently


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embeddings (Su et al. 2021).

    Attributes:
        theta: the base.
        size: how much of a head is rotated; None for all of it.
        scaling: how frequencies are scaled (see ``rotary_frequencies``); None for not at all.
        window_theta: the base in layers with a window, without scaling; None where they are rotated like the others.
        max_model_len: the longest sequences that they are made for.
    """

    theta: float
    size: int | None
    scaling: dict[str, Any] | None
    window_theta: float | None
    max_model_len: int


def in_one_spelling(raw: dict[str, Any]) -> dict[str, Any]:
    """``raw`` with its rotary embeddings in ``rope_parameters`` alone. As in transformers, a ``rope_scaling`` counts in
    their place; where they are given by kind of layer, it is added to those of layers that see all tokens.

    Raises:
        ConfigError: they have a number that ``rope_scaling`` lacks, so that another would count.
    """
    given, scaling = fields_of(raw, "rope_parameters"), fields_of(raw, "rope_scaling")
    rest = {key: value for key, value in raw.items() if key != "rope_scaling"}
    if not scaling:
        return rest
    if not _is_by_kind(scaling):
        scaling = scaling | {"rope_type": _kind(scaling)}
        if _is_by_kind(given):
            return rest | {"rope_parameters": given | {FULL: fields_of(given, FULL) | scaling}}
    for key, default in (("rope_theta", DEFAULT_THETA), (NAME_OF_SHARE, 1.0)):
        counts = raw.get(key, default)
        if given.get(key) not in (None, counts) and scaling.get(key) is None:
            where = f"rope_parameters in config.json has {key} {shown(given[key])}, and rope_scaling beside it has none"
            raise ConfigError(f"model: {where}; must be in rope_scaling, which counts alone")
    return rest | {"rope_parameters": scaling}


def read_rope(raw: dict[str, Any], head_size: int, share: float = 1.0, asked_len: int | None = None) -> Rope:
    """Read ``rope_parameters``.

    Args:
        share: of each head that is rotated.
        asked_len: the longest sequence that there will be, if that is not left to the model.

    Raises:
        ConfigError: the type is not known, lacks one of its numbers, or the head cannot be cut so.
    """
    rope, window = _by_kind(raw)
    theta = number(rope, "rope_theta", number(raw, "rope_theta", DEFAULT_THETA))
    window_theta = None if window is None else number(window, "rope_theta", theta)
    length = size(raw, "max_position_embeddings", DEFAULT_LENGTH)
    rotated = int(head_size * share)
    if not 0 < rotated <= head_size or rotated % 2 or head_size % 2:
        raise ConfigError(f"model: partial_rotary_factor in config.json rotates {rotated} of a head's {head_size}")
    own_size = None if rotated == head_size else rotated
    kind = _kind(rope)
    if kind == "default":
        return Rope(theta, own_size, None, None if window_theta == theta else window_theta, length)
    scaling = _scaling(kind, _completed(kind, rope, raw, length))
    if kind == "yarn":
        scaling["truncate"] = bool(rope.get("truncate", True))
        length = max(length, int(scaling["factor"] * scaling[ORIGINAL]))
    elif kind == "longrope":
        is_long = (asked_len or length) > scaling[ORIGINAL]
        divisors = [numbers(rope, name, rotated // 2) for name in ("short_factor", "long_factor")]
        scaling["divisors"] = divisors[is_long]
    return Rope(theta, own_size, scaling, window_theta, length)


def _by_kind(raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The parameters of layers that see all tokens, and those of layers with a window, None where they are the same."""
    rope = fields_of(raw, "rope_parameters")
    if not _is_by_kind(rope):
        return rope, {"rope_theta": raw[LOCAL_THETA]} if LOCAL_THETA in raw else None
    full, window = fields_of(rope, FULL), fields_of(rope, WINDOW)
    if full == window:
        return full, None
    if _kind(window) != "default":
        raise ConfigError(f"model: rope type {_kind(window)!r} is not supported in layers with a window alone")
    return full, {"rope_theta": raw.get(LOCAL_THETA)} | window


def _is_by_kind(rope: dict[str, Any]) -> bool:
    return FULL in rope or WINDOW in rope


def _kind(rope: dict[str, Any]) -> str:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind == "su" or (kind == "yarn" and "short_factor" in rope):  # names that the first checkpoints of Phi-3 have
        return "longrope"
    return kind


def _completed(kind: str, rope: dict[str, Any], raw: dict[str, Any], length: int) -> dict[str, Any]:
    """With the numbers that transformers takes from elsewhere, in its order."""
    if ORIGINAL not in _NEEDED.get(kind, ()):
        return rope
    original = number({ORIGINAL: raw.get(ORIGINAL) or rope.get(ORIGINAL)}, ORIGINAL, length)
    rope = rope | {ORIGINAL: original}
    if kind == "longrope" or (kind == "yarn" and "factor" in rope):  # which null leaves to the lengths
        rope["factor"] = rope.get("factor") or length / original
    return rope


def _scaling(kind: str, rope: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a type that scales, checked."""
    if kind not in _NEEDED:
        raise ConfigError(f"model: rope type {kind!r} is not one of {', '.join(('default', *_NEEDED))}")
    optional = [name for name in _OPTIONAL.get(kind, ()) if rope.get(name) is not None]
    names = (*_NEEDED[kind], *optional)
    return {"rope_type": kind} | {name: number(rope, name, owner=f"rope type {kind!r}") for name in names}


# The numbers that each type needs, and those that it may have.
_NEEDED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": (ORIGINAL, "factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (ORIGINAL, "factor"),
    "longrope": (ORIGINAL, "factor"),
}
_OPTIONAL = {
    "yarn": ("attention_factor", "attn_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "longrope": ("attention_factor",),
}
