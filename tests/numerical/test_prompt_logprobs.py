"""Log-probabilities of prompts: those of transformers, whatever steps, batch, kernels, ranks and adapters, and although
blocks run short. The answers are those that the same prompts get without.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.tiny_adapters import load_adapted, make_adapter
from fixtures.tiny_tokenizer import write_tiny_tokenizer
from tiny_models import load_oracle, make_checkpoint, make_prompts

from shoal_replica import LLM, SamplingParams
from shoal_replica.executor import MAX_SCORED_TOKENS, TokenLogprobs
from shoal_replica.llm import RequestOutput

TOP = 3
PLAIN = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
SCORED = replace(PLAIN, prompt_logprobs=TOP)
PROMPTS = make_prompts([1, 2, 17, 64, 65, 100, 200], seed=5)


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3-moe", "mistral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(make_checkpoint(request.param, tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(make_checkpoint("llama-9-heads", tmp_path_factory.mktemp("model")))


def check(scored: list[TokenLogprobs], oracle: Any, prompt: list[int], num_top: int = TOP) -> None:
    """Each entry against the model's own distribution after the tokens before; near ties may change places."""
    with torch.inference_mode():
        rows = oracle(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    assert [each.token_id for each in scored] == prompt[1:]
    for row, each in zip(rows, scored, strict=False):
        assert each.logprob == pytest.approx(float(row[each.token_id]), abs=1e-3)
        assert [logprob for _, logprob in each.top] == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-3)
        assert [logprob for _, logprob in each.top] == pytest.approx(row[[i for i, _ in each.top]].tolist(), abs=1e-3)


def check_all(outputs: list[RequestOutput], oracle: Any, plain: list[RequestOutput]) -> None:
    for prompt, output, expected in zip(PROMPTS, outputs, plain, strict=True):
        check(output.prompt_logprobs, oracle, prompt)
        assert output.token_ids == expected.token_ids
        assert output.num_cached_tokens == 0


@pytest.mark.parametrize("chunk", [7, 512])
@pytest.mark.parametrize("block_size", [16, 8])  # native kernels, torch's operators
def test_they_are_those_of_transformers(folder, chunk, block_size):
    oracle = load_oracle(folder)
    with LLM(str(folder), num_blocks=128, block_size=block_size, max_num_seqs=7, max_num_batched_tokens=chunk) as llm:
        plain = llm.generate(PROMPTS, PLAIN)
        assert not any(output.prompt_logprobs for output in plain)
        check_all(llm.generate(PROMPTS, SCORED), oracle, plain)  # the same prompts are cached by now


def test_steps_score_so_many_tokens_and_not_more(llama):
    """Others go on meanwhile, and find cached what plain prompts leave."""
    with LLM(str(llama), num_blocks=256, max_num_seqs=16) as llm:
        steps = []
        llm.subscribe(lambda timing: steps.append(timing.output))
        plain = llm.generate(PROMPTS, PLAIN)
        mixed = llm.generate(PROMPTS * 2, [SCORED] * len(PROMPTS) + [PLAIN] * len(PROMPTS))
        check_all(mixed[: len(PROMPTS)], load_oracle(llama), plain)
        assert [output.token_ids for output in mixed[len(PROMPTS) :]] == [output.token_ids for output in plain]
        assert all(output.num_cached_tokens > 0 for output in mixed[len(PROMPTS) :] if output.num_prompt_tokens > 32)
        num_scored = [sum(share.num_scored for share in step.scheduled) for step in steps]
        assert max(num_scored) == MAX_SCORED_TOKENS
        assert sum(num_scored) == sum(len(prompt) - 1 for prompt in PROMPTS)


def test_they_survive_preemption(llama):
    with LLM(str(llama), block_size=4, num_blocks=60, max_model_len=230, max_num_seqs=8) as llm:
        params = replace(SCORED, max_tokens=20)
        plain = llm.generate(PROMPTS, replace(params, prompt_logprobs=None))
        before = llm.stats().num_preemptions
        outputs = llm.generate(PROMPTS, params)
        assert llm.stats().num_preemptions > before
        check_all(outputs, load_oracle(llama), plain)
        assert llm.stats().num_cached_blocks < 60


def test_scored_prompts_leave_the_cache_as_it_was(llama):
    with LLM(str(llama), num_blocks=64) as llm:
        llm.generate(PROMPTS[3:5], PLAIN)
        before = llm.stats().num_cached_blocks
        llm.generate([PROMPTS[5], PROMPTS[6]], SCORED)
        assert llm.stats().num_cached_blocks == before
        again, _ = llm.generate([PROMPTS[4], PROMPTS[5]], PLAIN)
        assert again.num_cached_tokens == 64


def test_several_sequences_have_one_prompt(llama):
    params = replace(SCORED, temperature=1.0, n=4, seed=3, prompt_logprobs=0)
    with LLM(str(llama), num_blocks=64, max_num_seqs=3) as llm:  # one of them waits for a slot
        (plain,) = llm.generate([PROMPTS[5]], replace(params, prompt_logprobs=None))
        (output,) = llm.generate([PROMPTS[5]], params)
        assert [each.token_ids for each in output.outputs] == [each.token_ids for each in plain.outputs]
        check(output.prompt_logprobs, load_oracle(llama), PROMPTS[5], num_top=0)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["tensor", "pipeline"])
def test_ranks_score_as_the_whole_model(llama, sizes):
    ranks = dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), sizes, strict=True))
    with LLM(str(llama), num_blocks=128, **ranks) as llm:
        check_all(llm.generate(PROMPTS, SCORED), load_oracle(llama), llm.generate(PROMPTS, PLAIN))


def test_adapters_score_as_they_generate(llama, tmp_path):
    adapters = {name: str(make_adapter(tmp_path / name, llama, seed)) for seed, name in enumerate(("red", "blue"))}
    prompts, names = [PROMPTS[5], PROMPTS[4], PROMPTS[5]], ["red", "", "blue"]
    with LLM(str(llama), num_blocks=128, adapters=adapters) as llm:
        outputs = llm.generate(prompts, SCORED, adapter=names)
    for prompt, name, output in zip(prompts, names, outputs, strict=True):
        oracle = load_adapted(llama, Path(adapters[name])) if name else load_oracle(llama)
        check(output.prompt_logprobs, oracle, prompt)
