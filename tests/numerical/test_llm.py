"""The engine with every served family: greedy tokens equal transformers', whatever the batch, chunk, cache or pool."""

from __future__ import annotations

import asyncio
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from fixtures.tiny_tokenizer import write_tiny_tokenizer
from tiny_models import FAMILIES, GreedyOracle, load_oracle, make_checkpoint, make_prompts

from shoal_replica import LLM, AsyncLLM, SamplingParams, async_llm
from shoal_replica.build import resolve_config
from shoal_replica.errors import InvalidArgument
from shoal_replica.executor import SchedulerOutput, StepResult
from shoal_replica.grammars import Grammars
from shoal_replica.llm import RequestOutput
from shoal_replica.request import FinishReason
from shoal_replica.testing import num_reused_tokens

NUM_TOKENS = 20
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
LENGTHS = [1, 3, 15, 16, 17, 33, 64, 100]
# What the engine does with blocks of any model is shown with those that differ in their caches' shape, in which tokens
# a layer sees and in what computes a step; all families go through chunks, the prefix cache and preemption.
VARIETY = ["gemma3", "glm4-moe", "llama", "llama-heads-of-24", "mistral", "qwen3-moe"]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list, GreedyOracle]:
    """(folder, prompts, oracle of their greedy tokens); the last two prompts share a prefix."""
    folder = write_tiny_tokenizer(make_checkpoint(request.param, tmp_path_factory.mktemp("model")))
    prompts = make_prompts(LENGTHS)
    prompts.append(prompts[-1][:70] + prompts[3])
    return folder, prompts, GreedyOracle(load_oracle(folder), prompts, NUM_TOKENS)


def greedy_tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("chunk", [16, 64, 512])
def test_batched_in_chunks_and_again_from_the_cache(model, chunk):
    folder, prompts, oracle = model
    with LLM(str(folder), num_blocks=128, max_num_seqs=16, max_num_batched_tokens=chunk) as llm:
        first, again = (llm.generate(prompts, GREEDY) for _ in range(2))
        assert greedy_tokens(first) == oracle.answers(greedy_tokens(first))
        assert greedy_tokens(again) == greedy_tokens(first)
        assert all(o.num_cached_tokens == num_reused_tokens(o.num_prompt_tokens, NUM_TOKENS, 16) for o in again)


def test_preempted_for_want_of_blocks(model):
    """With a block size that leaves each step to torch's operators."""
    folder, prompts, oracle = model
    with LLM(str(folder), block_size=4, num_blocks=34, max_model_len=130, max_num_seqs=8) as llm:
        found = greedy_tokens(llm.generate(prompts, GREEDY))
        assert found == oracle.answers(found)
        assert llm.stats().num_preemptions > 0


@pytest.mark.parametrize("model", VARIETY, indirect=True)
def test_preempted_blocks_wait_in_host_memory(model):
    """They come back as they were, and less is recomputed than without host memory. Guesses would be counted, too, and
    how many there are depends on the time that steps take.
    """
    folder, prompts, oracle = model
    shape = {"block_size": 4, "num_blocks": 34, "max_model_len": 130, "max_num_seqs": 8, "num_speculative_tokens": 0}
    num_computed = []
    for num_host_blocks in (0, 100):
        with LLM(str(folder), num_host_blocks=num_host_blocks, **shape) as llm:
            steps = []
            llm.subscribe(lambda timing, steps=steps: steps.append(timing.output.num_tokens))
            found = greedy_tokens(llm.generate(prompts, GREEDY))
            assert found == oracle.answers(found)
            stats = llm.stats()
            assert stats.num_preemptions > 0
            assert (stats.num_blocks_in > 0) == (num_host_blocks > 0)
            num_computed.append(sum(steps))
    assert num_computed[1] < num_computed[0]


