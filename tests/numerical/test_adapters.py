"""LoRA adapters on a real engine: the tokens are those of PEFT, whatever batch, chunk, cache, kernels and ranks."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fixtures.tiny_adapters import ATTENTION, load_adapted, make_adapter
from fixtures.tiny_tokenizer import write_tiny_tokenizer
from fixtures.waiting import until
from safetensors.torch import load_file, save_file
from tiny_models import load_oracle, make_checkpoint, make_prompts, oracle_greedy
from transformers import PreTrainedModel

from shoal_cluster.serve.adapter_demand import AdaptersTold, AdaptersWanted
from shoal_cluster.serve.replica_adapters import GRACE_S, LOOK_S, ReplicaAdapters
from shoal_replica import LLM, AsyncLLM, SamplingParams
from shoal_replica.adapter_folder import read_adapter
from shoal_replica.build import find_adapters, resolve_config
from shoal_replica.config import ParallelConfig
from shoal_replica.errors import ConfigError, InvalidArgument, NotFound
from shoal_replica.llm import RequestOutput
from shoal_replica.model import lora
from shoal_replica.model_config import ModelConfig
from shoal_replica.shard import whole_shard

PROMPTS = make_prompts([1, 5, 16, 17, 40, 63, 130], seed=4)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SETTINGS: dict[str, dict[str, Any]] = {
    "everything": {},
    "attention": {"r": 3, "lora_alpha": 6, "target_modules": ATTENTION},
    "patterns": {
        "r": 8,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj", "gate_proj", "down_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "down_proj": 5},
        "alpha_pattern": {"v_proj": 20, "layers.2.mlp.gate_proj": 1},
    },
    "one": {"r": 1, "target_modules": ["up_proj"], "layers_to_transform": [1]},
}


@pytest.fixture(
    scope="module",
    params=["llama", "llama-linear-rope", "mistral", "qwen2", "qwen3", "llama-9-heads", "gemma3", "exaone4"],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(make_checkpoint(request.param, tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: str(make_adapter(root / name, folder, seed, **settings))
        for seed, (name, settings) in enumerate(SETTINGS.items())
    }


@pytest.fixture(scope="module")
def expected(folder: Path, adapters: dict[str, str]) -> dict[str, list[list[int]]]:
    """Of each adapter, and of the model alone, the tokens after each prompt."""
    models = {"": load_oracle(folder)} | {name: load_adapted(folder, Path(path)) for name, path in adapters.items()}
    with LLM(str(folder), num_blocks=512, adapters=adapters) as llm:
        drafts = {name: [o.token_ids for o in llm.generate(PROMPTS, GREEDY, name)] for name in models}
    return {
        name: [oracle_greedy(model, prompt, 12, draft) for prompt, draft in zip(PROMPTS, drafts[name], strict=True)]
        for name, model in models.items()
    }


def check_greedy(models: list[PreTrainedModel], outputs: list[RequestOutput]) -> None:
    """The outputs are the greedy answers of the first model to all prompts, then those of the next."""
    asked = [(model, prompt) for model in models for prompt in PROMPTS]
    for (model, prompt), output in zip(asked, outputs, strict=True):
        assert output.token_ids == oracle_greedy(model, prompt, 12, output.token_ids)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"num_threads": 3},
        {"block_size": 4, "num_blocks": 1024},  # torch's operators
        {"max_num_seqs": 3},
    ],
    ids=str,
)
def test_each_prompt_gets_what_its_adapter_gives_alone(folder, adapters, expected, settings):
    """All adapters and the model alone, in one batch."""
    asked = [(name, i) for i in range(len(PROMPTS)) for name in expected]
    with LLM(str(folder), **{"num_blocks": 512} | settings, adapters=adapters) as llm:
        for _ in range(2):  # the second time, prompts come from the cache
            outputs = llm.generate([PROMPTS[i] for _, i in asked], GREEDY, [name for name, _ in asked])
            for (name, i), output in zip(asked, outputs, strict=True):
                assert output.token_ids == expected[name][i], (name, i)
        assert sum(output.num_cached_tokens for output in outputs) > 1000


def test_caches_of_adapters_and_model_are_apart(folder, adapters, expected):
    """The same prompt, first with one adapter, then with others: only its own blocks are found again."""
    with LLM(str(folder), num_blocks=512, adapters=adapters) as llm:
        for asked, num_cached in (("everything", 0), ("", 0), ("attention", 0), ("everything", 128), ("", 128)):
            (output,) = llm.generate([PROMPTS[-1]], GREEDY, asked)
            assert output.token_ids == expected[asked][-1]
            assert output.num_cached_tokens == num_cached


def test_beams_of_an_adapter_equal_those_of_peft(folder, adapters):
    params = SamplingParams(max_tokens=10, beam_width=4, n=4, ignore_eos=True)
    prompt = PROMPTS[4]
    output = load_adapted(folder, Path(adapters["everything"])).generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=10,
        do_sample=False,
        num_beams=4,
        num_return_sequences=4,
        eos_token_id=None,
        pad_token_id=0,
    )
    with LLM(str(folder), num_blocks=256, adapters=adapters) as llm:
        mixed = llm.generate([prompt, prompt, PROMPTS[3]], [params, params, GREEDY], ["everything", "", "attention"])
    assert [beam.token_ids for beam in mixed[0].outputs] == output[:, len(prompt) :].tolist()
    assert [beam.token_ids for beam in mixed[1].outputs] != output[:, len(prompt) :].tolist()


@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
@pytest.mark.parametrize("block_size", [16, 8])  # native kernels, torch's operators
def test_ranks_have_their_shares_of_adapters(tmp_path, ranks, block_size):
    folder = write_tiny_tokenizer(make_checkpoint("llama-9-heads", tmp_path / "model"))
    path = make_adapter(tmp_path / "adapter", folder, 0)
    with LLM(str(folder), num_blocks=256, block_size=block_size, **ranks, adapters={"a": str(path)}) as llm:
        outputs = llm.generate([*PROMPTS, *PROMPTS], GREEDY, ["a"] * len(PROMPTS) + [""] * len(PROMPTS))
    check_greedy([load_adapted(folder, path), load_oracle(folder)], outputs)


@pytest.mark.parametrize("family", ["qwen3-moe", "glm4-moe"])
def test_attention_of_a_mixture_of_experts_can_be_adapted(tmp_path, family):
    folder = write_tiny_tokenizer(make_checkpoint(family, tmp_path / "model"))
    path = make_adapter(tmp_path / "adapter", folder, 0, target_modules=ATTENTION)
    with LLM(str(folder), num_blocks=256, adapters={"a": str(path)}) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, "a")
    check_greedy([load_adapted(folder, path)], outputs)


def test_a_file_that_is_cut_short_while_it_is_read_ends_nothing(folder, adapters, tmp_path):
    """A mapped one would end the process, by SIGBUS."""
    path = shutil.copytree(adapters["everything"], tmp_path / "adapter")
    model = ModelConfig.from_folder(folder)
    config, device = replace(read_adapter("a", path, model), folder=str(path)), torch.device("cpu")
    whole = dict(lora.read_adapter(config, model, whole_shard(model), device))
    pairs = lora.read_adapter(config, model, whole_shard(model), device)
    found = dict([next(pairs)])
    os.truncate(path / "adapter_model.safetensors", 0)
    found |= dict(pairs)
    assert found.keys() == whole.keys()
    assert all(torch.equal(a, b) for name in whole for a, b in zip(found[name], whole[name], strict=True))
    with LLM(str(folder), num_blocks=64) as llm, pytest.raises(ConfigError, match="cannot be read"):
        llm.load_adapter("a", str(path))


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_adapters_of_one_part_of_a_model(tmp_path, prefix):
    """As PEFT names them where the decoder for text is one part; patterns go by those names."""
    plain = make_checkpoint("gemma3", tmp_path / "model")
    path = make_adapter(tmp_path / "adapter", plain, 0, alpha_pattern={"model.layers.1.self_attn.q_proj": 3})
    whole = ModelConfig.from_folder(plain)
    expected = read_adapter("a", path, whole)
    assert len({factors.scale for factors in expected.factors}) == 2
    weights = path / "adapter_model.safetensors"
    save_file({name.replace("model.layers.", f"{prefix}layers."): t for name, t in load_file(weights).items()}, weights)
    config = json.loads((path / "adapter_config.json").read_text())
    config["alpha_pattern"] = {f"{prefix}layers.1.self_attn.q_proj": 3}
    (path / "adapter_config.json").write_text(json.dumps(config))
    config = json.loads((plain / "config.json").read_text())
    parts = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config, "dtype": "float32"}
    (plain / "config.json").write_text(json.dumps(parts))
    found = read_adapter("a", path, ModelConfig.from_folder(plain))
    assert [(f.module, f.rank, f.scale) for f in found.factors] == [
        (f.module, f.rank, f.scale) for f in expected.factors
    ]
    save_file({name.replace(prefix, "vision_tower."): t for name, t in load_file(weights).items()}, weights)
    with pytest.raises(ConfigError, match="adapts nothing that can be adapted here"):
        read_adapter("a", path, ModelConfig.from_folder(plain))


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2)], ids=["whole", "tensor", "pipeline"])
def test_packed_projections_are_adapted_as_they_are_stored(tmp_path, sizes):
    """One pair for queries, keys and values, whose rows are put in another order, and one for gates and ups."""
    folder = write_tiny_tokenizer(make_checkpoint("phi3-longrope", tmp_path / "model"))
    targets = [["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], ["qkv_proj"], ["gate_up_proj"]]
    paths = [make_adapter(tmp_path / str(i), folder, i, target_modules=names) for i, names in enumerate(targets)]
    adapters = {path.name: str(path) for path in paths}
    ranks = dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), sizes, strict=True))
    with LLM(str(folder), num_blocks=256, **ranks, adapters=adapters) as llm:
        outputs = llm.generate(PROMPTS * 3, GREEDY, [path.name for path in paths for _ in PROMPTS])
    check_greedy([load_adapted(folder, path) for path in paths], outputs)
    other = make_adapter(tmp_path / "other", make_checkpoint("llama", tmp_path / "llama"), 0)
    with pytest.raises(ConfigError, match=r"adapts nothing .*here: qkv_proj, o_proj, gate_up_proj, down_proj of"):
        read_adapter("other", other, ModelConfig.from_folder(folder))


@pytest.mark.parametrize("block_size", [16, 8])  # native kernels, torch's operators
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_factors_that_are_not_finite_are_refused(tmp_path, block_size, value):
    """They would end the engine, and with it others' requests."""
    folder = write_tiny_tokenizer(make_checkpoint("llama", tmp_path / "model"))
    path = make_adapter(tmp_path / "adapter", folder, 0)
    tensors = load_file(path / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = value
    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"adapters.a: the factors of layers.\d.\w+ are not finite in float32"):
        LLM(str(folder), num_blocks=64, block_size=block_size, adapters={"a": str(path)})


