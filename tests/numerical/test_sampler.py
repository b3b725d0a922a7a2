"""The sampler: distributions, each filter and penalty against dumb versions, and independence from the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from shoal_replica.executor import TokenLogprobs
from shoal_replica.model.sampler import Sampler, SamplerRow, uniform
from shoal_replica.sampling_params import SamplingParams

VOCAB_SIZE = 40
NUM_DRAWS = 20_000
LOGITS = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 2


def make_row(
    params: SamplingParams, tokens: list[int] | None = None, *, seq_id: int = 0, index: int = 0, num_prompt: int = 1
) -> SamplerRow:
    return SamplerRow(seq_id, params, index, num_prompt, np.array(tokens or [1], np.int64))


def draws(params: SamplingParams, num_draws: int = NUM_DRAWS) -> NDArray[np.int64]:
    """Tokens drawn from LOGITS by sequences 0, 1, … of one request, in batches."""
    sampler = Sampler()
    rows = [make_row(params, index=index) for index in range(num_draws)]
    tokens: list[int] = []
    for start in range(0, num_draws, 1000):
        batch = rows[start : start + 1000]
        tokens += [s.token_id for s in sampler.sample(LOGITS.expand(len(batch), -1), batch)]
    return np.array(tokens)


def dumb_probabilities(params: SamplingParams, logits: Tensor = LOGITS) -> NDArray[np.float64]:
    """The distribution, computed one token at a time: temperature, then min-p, then top-k, then top-p."""
    scaled = logits.double().numpy() / params.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    probs[probs < params.min_p * probs.max()] = 0.0
    if params.top_k:
        kth = sorted(probs, reverse=True)[min(params.top_k, len(probs)) - 1]
        probs[probs < kth] = 0.0
    probs /= probs.sum()
    reached = 0.0
    kept = np.zeros_like(probs)
    for token in sorted(range(len(probs)), key=lambda t: (-probs[t], t)):
        if reached < params.top_p:
            kept[token] = probs[token]
        reached += probs[token]
    return kept / kept.sum()


def chi_square(tokens: NDArray[np.int64], probs: NDArray[np.float64]) -> tuple[float, float]:
    """Statistic, and its 99.9th percentile by Wilson and Hilferty; cells below 5 expected are pooled."""
    counts = np.bincount(tokens, minlength=len(probs)).astype(float)
    assert counts[probs == 0.0].sum() == 0, "a token outside the filter was drawn"
    expected = probs * len(tokens)
    large = expected >= 5
    pooled = (~large & (expected > 0)).any()
    observed = np.append(counts[large], counts[~large].sum()) if pooled else counts[large]
    expected = np.append(expected[large], expected[~large].sum()) if pooled else expected[large]
    freedom = len(expected) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    return statistic, limit


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=0.5),
        SamplingParams(seed=3, temperature=2.5),
        SamplingParams(seed=4, top_k=5),
        SamplingParams(seed=5, top_p=0.8),
        SamplingParams(seed=6, min_p=0.1),
        SamplingParams(seed=7, temperature=1.5, top_k=12, top_p=0.7, min_p=0.02),
    ],
    ids=repr,
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    statistic, limit = chi_square(draws(params), dumb_probabilities(params))
    assert statistic < limit


def test_chi_square_notices_a_wrong_temperature() -> None:
    statistic, limit = chi_square(draws(SamplingParams(seed=1)), dumb_probabilities(SamplingParams(temperature=1.1)))
    assert statistic > limit


@pytest.mark.parametrize("top_k", [0, 1, 3, VOCAB_SIZE, 10**9])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
def test_each_draw_inverts_the_dumb_distribution(top_k: int, top_p: float, min_p: float) -> None:
    """Not only in distribution: the same token, found by walking the distribution function in token-id order."""
    params = SamplingParams(seed=11, top_k=top_k, top_p=top_p, min_p=min_p, temperature=1.3)
    cdf = np.cumsum(dumb_probabilities(params))
    expected = [int(np.argmax(cdf > uniform(11, index, 1))) for index in range(300)]
    assert draws(params, 300).tolist() == expected


def test_ties_at_the_kth_logit_all_stay() -> None:
    logits = torch.tensor([[3.0, 5.0, 3.0, 3.0, 0.0]])
    params = SamplingParams(seed=0, top_k=2)
    seen = {Sampler().sample(logits, [make_row(params, index=i)])[0].token_id for i in range(200)}
    assert seen == {0, 1, 2, 3}


def test_uniform_is_pinned() -> None:
    """A draw must not change between versions or hosts, or resumed streams would diverge from their beginning."""
    assert uniform(0, 0, 0) == uniform(None, 0, 0)
    assert [uniform(1234, 5, 678), uniform(2**63 - 1, 0, 0)] == [0.5236101874227352, 0.18012487620181838]
    numbers = [uniform(seed, index, position) for seed in range(10) for index in range(10) for position in range(100)]
    assert len(set(numbers)) == len(numbers)
    assert 0.0 <= min(numbers) < 0.001
    assert 0.999 < max(numbers) < 1.0
    assert abs(float(np.mean(numbers)) - 0.5) < 0.01


def test_batch_does_not_matter() -> None:
    """A sequence draws the same tokens alone, among others, in any order, and by a fresh sampler."""
    generator = torch.Generator().manual_seed(3)
    kinds = [
        SamplingParams(seed=21),
        SamplingParams(temperature=0.0),
        SamplingParams(seed=22, top_k=4),
        SamplingParams(seed=23, top_p=0.6, repetition_penalty=1.4),
        SamplingParams(temperature=0.0, presence_penalty=1.5),
        SamplingParams(seed=24, min_p=0.1, frequency_penalty=0.7),
    ]
    logits = torch.randn(len(kinds), VOCAB_SIZE, generator=generator) * 3
    tokens = [torch.randint(VOCAB_SIZE, (6 + i,), generator=generator).tolist() for i in range(len(kinds))]
    rows = [make_row(p, t, seq_id=i, index=i, num_prompt=3) for i, (p, t) in enumerate(zip(kinds, tokens, strict=True))]
    together = [s.token_id for s in Sampler().sample(logits, rows)]
    alone = [Sampler().sample(logits[i : i + 1], [row])[0].token_id for i, row in enumerate(rows)]
    backwards = [s.token_id for s in Sampler().sample(logits.flip(0), rows[::-1])]
    assert together == alone == backwards[::-1]
    assert [together[1]] == logits[1].argmax(dim=-1, keepdim=True).tolist()


def test_position_and_index_change_the_draw() -> None:
    params = SamplingParams(seed=5, temperature=5.0)
    by_position = [Sampler().sample(LOGITS[None], [make_row(params, [1] * n)])[0].token_id for n in range(1, 30)]
    by_index = [Sampler().sample(LOGITS[None], [make_row(params, index=n)])[0].token_id for n in range(29)]
    assert len(set(by_position)) > 10
    assert len(set(by_index)) > 10
    assert by_position != by_index


def penalised_greedy(params: SamplingParams, tokens: list[int], num_prompt: int, logits: Tensor) -> int:
    """OpenAI's and CTRL's penalties, token by token; then the likeliest."""
    (values,) = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(torch.tensor([tokens]), logits[None])
    values = values.clone()
    for token in range(VOCAB_SIZE):
        count = tokens[num_prompt:].count(token)
        values[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return int(values.argmax())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, repetition_penalty=1.3),
        SamplingParams(temperature=0.0, repetition_penalty=0.5),
        SamplingParams(temperature=0.0, presence_penalty=0.9),
        SamplingParams(temperature=0.0, frequency_penalty=0.4),
        SamplingParams(temperature=0.0, frequency_penalty=-0.5, presence_penalty=1.0, repetition_penalty=1.1),
    ],
    ids=repr,
)
def test_penalties_over_a_generation(params: SamplingParams) -> None:
    """Counts grow with the sequence, and are the same when a preempted sequence is counted again."""
    tokens, sampler = [int(LOGITS.argmax()), 3, 3, 7], Sampler()
    num_prompt = len(tokens)
    for step in range(40):
        if step == 20:
            sampler.forget(0)
        expected = penalised_greedy(params, tokens, num_prompt, LOGITS)
        row = make_row(params, tokens, num_prompt=num_prompt)
        assert sampler.sample(LOGITS[None], [row])[0].token_id == expected, f"step {step}"
        tokens.append(expected)


def test_penalties_leave_the_logits_alone() -> None:
    logits = LOGITS[None].clone()
    Sampler().sample(logits, [make_row(SamplingParams(seed=0, repetition_penalty=2.0), [4, 5])])
    assert torch.equal(logits[0], LOGITS)


def test_logprobs_are_of_the_raw_logits() -> None:
    params = SamplingParams(seed=8, temperature=0.3, top_k=2, repetition_penalty=1.7, logprobs=3)
    rows = [
        make_row(SamplingParams(seed=9), seq_id=1),
        make_row(params, seq_id=2),
        make_row(SamplingParams(temperature=0.0, logprobs=0), seq_id=3),
    ]
    first, second, third = Sampler().sample(LOGITS.expand(3, -1), rows)
    expected = LOGITS.log_softmax(dim=-1)
    assert first.logprobs is None
    assert isinstance(second.logprobs, TokenLogprobs)
    assert isinstance(third.logprobs, TokenLogprobs)
    assert second.logprobs.token_id == second.token_id
    assert second.logprobs.logprob == pytest.approx(float(expected[second.token_id]))
    order = sorted(range(VOCAB_SIZE), key=lambda token: -LOGITS[token])[:3]
    assert [token for token, _ in second.logprobs.top] == order
    assert [value for _, value in second.logprobs.top] == pytest.approx(expected[order].tolist())
    assert third.logprobs == TokenLogprobs(order[0], pytest.approx(float(expected[order[0]])), ())


def test_tiny_temperature_is_greedy() -> None:
    tokens = draws(SamplingParams(seed=1, temperature=1e-300), 50)
    assert set(tokens.tolist()) == {int(LOGITS.argmax())}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=0, repetition_penalty=1e-300),
        SamplingParams(seed=0, repetition_penalty=1e300),
        SamplingParams(seed=0, temperature=1e300, repetition_penalty=1e-300),
        SamplingParams(seed=0, top_p=1e-300, min_p=1e-300),
        SamplingParams(seed=2**63 - 1, temperature=1e-300, top_k=2**63, repetition_penalty=1e300),
    ],
    ids=repr,
)
def test_extreme_parameters_still_give_a_token(params: SamplingParams) -> None:
    """One client's numbers must not stop the engine for all."""
    logits = LOGITS.clone()
    logits[3] = 0.0
    row = make_row(params, list(range(VOCAB_SIZE)))
    assert 0 <= Sampler().sample(logits[None], [row])[0].token_id < VOCAB_SIZE


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(seed=0, top_p=0.5)], ids=repr)
def test_broken_logits_raise(bad: float, params: SamplingParams) -> None:
    logits = LOGITS.repeat(2, 1)
    logits[1, 17] = bad
    rows = [make_row(params, seq_id=0), make_row(params, seq_id=1)]
    with pytest.raises(FloatingPointError):
        Sampler().sample(logits, rows)


