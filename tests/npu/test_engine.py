"""The whole engine on the NPU: the CPU's tokens, with and without graphs, and what it refuses to start with."""

from __future__ import annotations

import logging
import re
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures.tiny_adapters import make_adapter
from npu_models import FAMILIES, GREEDY, NUM_SHARED, NUM_TOKENS, Expected, make_folder, make_prompts
from simulated_npu import graphs
from tiny_models import SHAPE, make_checkpoint

from shoal_kernels import npu
from shoal_replica import LLM, SamplingParams, step_plan
from shoal_replica.build import build_engine, build_executor, resolve_config
from shoal_replica.checkpoint import DEMO_MODEL
from shoal_replica.config import ParallelConfig
from shoal_replica.errors import ConfigError
from shoal_replica.executor import SchedulerOutput
from shoal_replica.memory_plan import GRAPH_BYTES, WORKSPACE_BYTES
from shoal_replica.model import npu_decoder
from shoal_replica.model.npu_decoder import NpuDecoder
from shoal_replica.model.sampler import Sampler, SamplerRow
from shoal_replica.prefix_cache import hash_blocks
from shoal_replica.step_costs import StepCosts
from shoal_replica.structured_output import StructuredOutput
from shoal_replica.testing import make_request, num_reused_tokens

MIB = 2**20
BLOCK_BYTES = 2 * 2 * 2 * 128 * 128 * 2  # keys and values, layers, KV heads, tokens, head size, bfloat16


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    folder = make_folder(request.param, tmp_path_factory.mktemp("model"))
    return folder, Expected.of(folder, make_prompts())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder("llama", tmp_path_factory.mktemp("llama"))


def decoder(llm: LLM) -> NpuDecoder:
    return llm._executor._decoder


def test_tokens_are_the_cpus(model: tuple[Path, Expected]) -> None:
    """In one batch, through graphs; then again from the prefix cache, in chunks."""
    folder, expected = model
    prompts = make_prompts()
    with LLM(str(folder), device="npu", num_blocks=32, max_num_seqs=8, max_num_batched_tokens=160) as llm:
        assert decoder(llm).graph_sizes == (1, 2, 4, 8)
        before = graphs.state.num_replays
        expected.check(llm.generate(prompts, GREEDY))
        assert graphs.state.num_replays > before
        again = llm.generate(prompts, GREEDY)
        expected.check(again)
        alone = [num_reused_tokens(len(p), NUM_TOKENS, 128) for p in prompts[:-1]]
        assert [o.num_cached_tokens for o in again] == [*alone, NUM_SHARED]


def test_adapters_beside_the_model_alone(llama: Path, tmp_path: Path) -> None:
    """Steps without any adapter go on to use graphs."""
    adapters = {name: str(make_adapter(tmp_path / name, llama, seed)) for seed, name in enumerate(("a", "b"))}
    prompts = make_prompts()
    asked = [("", "a", "b")[i % 3] for i in range(len(prompts))]
    expected = Expected.of(llama, prompts, asked, adapters=adapters)
    with LLM(str(llama), device="npu", num_blocks=32, max_num_seqs=8, adapters=adapters) as llm:
        expected.check(llm.generate(prompts, GREEDY, asked))
        before = graphs.state.num_replays
        Expected.of(llama, prompts).check(llm.generate(prompts, GREEDY))
        assert graphs.state.num_replays > before


def test_structured_answers_match(llama: Path) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, structured_output=StructuredOutput("regex", "[ab]{4}"))
    with LLM(str(llama), device="npu", num_blocks=32, max_num_seqs=8) as llm:
        outputs = llm.generate(make_prompts(), [params, GREEDY] * 4)
    assert all(re.fullmatch("[ab]{4}", output.text) for output in outputs[::2])