@pytest.mark.parametrize("model", VARIETY, indirect=True)
def test_several_sequences_share_the_prompt_and_draw_apart(model):
    folder, prompts, _ = model
    params = SamplingParams(max_tokens=8, temperature=1.0, n=4, seed=3, ignore_eos=True)
    with LLM(str(folder), num_blocks=64, max_num_seqs=3) as llm:
        (together,) = llm.generate(prompts[-1], params)
        assert len({tuple(o.token_ids) for o in together.outputs}) > 1
        (again, _) = llm.generate([prompts[-1], prompts[0]], params)
        assert [o.token_ids for o in again.outputs] == [o.token_ids for o in together.outputs]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(make_checkpoint("llama", tmp_path_factory.mktemp("tiny")))


def test_without_parameters_the_models_own_are_taken(tiny, tmp_path):
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    (folder / "generation_config.json").write_text('{"temperature": 0.0}')
    with LLM(str(folder), num_blocks=64) as llm:
        (own,), (greedy,) = llm.generate([5, 6, 7]), llm.generate([5, 6, 7], SamplingParams(temperature=0.0))
        assert own.token_ids == greedy.token_ids


def test_chats_are_their_templates_prompts(tiny):
    first, second = ([{"role": "user", "content": said}] for said in ("Hi", "What is a shoal?"))
    params = SamplingParams(max_tokens=6, temperature=0.0)
    with LLM(str(tiny), num_blocks=64) as llm:
        texts = (f"<s><|user|>\n{chat[0]['content']}</s>\n<|assistant|>\n" for chat in (first, second))
        prompts = [llm.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        expected = [output.token_ids for output in llm.generate(prompts, params)]
        outputs = llm.chat([first, second], params)
        assert [output.prompt_token_ids for output in outputs] == prompts
        assert [output.token_ids for output in outputs] == expected
        assert llm.chat(second, params)[0].token_ids == expected[1]
        assert llm.chat([], params) == []
        with pytest.raises(InvalidArgument, match="unknown role tool"):
            llm.chat([{"role": "tool", "content": "x"}])


def test_prompts_are_cut_at_their_beginning(tiny):
    (prompt,) = make_prompts([300], seed=2)
    with LLM(str(tiny), num_blocks=64) as llm:
        limit = llm.config.model.max_model_len
        for asked, max_tokens, count in (
            (5, 1, 5), (limit - 1, 1, limit - 1),
            (-1, 1, limit - 1), (-1, 50, limit - 50), (-1, None, limit - 1), (-1, 999, limit - 1),
        ):  # fmt: skip
            params = replace(GREEDY, max_tokens=max_tokens)
            (output,) = llm.generate([prompt], replace(params, truncate_prompt_tokens=asked))
            assert output.prompt_token_ids == tuple(prompt[-count:])
            assert output.token_ids == llm.generate([prompt[-count:]], params)[0].token_ids
            assert len(output.token_ids) == min(max_tokens or 1, limit - count)
        with pytest.raises(InvalidArgument, match=f"truncate_prompt_tokens: got {limit}; must be under {limit}"):
            llm.generate([prompt], replace(GREEDY, truncate_prompt_tokens=limit))


def test_what_ends_an_answer_may_be_part_of_it(tiny):
    letters = dict.fromkeys(llm_letters := (40, 41, 42), 100.0)
    with LLM(str(tiny), num_blocks=64) as llm:
        asked = SamplingParams(max_tokens=12, seed=3, ignore_eos=True, logit_bias=letters)
        whole = llm.generate([[5, 6]], asked)[0]
        assert set(whole.token_ids) <= set(llm_letters)
        stop = whole.text[3:5]
        end = whole.text.index(stop)
        for includes, text in ((False, whole.text[:end]), (True, whole.text[: end + len(stop)])):
            cut = replace(asked, stop=(stop,), include_stop_str_in_output=includes)
            output = llm.generate([[5, 6]], cut)[0].outputs[0]
            assert (output.text, output.stop_reason) == (text, stop)
        first = whole.token_ids[0]
        for includes, text in ((False, ""), (True, llm.tokenizer.decode([first]))):
            cut = replace(asked, stop_token_ids=(first,), include_stop_str_in_output=includes)
            output = llm.generate([[5, 6]], cut)[0]
            assert (output.text, output.token_ids) == (text, [first])
            assert output.outputs[0].stop_reason == first
        assert whole.outputs[0].stop_reason is None


def test_bad_prompts_are_refused_before_anything_runs(tiny):
    with LLM(str(tiny), num_blocks=8) as llm:
        for prompt in ("", [], [5] * 128, [10**6], [-1]):
            with pytest.raises(InvalidArgument, match="prompt"):
                llm.generate([[5, 6], prompt])
        with pytest.raises(InvalidArgument, match="params"):
            llm.generate(["a", "b"], [SamplingParams()])
        assert llm.generate([5, 6], GREEDY)[0].finish_reason is FinishReason.LENGTH
        assert llm.stats().num_allocated_blocks == 0


async def test_the_async_engine_streams_the_same_tokens_and_frees_what_is_left(tiny):
    prompts = make_prompts([5, 40])
    with LLM(str(tiny), num_blocks=64) as llm:
        expected = [o.token_ids for o in llm.generate(prompts, GREEDY)]
    engine = await AsyncLLM.start(resolve_config(str(tiny), num_blocks=64))
    try:

        async def run(prompt: list[int]) -> list[int]:
            return [t async for delta in engine.generate(tuple(prompt), GREEDY) for t in delta.token_ids]

        assert await asyncio.gather(*map(run, prompts)) == expected
        stream = engine.generate((5, 6, 7), SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True))
        async for _ in stream:
            break
        await stream.aclose()
        assert engine.engine.stats().num_allocated_blocks == 0
        engine.engine.check_invariants()
    finally:
        await engine.stop()