def test_no_rows_no_samples() -> None:
    assert Sampler().sample(torch.empty(0, VOCAB_SIZE), []) == []


def test_an_answer_without_a_token_left_ends_by_one_that_the_model_has() -> None:
    """Checkpoints name end-of-sequence tokens beyond the vocabulary of the model's rows, or none."""
    params = SamplingParams(temperature=0.0, allowed_token_ids=(9,), bad_token_ids=((9,),))
    for ends, token_id in (((10**6, 7), 7), ((10**6,), 0), ((), 0)):
        (sample,) = Sampler(eos_token_ids=ends).sample(LOGITS[None], [make_row(params)])
        assert (sample.token_id, sample.is_cut) == (token_id, True)


def test_a_sequence_that_comes_back_under_a_number_has_its_own_choice() -> None:
    sampler = Sampler()
    for token_id in (9, 4):
        row = make_row(SamplingParams(temperature=0.0, allowed_token_ids=(token_id,)), seq_id=3)
        assert [sampler.sample(LOGITS[None], [row])[0].token_id for _ in range(2)] == [token_id] * 2
        sampler.forget(3)


def test_rows_that_take_long_count_as_progress() -> None:
    """Else ranks whose step compiles many forms are taken for hung."""
    sampler = Sampler()
    rows = [make_row(SamplingParams(repetition_penalty=1.2), seq_id=seq_id) for seq_id in range(3)]
    sampler.sample(torch.zeros(3, 8), rows)
    assert sampler.num_changed == 3