def test_demo_model_token_for_token() -> None:
    """A trained model is sure when it counts and lists: nothing but equality will do."""
    prompts = ["Count: 1, 2, 3, 4, 5, 6,", "a b c d e f g h", "Ten, nine, eight, seven,", "2, 4, 6, 8,"]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    shape = {"max_num_seqs": 4, "max_model_len": 256}
    with LLM(DEMO_MODEL, num_blocks=64, **shape) as llm:
        expected = [o.token_ids for o in llm.generate(prompts, params)]
    with LLM(DEMO_MODEL, device="npu", num_blocks=8, graph_sizes=[4], **shape) as llm:
        assert [o.token_ids for o in llm.generate(prompts, params)] == expected


def test_graphs_change_nothing(llama: Path) -> None:
    prompts, params = make_prompts(), SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, seed=5, ignore_eos=True)
    outputs, work = [], []
    for sizes in ([], [8], [2, 5, 8]):
        with LLM(str(llama), device="npu", num_blocks=32, max_num_seqs=8, graph_sizes=sizes) as llm:
            assert decoder(llm).graph_sizes == tuple(sizes)
            before = decoder(llm).progress
            outputs.append([o.token_ids for o in llm.generate(prompts, params)])
            work.append(decoder(llm).progress - before)
    assert outputs[0] == outputs[1] == outputs[2]
    assert work[0] == work[1] == work[2] >= NUM_TOKENS * 2  # layers


def test_preempted_for_want_of_blocks(llama: Path) -> None:
    prompts = [prompt for prompt in make_prompts() if len(prompt) > 100]
    expected = Expected.of(llama, prompts)
    with LLM(str(llama), device="npu", num_blocks=6, max_num_seqs=8, enable_prefix_caching=False) as llm:
        expected.check(llm.generate(prompts, GREEDY))
        assert llm.stats().num_preemptions > 0


def test_preempted_blocks_wait_in_host_memory(llama: Path) -> None:
    """The same prompts twice, through a pool that holds one or two: blocks that are moved out come back unchanged."""
    prompts = [prompt for prompt in make_prompts() if len(prompt) > 128]
    expected = Expected.of(llama, prompts)
    with LLM(str(llama), device="npu", num_blocks=4, max_num_seqs=8, num_host_blocks=8) as llm:
        for _ in range(2):
            expected.check(llm.generate(prompts, GREEDY))
        stats = llm.stats()
        assert stats.num_blocks_out > 0
        assert stats.num_blocks_in > 0


def test_forks_copy_blocks(llama: Path) -> None:
    """Sequences of one request share the prompt's blocks, and copy the one that they go on writing.

    Draws are the same on every device until rounding moves a boundary between tokens; a block that another sequence has
    written would change them at once.
    """
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.7, top_k=3, n=3, seed=3, ignore_eos=True)
    prompt, tokens = make_prompts()[5], []
    for settings in ({"device": "npu", "num_blocks": 32}, {"dtype": "float32", "num_blocks": 64}):
        with LLM(str(llama), max_num_seqs=8, **settings) as llm:
            (output,) = llm.generate(prompt, params)
            tokens.append([o.token_ids for o in output.outputs])
    assert len({tuple(token_ids) for token_ids in tokens[0]}) == 3
    agreed = [
        next((i for i, pair in enumerate(zip(*both, strict=True)) if pair[0] != pair[1]), NUM_TOKENS)
        for both in zip(*tokens, strict=True)
    ]
    assert sum(agreed) > NUM_TOKENS + 3, agreed


def test_beams_share_and_copy_blocks() -> None:
    """Of a trained model, whose beams differ by more than rounding does."""
    prompts = ["Count: 1, 2, 3, 4, 5, 6,", "The capital of France is"]
    params = SamplingParams(max_tokens=10, beam_width=3, n=2, ignore_eos=True)
    shape = {"max_num_seqs": 6, "max_model_len": 256}
    with LLM(DEMO_MODEL, num_blocks=64, **shape) as llm:
        expected = [[o.token_ids for o in output.outputs] for output in llm.generate(prompts, params)]
    with LLM(DEMO_MODEL, device="npu", num_blocks=12, graph_sizes=[6], **shape) as llm:
        before = graphs.state.num_replays
        assert [[o.token_ids for o in output.outputs] for output in llm.generate(prompts, params)] == expected
        assert graphs.state.num_replays > before


