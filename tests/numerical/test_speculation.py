"""Speculative decoding on real engines: the answers are those without it, in fewer steps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixtures.tiny_adapters import make_adapter
from fixtures.tiny_tokenizer import write_tiny_tokenizer
from tiny_models import make_checkpoint, make_prompts

from shoal_replica import LLM, SamplingParams
from shoal_replica.checkpoint import DEMO_MODEL
from shoal_replica.executor import SchedulerOutput
from shoal_replica.llm import RequestOutput
from shoal_replica.model import step_sampler
from shoal_replica.prompt_lookup import MAX_MATCH, look_up
from shoal_replica.step_costs import StepCosts
from shoal_replica.structured_output import StructuredOutput

NUM_DRAFTS = 6
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.9, seed=3)
PROMPTS = [prompt * 2 for prompt in make_prompts([3, 9, 16, 30], seed=4)]
PARAMS = {
    "greedy": GREEDY,
    "scores": replace(GREEDY, logprobs=2),
    "drawn": replace(DRAWN, top_p=0.9, logprobs=0),
    "penalties": replace(DRAWN, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.1),
    "several": replace(DRAWN, n=3, max_tokens=20),
    "ends": replace(GREEDY, ignore_eos=False, min_tokens=5, stop_token_ids=tuple(range(0, 200, 3))),
    "choice": replace(GREEDY, allowed_token_ids=(5, 6, 7, 8), bad_token_ids=((5,), (6, 7)), logit_bias=((8, 1.0),)),
    "form": replace(GREEDY, structured_output=StructuredOutput("regex", "(ab|cd){10,30}"), ignore_eos=False),
}


@pytest.fixture(autouse=True)
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens cost next to nothing, so that every draft is tried, whatever the machine. Random models hardly ever
    repeat themselves, so drafts come from what was answered without, with some errors.
    """
    monkeypatch.setattr(
        StepCosts, "of_decodes", lambda _, least, most: [1.0 + i / 1e6 for i in range(most - least + 1)]
    )
    monkeypatch.setattr(step_sampler, "look_up", look_up_answers)
    KNOWN.clear()


KNOWN: list[list[int]] = []


def look_up_answers(token_ids: Any, max_drafts: int, ends: Collection[int]) -> tuple[int, tuple[int, ...]]:
    tokens = token_ids.tolist()
    for known in KNOWN:
        if known[: len(tokens)] == tokens and len(known) > len(tokens):
            drafts = known[len(tokens) :][:max_drafts]
            wrong = len(tokens) % 7
            return MAX_MATCH, tuple(drafts[:wrong] + [token_id ^ 1 for token_id in drafts[wrong:]])
    return look_up(token_ids, max_drafts, ends)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(make_checkpoint("llama", tmp_path_factory.mktemp("llama")))


def answers(
    folder: Path | str, prompts: Any, params: Any, num_drafts: int, adapter: Any = "", **settings: Any
) -> tuple[list[RequestOutput], list[SchedulerOutput], int]:
    """Outputs, steps, and how many drafts were right."""
    steps: list[SchedulerOutput] = []
    settings = {"num_blocks": 128, "max_num_seqs": 8} | settings
    with LLM(str(folder), num_speculative_tokens=num_drafts, **settings) as llm:
        llm.subscribe(lambda timing: steps.append(timing.output))
        outputs = llm.generate(prompts, params, adapter)
        stats = llm.stats()
        assert stats.num_allocated_blocks == 0
        assert stats.num_draft_tokens == sum(len(s.drafts) for step in steps for s in step.scheduled)
        return outputs, steps, stats.num_accepted_tokens


def compare(
    folder: Path | str, prompts: Any, params: Any, is_exact: bool = True, **settings: Any
) -> tuple[list[SchedulerOutput], int]:
    """Check that answers do not depend on drafts; to the last bit, if ``is_exact``. Returns the steps with drafts, and
    how many of these were right.
    """
    plain, steps, _ = answers(folder, prompts, params, 0, **settings)
    KNOWN[:] = [[*output.prompt_token_ids, *o.token_ids] for output in plain for o in output.outputs]
    outputs, fewer, num_accepted = answers(folder, prompts, params, NUM_DRAFTS, **settings)
    assert [[o.token_ids for o in output.outputs] for output in outputs] == [
        [o.token_ids for o in output.outputs] for output in plain
    ]
    if is_exact:
        assert [output.outputs for output in outputs] == [output.outputs for output in plain]
    assert len(fewer) <= len(steps)
    return fewer, num_accepted


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", sorted(PARAMS))
def test_answers_are_the_same_to_the_last_bit(llama: Path, name: str, dtype: str) -> None:
    _, num_accepted = compare(llama, PROMPTS, PARAMS[name], dtype=dtype)
    assert num_accepted > 20