def test_answers_go_on_after_preemption(folder, adapters, expected):
    asked = [(name, i) for i in range(4) for name in expected]
    with LLM(str(folder), block_size=16, num_blocks=9, max_num_seqs=8, adapters=adapters) as llm:
        outputs = llm.generate([PROMPTS[i] for _, i in asked], GREEDY, [name or None for name, _ in asked])
        assert llm.stats().num_preemptions > 0
    assert [output.token_ids for output in outputs] == [expected[name][i] for name, i in asked]


def test_an_adapter_that_is_not_loaded_is_refused(tmp_path):
    folder = write_tiny_tokenizer(make_checkpoint("llama", tmp_path / "model"))
    with (
        LLM(str(folder), num_blocks=64) as llm,
        pytest.raises(InvalidArgument, match="got 'a'; no adapter is loaded"),
    ):
        llm.generate(PROMPTS[0], GREEDY, "a")
    path = str(make_adapter(tmp_path / "adapter", folder, 0))
    with LLM(str(folder), num_blocks=64, adapters={"b": path, "a": path}) as llm:
        with pytest.raises(InvalidArgument, match="adapter: got 'c'; must be one of a, b"):
            llm.generate(PROMPTS[0], GREEDY, "c")
        with pytest.raises(InvalidArgument, match="adapter: got 1; must be one, or one for each of 2 prompts"):
            llm.generate(PROMPTS[:2], GREEDY, ["a"])
        first, second = llm.generate([PROMPTS[0]] * 2, GREEDY, ["a", "b"])
        assert first.token_ids == second.token_ids