def test_drafts_are_rows_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a trained model, whose drafts are often right: the tokens are those without, in fewer steps."""
    prompts = ["Count: 1, 2, 3, 1, 2, 3, 1, 2, 3,", "1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2,"]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    shape = {"device": "npu", "num_blocks": 12, "max_num_seqs": 8, "max_model_len": 256, "graph_sizes": [2, 4, 8]}
    monkeypatch.setattr(
        StepCosts, "of_decodes", lambda _, least, most: [1.0 + i / 1e6 for i in range(most - least + 1)]
    )
    with LLM(DEMO_MODEL, **shape) as llm:
        assert llm.config.scheduler.num_speculative_tokens == 0
        expected, most = [output.token_ids for output in llm.generate(prompts, params)], llm.stats().num_steps
    with LLM(DEMO_MODEL, **shape, num_speculative_tokens=3) as llm:
        before = graphs.state.num_replays
        assert [output.token_ids for output in llm.generate(prompts, params)] == expected
        stats = llm.stats()
        assert stats.num_steps < 0.6 * most
        assert graphs.state.num_replays - before == stats.num_steps - 1  # all but the prompts


def test_prompts_are_scored_as_on_the_cpu(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a step of one token for each sequence that is not a graph's: prompts begin in it, and one is scored."""
    prompts = [[*range(3, 23)], [40], [50], [60], [*range(40, 200)]]
    scored = replace(GREEDY, logprobs=None, prompt_logprobs=2)
    params = [scored, *[replace(scored, prompt_logprobs=None)] * 3, scored]
    with LLM(str(llama), dtype="float32", num_blocks=64, max_num_seqs=4) as llm:
        expected = [output.prompt_logprobs for output in llm.generate(prompts, params)]
    monkeypatch.setattr(step_plan, "MAX_SCORED_TOKENS", 1)
    with LLM(str(llama), device="npu", num_blocks=32, max_num_seqs=4, graph_sizes=[4]) as llm:
        steps: list[SchedulerOutput] = []
        llm.subscribe(lambda timing: steps.append(timing.output))
        outputs = llm.generate(prompts, params)
    first = steps[0].scheduled
    assert [(s.num_new_tokens, s.num_scored, s.samples) for s in first] == [(1, 1, False), *[(1, 0, True)] * 3]
    pairs = [p for o, other in zip(outputs, expected, strict=True) for p in zip(o.prompt_logprobs, other, strict=True)]
    assert len(pairs) == 19 + 159
    assert [a.token_id for a, _ in pairs] == [b.token_id for _, b in pairs]
    for one in (lambda each: each.logprob, lambda each: each.top[0][1], lambda each: each.top[1][1]):
        differences = [abs(one(a) - one(b)) for a, b in pairs]
        assert max(differences) < 0.6  # bfloat16 beside float32
        assert sum(differences) < 0.1 * len(pairs)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, seed=1),
        SamplingParams(temperature=1.5, top_k=7, seed=2),
        SamplingParams(temperature=1.0, top_p=0.6, seed=3),
        SamplingParams(temperature=1.0, top_k=40, top_p=0.9, min_p=0.01, seed=4),
        SamplingParams(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, seed=5),
        SamplingParams(temperature=0.0, logprobs=3),
    ],
    ids=["temperature", "top-k", "top-p", "all", "penalties", "greedy"],
)
def test_sampling_on_the_device_draws_as_on_the_cpu(params: SamplingParams) -> None:
    """The device sums probabilities in float32, so one draw in thousands may fall on the other side of a boundary."""
    logits = torch.randn(64, 2000, generator=torch.Generator().manual_seed(0)) * 3
    rows = [SamplerRow(i, params, i, 4, np.arange(i + 5) % 2000) for i in range(64)]
    on_cpu = Sampler().sample(logits, rows)
    on_npu = Sampler().sample(logits.to("npu:0"), rows)
    assert sum(a.token_id != b.token_id for a, b in zip(on_cpu, on_npu, strict=True)) <= 1
    if params.logprobs:
        for a, b in zip(on_cpu, on_npu, strict=True):
            assert a.logprobs is not None
            assert b.logprobs is not None
            assert [i for i, _ in a.logprobs.top] == [i for i, _ in b.logprobs.top]
            assert a.logprobs.logprob == pytest.approx(b.logprobs.logprob, abs=1e-4)