async def test_an_async_engine_that_cannot_start_leaves_nothing(tiny, monkeypatch):
    class NoGrammars(Grammars):
        def load(self):
            raise RuntimeError("no grammars")

    monkeypatch.setattr(async_llm, "Grammars", NoGrammars)
    with pytest.raises(RuntimeError, match="no grammars"):
        await AsyncLLM.start(resolve_config(str(tiny), num_blocks=64))
    assert [task for task in asyncio.all_tasks() if task.get_name() == "shoal-engine"] == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shoal-step")]


async def test_the_async_engine_ends_at_a_stop_string_as_the_offline_one_does(tiny):
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, n=2, ignore_eos=True)
    with LLM(str(tiny), num_blocks=64) as llm:
        (whole,) = llm.generate([5, 6, 7], params)
        stopping = replace(params, stop=(whole.text[5:8],))
        (expected,) = llm.generate([5, 6, 7], stopping)
    engine = await AsyncLLM.start(resolve_config(str(tiny), num_blocks=64))
    try:
        tokens: list[list[int]] = [[], []]
        reasons: list[FinishReason | None] = [None, None]
        async for delta in engine.generate((5, 6, 7), stopping):
            assert reasons[delta.index] is None
            tokens[delta.index].extend(delta.token_ids)
            reasons[delta.index] = delta.finish_reason
    finally:
        await engine.stop()
    assert tokens == [output.token_ids for output in expected.outputs]
    assert reasons == [output.finish_reason for output in expected.outputs]
    assert reasons[0] is FinishReason.STOP


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("when", ["new_sequences", "moves_out"])
def test_after_ctrl_c_an_llm_goes_on_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """It comes between a step's plan and its execution, which nobody could make good."""
    folder = write_tiny_tokenizer(make_checkpoint("llama", tmp_path / "model"))
    prompts = make_prompts([40] * 6)
    sizes = {"num_blocks": 5, "num_host_blocks": 20, "max_model_len": 80, "num_speculative_tokens": 0}

    def tokens(llm: LLM) -> list[list[int]]:
        return [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]

    with LLM(str(folder), **sizes) as undisturbed:
        expected = tokens(undisturbed)
    with LLM(str(folder), **sizes) as llm:
        execute, is_over = llm._executor.execute, False

        def interrupted(step: SchedulerOutput) -> StepResult:
            nonlocal is_over
            if not is_over and getattr(step, when):
                is_over = True
                signal.raise_signal(signal.SIGINT)
            return execute(step)

        monkeypatch.setattr(llm._executor, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tokens(llm)
        assert tokens(llm) == expected
        assert llm.stats().num_allocated_blocks == 0
