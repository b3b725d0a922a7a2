"""Beam search on a real engine: the beams are those of transformers, whatever batch, chunk, cache and pool."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.tiny_tokenizer import write_tiny_tokenizer
from tiny_models import EOS_TOKEN_ID, load_oracle, make_checkpoint, make_prompts

from shoal_replica import LLM, SamplingParams
from shoal_replica.errors import InvalidArgument
from shoal_replica.request import FinishReason

PROMPTS = make_prompts([1, 5, 16, 17, 40, 63], seed=4)
PROMPTS.append(PROMPTS[-1][:50] + PROMPTS[1])  # shares a prefix with the one before
Oracle = Callable[..., list[tuple[list[int], float]]]


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2", "qwen3", "qwen3-moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(make_checkpoint(request.param, tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    model = load_oracle(folder)
    known: dict[str, list[tuple[list[int], float]]] = {}

    def beams(prompt: list[int], params: SamplingParams, eos: list[int] | None) -> list[tuple[list[int], float]]:
        """transformers' beams, (output tokens, score), best first."""
        asked = repr((prompt, params, eos))
        if asked not in known:
            known[asked] = generate(prompt, params, eos)
        return known[asked]

    def generate(prompt: list[int], params: SamplingParams, eos: list[int] | None) -> list[tuple[list[int], float]]:
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=params.max_tokens,
            do_sample=False,
            num_beams=params.beam_width,
            num_return_sequences=params.n,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=eos,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert isinstance(output.sequences_scores, torch.Tensor)
        beams = [_cut(sequence[len(prompt) :].tolist(), eos or []) for sequence in output.sequences]
        return list(zip(beams, output.sequences_scores.tolist(), strict=True))

    return beams


def _cut(token_ids: list[int], eos: list[int]) -> list[int]:
    """Without the padding after an end."""
    for place, token_id in enumerate(token_ids):
        if token_id in eos:
            return token_ids[: place + 1]
    return token_ids


def beam_params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "beam_width": 4, "n": 4, "ignore_eos": True} | changes)


def tokens(outputs: list[Any]) -> list[list[list[int]]]:
    return [[sequence.token_ids for sequence in output.outputs] for output in outputs]


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("width", [2, 4, 7])
def test_beams_equal_those_of_transformers(folder, oracle, width, chunk):
    params = beam_params(beam_width=width, n=width)
    expected = [[beam for beam, _ in oracle(prompt, params, None)] for prompt in PROMPTS]
    with LLM(str(folder), num_blocks=512, max_num_seqs=16, max_num_batched_tokens=chunk) as llm:
        assert tokens(llm.generate(PROMPTS, params)) == expected
        again = llm.generate(PROMPTS, params)  # prompts now come from the cache
        assert tokens(again) == expected
        assert again[-1].num_cached_tokens >= 48


@pytest.mark.parametrize(
    "changes",
    [
        {"length_penalty": 0.0},
        {"length_penalty": 2.0},
        {"length_penalty": -1.0},
        {"early_stopping": True},
        {"early_stopping": True, "length_penalty": 0.5, "n": 2},
        {"max_tokens": 1},
    ],
    ids=str,
)
def test_beams_end_as_those_of_transformers(folder, oracle, changes):
    """By tokens that end them; with random weights any token may, so a twentieth of the vocabulary does."""
    ends = list(range(3, 320, 20))
    params = beam_params(**changes, stop_token_ids=ends, ignore_eos=False)
    with LLM(str(folder), num_blocks=512, max_num_seqs=64) as llm:
        outputs = llm.generate(PROMPTS, params)
    expected = [[beam for beam, _ in oracle(prompt, params, [EOS_TOKEN_ID, *ends])] for prompt in PROMPTS]
    assert tokens(outputs) == expected
    if changes.get("length_penalty", 1.0) < 1.0 or "early_stopping" in changes:  # others may prefer to go on
        assert FinishReason.STOP in {sequence.finish_reason for output in outputs for sequence in output.outputs}
    for output in outputs:
        for sequence in output.outputs:
            ended = sequence.token_ids[-1] in {EOS_TOKEN_ID, *ends}
            assert sequence.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)


@pytest.mark.parametrize("count", [0, 3, 20])  # fewer and more than the search itself needs
def test_log_probabilities_sum_up_to_the_score(folder, oracle, count):
    params = beam_params(logprobs=count)
    with LLM(str(folder), num_blocks=64) as llm:
        (output,) = llm.generate(PROMPTS[3], params)
    for sequence, (beam, score) in zip(output.outputs, oracle(PROMPTS[3], params, None), strict=True):
        assert [entry.token_id for entry in sequence.logprobs] == beam
        assert math.isclose(sum(entry.logprob for entry in sequence.logprobs) / len(beam), score, abs_tol=1e-4)
        assert all(len(entry.top) == count for entry in sequence.logprobs)


def test_beams_beside_draws_and_greedy_answers(folder, oracle):
    """In one batch with others, which get what they get alone."""
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=12, seed=5, n=3, ignore_eos=True)
    beams = beam_params()
    mixed = [greedy, beams, drawn, beams, greedy, beams, drawn]
    with LLM(str(folder), num_blocks=256, max_num_seqs=9, max_num_batched_tokens=32) as llm:
        together = tokens(llm.generate(PROMPTS, mixed))
        assert together == [tokens(llm.generate(p, one))[0] for p, one in zip(PROMPTS, mixed, strict=True)]
    for place in (1, 3, 5):
        assert together[place] == [beam for beam, _ in oracle(PROMPTS[place], beams, None)]


def test_beams_preempted_for_want_of_blocks_begin_again(folder, oracle):
    params = beam_params(max_tokens=30)
    expected = [[beam for beam, _ in oracle(prompt, params, None)] for prompt in PROMPTS]
    with LLM(str(folder), block_size=4, num_blocks=60, max_model_len=100, max_num_seqs=16) as llm:
        assert tokens(llm.generate(PROMPTS, params)) == expected
        assert llm.stats().num_preemptions > 0
        assert llm.stats().num_allocated_blocks == 0


def test_beams_that_do_not_fit_are_refused(folder):
    with LLM(str(folder), block_size=4, num_blocks=40, max_model_len=100, max_num_seqs=6) as llm:
        with pytest.raises(InvalidArgument, match="beam_width: got 7; must be at most 6"):
            llm.generate(PROMPTS[0], beam_params(beam_width=7))
        # 40 tokens fill 10 blocks. Of 21 more tokens 20 are computed, in 5 blocks for each of 6 beams.
        assert llm.generate(PROMPTS[4], beam_params(beam_width=6, max_tokens=21))
        with pytest.raises(
            InvalidArgument,
            match="max_tokens: got 22; must be lower: 6 beams of up to 22 tokens need 46 KV blocks of the",
        ):
            llm.generate(PROMPTS[4], beam_params(beam_width=6, max_tokens=22))