def test_int8_runs_on_the_cube_unit(llama: Path) -> None:
    """Weights are rounded per channel, activations per token: the first tokens are mostly those of bfloat16."""
    prompts = make_prompts()
    first = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    tokens = {}
    for quantization in ("none", "int8", "w8a8"):
        with LLM(str(llama), device="npu", num_blocks=32, max_num_seqs=8, quantization=quantization) as llm:
            tokens[quantization] = [o.token_ids for o in llm.generate(prompts, first)]
    assert sum(a == b for a, b in zip(tokens["none"], tokens["int8"], strict=True)) >= 6
    assert tokens["w8a8"] == tokens["int8"]


def test_memory_fills_the_device_and_is_given_back(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SIMULATED_NPU_MEMORY_MB", "512")
    npu.causal_mask(torch.device("npu:0"))  # made once and kept
    torch.npu.empty_cache()
    before, free = torch.npu.memory_allocated(), torch.npu.mem_get_info()[0]
    with caplog.at_level(logging.INFO), LLM(str(llama), device="npu", max_num_seqs=8) as llm:
        blocks = llm.config.cache.num_blocks
        assert blocks * BLOCK_BYTES > free * 0.95 - WORKSPACE_BYTES - 4 * GRAPH_BYTES - 10 * MIB
        assert torch.npu.mem_get_info()[0] < free - blocks * BLOCK_BYTES
        llm.generate(make_prompts(), GREEDY)
    assert f"{blocks} KV blocks" in caplog.text
    assert torch.npu.memory_allocated() <= before + MIB


def test_activations_stay_within_the_plan(llama: Path) -> None:
    """The peak of the largest step, beyond weights and blocks, is at most what the plan set aside for it."""
    from shoal_replica.memory_plan import activation_bytes
    from shoal_replica.shard import whole_shard

    with LLM(str(llama), device="npu", num_blocks=32, max_num_seqs=8, max_num_batched_tokens=1024) as llm:
        torch.npu.reset_peak_memory_stats()
        before = torch.npu.memory_allocated()
        llm.generate(make_prompts(), GREEDY)
        peak = torch.npu.max_memory_allocated() - before
        planned = activation_bytes(llm.config.model, whole_shard(llm.config.model), llm.config.scheduler)
    assert MIB < peak <= planned


def test_a_device_that_runs_out_while_loading_says_so(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.npu.empty_cache()
    used = 1024 * MIB - torch.npu.mem_get_info()[0]
    monkeypatch.setenv("SIMULATED_NPU_MEMORY_MB", str(used // MIB + 400))
    with pytest.raises(ConfigError, match=r"num_blocks: got 4000; .*num_blocks=\d+ fits"):
        LLM(str(llama), device="npu", num_blocks=4000, max_num_seqs=8)
    monkeypatch.setenv("SIMULATED_NPU_MEMORY_MB", str(used // MIB + 100))
    with pytest.raises(ConfigError, match=r"model: npu, bfloat16: .*; not one block fits"):
        LLM(str(llama), device="npu", num_blocks=4, max_num_seqs=8)


@pytest.mark.parametrize(
    ("num_possible", "max_num_seqs", "sizes", "is_used"), [(2, 8, (4, 8), True), (1, 160, (160,), False)]
)
def test_graphs_that_do_not_fit_are_done_without(
    num_possible: int,
    max_num_seqs: int,
    sizes: tuple[int, ...],
    is_used: bool,
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where smaller graphs are missing, a larger one serves, with at most as much padding as a block has slots."""
    made: list[npu_decoder.StepGraph] = []

    class FewGraphs(npu_decoder.StepGraph):
        def __init__(self, *args: object) -> None:
            if len(made) == num_possible:
                raise RuntimeError("the stream resources are insufficient, error code is 207008")
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(npu_decoder, "StepGraph", FewGraphs)
    with LLM(str(llama), device="npu", num_blocks=170, max_num_seqs=max_num_seqs) as llm:
        assert decoder(llm).graph_sizes == sizes
        assert "207008" in caplog.text
        before = graphs.state.num_replays
        Expected.of(llama, make_prompts()).check(llm.generate(make_prompts(), GREEDY))
        assert (graphs.state.num_replays > before) is is_used


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("llama", {"dtype": "float32"}, "dtype: got 'float32'; NPU attention takes bfloat16"),
        ("llama", {"block_size": 16}, "block_size: got 16; must be 128 on an NPU"),
        ("llama", {"quantization": "int4"}, "quantization: got 'int4'"),
        ("llama", {"graph_sizes": [1, 300]}, "graph_sizes: got"),
        ("mistral-narrow", {}, "sliding window with head size 64"),
        ("odd", {}, "head size 20"),
        ("gemma", {}, "Gemma3ForCausalLM: norms whose weights are stored less one are not served on an NPU"),
    ],
)
def test_refused_at_start(family: str, settings: dict[str, object], message: str, llama: Path, tmp_path: Path) -> None:
    import tiny_models
    from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig

    tiny_models.FAMILIES["gemma"] = lambda: Gemma3TextConfig(**SHAPE, head_dim=128)
    tiny_models.FAMILIES["odd"] = lambda: LlamaConfig(**SHAPE, head_dim=20)
    tiny_models.FAMILIES["mistral-narrow"] = lambda: MistralConfig(**SHAPE, head_dim=64, sliding_window=24)
    folder = llama if family == "llama" else make_checkpoint(family, tmp_path, torch.bfloat16)
    from fixtures.tiny_tokenizer import write_tiny_tokenizer

    with pytest.raises(ConfigError, match=message):
        LLM(str(write_tiny_tokenizer(folder)), device="npu", num_blocks=8, **settings)


async def test_blocks_of_one_engine_serve_another(llama: Path) -> None:
    prompt = [5 + number % 60 for number in range(300)]  # two whole blocks of 128
    config = resolve_config(str(llama), num_blocks=8, parallel=ParallelConfig(device="npu"), block_size=128)
    one, other = build_engine(config, build_executor(config)), build_engine(config, build_executor(config))
    hashes = hash_blocks(prompt, 128)
    tokens: dict[str, list[int]] = {"one": [], "other": []}
    for name, engine in (("one", one), ("other", other)):
        engine.subscribe(lambda report, name=name: tokens[name].extend(t for d in report.deltas for t in d.token_ids))  # type: ignore[misc]
        engine.start()
    try:
        await one.add(make_request("one", prompt))
        with other.blocks.taking(hashes) as taking:
            async with aclosing(one.blocks.give(hashes, 0, 1)) as pieces:
                async for piece in pieces:
                    await taking.take(*piece)
            assert taking.num_blocks == 2
        await other.add(make_request("other", prompt))
        assert other.stats().num_cached_tokens == 256
        assert tokens["other"] == tokens["one"]
    finally:
        await one.stop()
        await other.stop()
