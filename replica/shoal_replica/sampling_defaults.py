"""Parameters of sampling that a checkpoint recommends, for requests that leave them out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal_replica.errors import ConfigError, InvalidArgument
from shoal_replica.model_config import read_json
from shoal_replica.sampling_params import SamplingParams

GENERATION_CONFIG = "generation_config.json"
DEFAULTED = frozenset({"temperature", "top_k", "top_p", "min_p", "repetition_penalty"})
"""The parameters that may be recommended: those that vLLM takes from the file, but for ``max_new_tokens``."""


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """What the checkpoint in ``folder`` recommends, by parameter. Raises ConfigError for values out of their limits."""
    told = read_json(folder / GENERATION_CONFIG) or {}
    defaults = {name: value for name, value in told.items() if name in DEFAULTED and value is not None}
    if defaults.get("top_k") == -1:  # another word for all
        defaults["top_k"] = 0
    try:
        SamplingParams(**defaults)
    except InvalidArgument as error:
        raise ConfigError(f"model: {folder / GENERATION_CONFIG}: {error}") from None
    return defaults


def with_defaults(params: SamplingParams, left_out: Collection[str], defaults: Mapping[str, Any]) -> SamplingParams:
    """``params`` with the ``defaults`` of those that were ``left_out``. A beam search draws nothing, and has none."""
    given = {name: value for name, value in defaults.items() if name in left_out}
    return params if not given or params.is_beam_search else replace(params, **given)
