"""Every sampling control refuses what is out of its range, by name."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from shoal_replica.errors import InvalidArgument
from shoal_replica.sampling_params import (
    MAX_BAD_SEQUENCES,
    MAX_BAD_TOKENS,
    MAX_BEAM_WIDTH,
    MAX_INTEGER,
    MAX_LOGPROBS,
    MAX_N,
    MAX_SEED,
    MAX_TOKEN_ID,
    MAX_TOP_K,
    SamplingParams,
)

GOOD: list[dict[str, Any]] = [
    {"max_tokens": 1},
    {"max_tokens": None},
    {"temperature": 0},
    {"temperature": 100.0},
    {"top_k": 0},
    {"top_k": MAX_TOP_K},
    {"top_p": 1},
    {"top_p": 1e-9},
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"presence_penalty": -2},
    {"frequency_penalty": 2},
    {"repetition_penalty": 0.01},
    {"seed": 0},
    {"seed": MAX_SEED},
    {"n": MAX_N},
    {"logprobs": 0},
    {"logprobs": MAX_LOGPROBS},
    {"stop": ("a",) * 16},
    {"stop_token_ids": (0, MAX_TOKEN_ID)},
    {"beam_width": 1},
    {"beam_width": MAX_BEAM_WIDTH},
    {"bad_token_ids": ((1,) * (MAX_BAD_TOKENS // MAX_BAD_SEQUENCES),) * MAX_BAD_SEQUENCES},
    {"length_penalty": 1},
]
BAD: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", 1.0),
    ("max_tokens", True),
    ("temperature", -0.001),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", np.float32("inf")),
    ("temperature", Fraction(10**400)),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_k", MAX_TOP_K + 1),
    ("top_p", 0),
    ("top_p", 1.0001),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", None),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("seed", -1),
    ("seed", MAX_SEED + 1),
    ("n", 0),
    ("n", MAX_N + 1),
    ("logprobs", -1),
    ("logprobs", MAX_LOGPROBS + 1),
    ("stop", ("",)),
    ("stop", (1,)),
    ("stop", ("a",) * 17),
    ("stop", ("a", "\ud800")),
    ("stop", 5),
    ("stop_token_ids", 5),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", ("x",)),
    ("stop_token_ids", (MAX_TOKEN_ID + 1,)),
    ("beam_width", 0),
    ("beam_width", 2.0),
    ("beam_width", MAX_BEAM_WIDTH + 1),
    ("length_penalty", 10.1),
    ("length_penalty", -10.1),
    ("length_penalty", math.nan),
    ("bad_token_ids", ((1,),) * (MAX_BAD_SEQUENCES + 1)),
    ("bad_token_ids", ((1,) * MAX_BAD_TOKENS, (1,))),
    ("length_penalty", 2.0),  # without beams
    ("early_stopping", True),
]


@pytest.mark.parametrize("fields", GOOD, ids=lambda fields: repr(fields)[:60])
def test_takes_what_is_in_range(fields: dict[str, Any]) -> None:
    [(name, value)] = fields.items()
    assert getattr(SamplingParams(**fields), name) == value


def test_no_stop_is_none() -> None:
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda value: repr(value)[:60])
def test_refuses_what_is_not(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: got ")


def test_a_huge_max_tokens_is_no_limit() -> None:
    assert SamplingParams(max_tokens=10**30).max_tokens == MAX_INTEGER


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="###").stop == ("###",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 5),
        ("temperature", 0.5),
        ("top_k", 3),
        ("top_p", 0.9),
        ("min_p", 0.1),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -0.1),
        ("repetition_penalty", 1.1),
        ("stop", ("a",)),
        ("stop_token_ids", tuple(range(65))),
    ],
)
def test_a_beam_search_refuses_what_it_would_ignore(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(beam_width=4, **{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("length_penalty", [-10.0, 0.0, 10])
def test_a_beam_search_takes_what_it_uses(length_penalty: float) -> None:
    for temperature in (0.0, 1.0):
        params = SamplingParams(
            beam_width=4,
            n=4,
            temperature=temperature,
            length_penalty=length_penalty,
            early_stopping=True,
            logprobs=20,
            stop_token_ids=(7,),
        )
        assert params.is_beam_search
        assert params.is_greedy
        assert not params.takes_likeliest
    assert not SamplingParams().is_beam_search


def test_questions() -> None:
    assert SamplingParams(temperature=0.0).is_greedy
    assert not SamplingParams().is_greedy
    assert not SamplingParams().has_penalties
    for field in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert SamplingParams(**{field: 0.5}).has_penalties


def test_crosses_processes() -> None:
    params = SamplingParams(n=3, stop=("x",), seed=7)
    assert pickle.loads(pickle.dumps(params)) == params


@pytest.mark.parametrize("max_tokens", [None, 4096, 10**6])
def test_a_prompt_is_cut_to_leave_room_only_for_tokens_that_can_come(max_tokens: int | None) -> None:
    params = SamplingParams(max_tokens=max_tokens, truncate_prompt_tokens=-1)
    assert params.truncate(tuple(range(100)), 4096) == tuple(range(100))
    assert len(params.truncate(tuple(range(5000)), 4096)) == 4095
    assert len(SamplingParams(max_tokens=4000, truncate_prompt_tokens=-1).truncate(tuple(range(100)), 4096)) == 96


def test_so_many_tokens_may_end_an_answer_and_no_more() -> None:
    assert SamplingParams(stop_token_ids=tuple(range(1024))).stop_token_ids
    with pytest.raises(InvalidArgument, match="stop_token_ids: got '1025 ids'; must be at most 1024"):
        SamplingParams(stop_token_ids=tuple(range(1025)))