def test_adapters_that_come_and_go_answer_as_those_loaded_at_the_start(folder, adapters, expected):
    check_that_adapters_come_and_go(folder, adapters, expected)


@pytest.mark.parametrize("folder", ["llama-9-heads", "gemma3"], indirect=True)  # ranks cost processes
def test_adapters_come_to_all_ranks_and_go(folder, adapters, expected):
    check_that_adapters_come_and_go(folder, adapters, expected, tensor_parallel_size=2)


def check_that_adapters_come_and_go(folder, adapters, expected, **settings):
    with LLM(str(folder), num_blocks=64, **settings) as llm:
        for names in (("everything", "attention"), ("patterns", "everything"), ("one",)):
            for name in names:
                llm.load_adapter(name, adapters[name])
            outputs = llm.generate(PROMPTS * len(names), GREEDY, [name for name in names for _ in PROMPTS])
            assert [o.token_ids for o in outputs] == [tokens for name in names for tokens in expected[name]]
            with pytest.raises(ConfigError, match=f"adapters.{names[0]}: is already loaded"):
                llm.load_adapter(names[0], adapters[names[0]])
            for name in names:
                llm.unload_adapter(name)
            with pytest.raises(InvalidArgument, match=r"adapter: .*no adapter is loaded"):
                llm.generate(PROMPTS[0], GREEDY, names[0])
        assert [o.token_ids for o in llm.generate(PROMPTS, GREEDY)] == expected[""]


