"""What a checkpoint recommends stands in for what a request leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal_replica.errors import ConfigError
from shoal_replica.sampling_defaults import DEFAULTED, sampling_defaults, with_defaults
from shoal_replica.sampling_params import SamplingParams


def told(folder: Path, **told: Any) -> dict[str, Any]:
    (folder / "generation_config.json").write_text(json.dumps(told))
    return sampling_defaults(folder)


def test_of_a_file_the_parameters_of_sampling_are_taken(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    assert told(tmp_path, do_sample=True, temperature=0.6, top_p=0.95, top_k=20, min_p=None, max_new_tokens=9) == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
    }
    assert told(tmp_path, top_k=-1) == {"top_k": 0}


@pytest.mark.parametrize("name", sorted(DEFAULTED))
def test_a_value_out_of_its_limits_is_a_config_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"generation_config.json: {name}: got -3"):
        told(tmp_path, **{name: -3})


def test_only_what_is_left_out_is_taken() -> None:
    defaults, given = {"temperature": 0.6, "top_k": 20}, SamplingParams(temperature=0.0)
    assert with_defaults(given, {"top_k", "top_p"}, defaults) == SamplingParams(temperature=0.0, top_k=20)
    assert with_defaults(given, (), defaults) is given


def test_a_beam_search_has_none() -> None:
    beams = SamplingParams(beam_width=2)
    assert with_defaults(beams, DEFAULTED, {"temperature": 0.6, "repetition_penalty": 1.1}) is beams