@pytest.mark.parametrize("min_tokens", [0, 9])
def test_nothing_is_told_beyond_a_stop_string(min_tokens: int) -> None:
    """Of a trained model, which counts on: neither tokens nor scores, wherever in a step's tokens it is completed."""
    prompts = ["Count: 1, 2, 3, 1, 2, 3, 1, 2, 3,"] * 3
    params = [replace(GREEDY, stop=(stop,), logprobs=1, min_tokens=min_tokens) for stop in (", 2", "3, 1", "1")]
    _, num_accepted = compare(DEMO_MODEL, prompts, params, max_model_len=128)
    assert num_accepted > 0


def test_all_together_in_one_batch_and_with_few_blocks(llama: Path) -> None:
    prompts = [prompt for prompt in PROMPTS for _ in PARAMS]
    params = [params for _ in PROMPTS for params in PARAMS.values()]
    steps, num_accepted = compare(llama, prompts, params, dtype="float32", max_num_seqs=16)
    assert num_accepted > 500
    assert any(len({len(s.drafts) for s in step.scheduled}) > 2 for step in steps)
    compare(llama, prompts, params, dtype="float32", num_blocks=40, block_size=4, max_model_len=120, is_exact=False)


@pytest.mark.parametrize("quantization", ["int8", "int4", "w8a8", "w4a8"])
def test_with_rounded_weights(llama: Path, quantization: str) -> None:
    _, num_accepted = compare(llama, PROMPTS, GREEDY, quantization=quantization)
    assert num_accepted > 0


@pytest.mark.parametrize("block_size", [8, 16])  # torch's operators, native kernels
@pytest.mark.parametrize("family", ["qwen3-moe", "mistral", "phi3"])
def test_other_families(family: str, block_size: int, tmp_path: Path) -> None:
    folder = write_tiny_tokenizer(make_checkpoint(family, tmp_path))
    _, num_accepted = compare(folder, PROMPTS, GREEDY, is_exact=False, block_size=block_size, dtype="float32")
    assert num_accepted > 0


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["tensor", "pipeline"])
def test_on_several_ranks(llama: Path, sizes: tuple[int, int]) -> None:
    prompts, params = PROMPTS, [GREEDY, PARAMS["choice"], DRAWN, PARAMS["form"]]
    settings = {"tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1], "dtype": "float32"}
    _, num_accepted = compare(llama, prompts, params, **settings)
    assert num_accepted > 0


def test_each_row_has_its_sequences_adapter(llama: Path, tmp_path: Path) -> None:
    adapters = {name: str(make_adapter(tmp_path / name, llama, seed=i)) for i, name in enumerate(("a", "b"))}
    names = ["", "b", "a", "b"]
    steps, num_accepted = compare(llama, PROMPTS, GREEDY, dtype="float32", adapters=adapters, adapter=names)
    assert num_accepted > 0
    assert any(len(step.scheduled) > 2 and any(s.drafts for s in step.scheduled) for step in steps)


def test_text_that_repeats_itself_takes_a_fraction_of_the_steps() -> None:
    """Of a trained model."""
    prompts, params = ["Count: 1, 2, 3, 1, 2, 3, 1, 2, 3,"] * 2, [GREEDY, DRAWN]
    plain, steps, _ = answers(DEMO_MODEL, prompts, params, 0, max_model_len=128)
    outputs, fewer, _ = answers(DEMO_MODEL, prompts, params, NUM_DRAFTS, max_model_len=128)
    assert [output.outputs for output in outputs] == [output.outputs for output in plain]
    assert sum(any(s.seq_id == 0 for s in step.scheduled) for step in fewer) < 0.4 * len(steps)