@pytest.mark.parametrize("folder", ["llama-9-heads"], indirect=True)  # what waits knows nothing of models
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_while_an_adapter_comes_or_goes_waits_until_it_has(folder, adapters, expected, monkeypatch):
    with LLM(str(folder), num_blocks=64, tensor_parallel_size=2) as llm:
        for name in ("load_adapter", "unload_adapter"):
            work = getattr(llm._executor, name)

            def interrupted(adapter, work=work):
                signal.raise_signal(signal.SIGINT)
                return work(adapter)

            monkeypatch.setattr(llm._executor, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.load_adapter("one", adapters["one"])
        assert [o.token_ids for o in llm.generate(PROMPTS, GREEDY, "one")] == expected["one"]
        with pytest.raises(KeyboardInterrupt):
            llm.unload_adapter("one")
        assert [o.token_ids for o in llm.generate(PROMPTS, GREEDY)] == expected[""]


class Clock:
    """Stands still, and counts how often it is looked at."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_reads = 0

    def __call__(self) -> float:
        self.num_reads += 1
        return self.now_s

    async def passes(self, seconds: float) -> None:
        """Move on after a whole look, and return after another: the second that begins from now has seen the first."""
        await self._look()
        self.now_s += seconds
        await self._look()

    async def _look(self) -> None:
        seen = self.num_reads
        await until(lambda: self.num_reads >= seen + 2)


async def test_a_replica_loads_what_is_wanted_and_frees_what_is_not(folder, adapters, expected, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(adapters["everything"], source)
    engine = await AsyncLLM.start(resolve_config(str(folder), num_blocks=64))
    clock = Clock()
    replica = ReplicaAdapters(engine.engine, engine.config, look_s=0.01, clock=clock)
    replica.start()

    def told(*in_use: str, **wanted: Any) -> AdaptersTold:
        question = AdaptersWanted("g", {name: str(path) for name, path in wanted.items()}, list(in_use))
        return msgspec.msgpack.decode(replica.answer(msgspec.msgpack.encode(question)), type=AdaptersTold)

    async def answers(version: str) -> list[list[int]]:
        async def one(prompt: list[int]) -> list[int]:
            stream = engine.generate(tuple(prompt), GREEDY, adapter=version)
            return [token for delta in [d async for d in stream] for token in delta.token_ids]

        return await asyncio.gather(*map(one, PROMPTS))

    try:
        assert told(a=source) == AdaptersTold()
        await until(lambda: told(a=source).current)
        first = told(a=source).current["a"]
        assert (first.partition("@")[0], told(a=source).versions) == ("a", [first])
        assert await answers(first) == expected["everything"]
        shutil.rmtree(source)
        await clock.passes(0.0)
        assert told(a=source).current == {"a": first}  # files that are gone change nothing
        shutil.copytree(adapters["one"], source)
        await until(lambda: told(a=source).current != {"a": first})  # it has looked again
        second = told(a=source).current["a"]
        await clock.passes(GRACE_S - 1.0)
        assert first in told(a=source).versions
        assert await answers(second) == expected["one"]
        await clock.passes(1.0)
        await until(lambda: told(a=source).versions == [second])
        await until(lambda: "adapter_config.json" in told(second, a=source, b=folder).failures.get("b", ""))
        shutil.copytree(adapters["patterns"], tmp_path / "late")
        await until(lambda: told(b=tmp_path / "late").current.keys() == {"b"})  # at once: it is another source
        third = told(second, b=tmp_path / "late").current["b"]
        await clock.passes(GRACE_S)
        assert told(second, b=tmp_path / "late").versions == sorted([second, third])  # a call still uses it
        assert await answers(second) == expected["one"]
        assert await answers(third) == expected["patterns"]
        told()
        await clock.passes(GRACE_S - 1.0)
        told(b=tmp_path / "late")  # wanted again before it is freed
        await clock.passes(1.0)
        await until(lambda: told(b=tmp_path / "late") == AdaptersTold({"b": third}, [third]))
        await clock.passes(GRACE_S)
        assert told(b=tmp_path / "late") == AdaptersTold({"b": third}, [third])
        told()
        await clock.passes(GRACE_S)
        await until(lambda: told().versions == [])
        (tmp_path / "soon").mkdir()
        await until(lambda: told(c=tmp_path / "soon").failures)
        shutil.copytree(adapters["one"], tmp_path / "soon", dirs_exist_ok=True)
        await clock.passes(LOOK_S - 1.0)
        assert told(c=tmp_path / "soon").failures
        await clock.passes(1.0)
        await until(lambda: told(c=tmp_path / "soon").current.keys() == {"c"})
        assert await answers("") == expected[""]
    finally:
        await replica.close()
        await engine.stop()


async def test_a_version_is_known_by_its_contents_and_told_when_it_is_whole(folder, adapters, tmp_path, monkeypatch):
    source, copy = tmp_path / "source", tmp_path / "copy"
    for path in (source, copy):
        shutil.copytree(adapters["one"], path, copy_function=shutil.copyfile)
        os.utime(path / "adapter_config.json", (len(path.name), len(path.name)))
    engine = await AsyncLLM.start(resolve_config(str(folder), num_blocks=64))
    replica = ReplicaAdapters(engine.engine, engine.config)
    try:
        first = await replica._have("a", str(source))
        assert (await replica._have("a", str(copy))).version == first.version, "as on another node"
        assert replica._versions() == {first.version}
        await engine.engine.adapters.unload(first.version)
        load, seen = engine.engine.adapters.load, []

        async def change_then_load(adapter):
            os.utime(source / "adapter_config.json", (5, 5))
            await load(adapter)
            seen.append(replica._versions())

        monkeypatch.setattr(engine.engine.adapters, "load", change_then_load)
        with pytest.raises(ConfigError, match="have changed while they were read"):
            await replica._have("a", str(source))
        assert seen == [set()], "nobody is told before it is known to be whole"
        assert first.version not in engine.engine.adapters.names
        monkeypatch.undo()
        assert (await replica._have("a", str(source))).version == first.version
        assert replica._versions() == {first.version}
    finally:
        await replica.close()
        await engine.stop()


async def test_an_adapter_is_loaded_on_idle_ranks_and_a_broken_one_harms_nobody(tmp_path):
    folder = write_tiny_tokenizer(make_checkpoint("llama", tmp_path / "model"))
    adapter, model = make_adapter(tmp_path / "good", folder, 1), load_oracle(folder)
    config = resolve_config(str(folder), num_blocks=64, parallel=ParallelConfig(tensor_parallel_size=2))
    engine = await AsyncLLM.start(config)
    try:
        (good,) = find_adapters({"good": str(adapter)}, config.model)
        gone = replace(good, name="gone", folder=str(tmp_path / "nowhere"))
        for _ in range(10):  # idle between steps, when the engine looks after its ranks
            with pytest.raises(ConfigError, match=r"rank .: adapters.gone: cannot be loaded"):
                await engine.engine.adapters.load(gone)
            await engine.engine.adapters.load(good)
            with pytest.raises(ConfigError, match="is already loaded"):
                await engine.engine.adapters.load(good)
            await engine.engine.adapters.unload("good")
            with pytest.raises(NotFound, match="'good' is not loaded"):
                await engine.engine.adapters.unload("good")
            await asyncio.sleep(0.05)
        await engine.engine.adapters.load(good)
        for name, its_model in (("good", load_adapted(folder, adapter)), ("", model)):
            for prompt in PROMPTS[:3]:
                stream = engine.generate(tuple(prompt), GREEDY, adapter=name)
                tokens = [token for delta in [d async for d in stream] for token in delta.token_ids]
                assert tokens == oracle_greedy(its_model, prompt, 12, tokens)
    finally:
        await engine.stop()
