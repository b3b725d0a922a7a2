"""Each family against transformers, in float32: logits, and greedy generation through ModelRunner."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, MAX_MODEL_LEN, load_oracle, make_checkpoint, make_prompts, oracle_greedy
from transformers import PreTrainedModel

from shoal_kernels.metadata import AttentionMetadata
from shoal_replica.config import CacheConfig, ParallelConfig
from shoal_replica.errors import ConfigError, NotFound
from shoal_replica.executor import NewSequence, ScheduledSequence, SchedulerOutput
from shoal_replica.model import weights
from shoal_replica.model.llama import LlamaDecoder
from shoal_replica.model.model_runner import ModelRunner
from shoal_replica.model.weights import load_weights, stream_weights
from shoal_replica.model_config import ModelConfig
from shoal_replica.sampling_params import SamplingParams

BLOCK_SIZE = 16
NUM_BLOCKS = 64
NUM_NEW = 24
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = make_prompts([1, 7, 16, 33, 70])


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    return folder, load_oracle(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-llama3-rope", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def runner(llama: Path) -> Iterator[ModelRunner]:
    runner = make_runner(llama)
    yield runner
    runner.close()


def make_runner(folder: Path) -> ModelRunner:
    cache = CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    return ModelRunner(ModelConfig.from_folder(folder), cache, ParallelConfig(num_threads=2))


def greedy(runner: ModelRunner, prompts: list[list[int]], chunk: int, num_tokens: int = NUM_NEW) -> list[list[int]]:
    """Generate for all prompts at once, at most ``chunk`` tokens of each per step; block tables grow as needed."""
    free = list(reversed(range(NUM_BLOCKS)))
    tables: list[list[int]] = [[] for _ in prompts]
    computed = [0] * len(prompts)
    outputs: list[list[int]] = [[] for _ in prompts]
    step = 0
    while True:
        scheduled, new, updates = [], [], []
        for seq_id, prompt in enumerate(prompts):
            if len(outputs[seq_id]) == num_tokens:
                continue
            total = len(prompt) + len(outputs[seq_id])
            count = min(chunk, total - computed[seq_id])
            first = len(tables[seq_id])
            tables[seq_id] += [free.pop() for _ in range(-(-(computed[seq_id] + count) // BLOCK_SIZE) - first)]
            if computed[seq_id] == 0:
                new.append(NewSequence(seq_id, tuple(prompt), len(prompt), 0, tuple(tables[seq_id]), GREEDY, 0))
            elif len(tables[seq_id]) > first:
                updates.append((seq_id, first, tuple(tables[seq_id][first:])))
            scheduled.append(ScheduledSequence(seq_id, computed[seq_id], count, computed[seq_id] + count == total))
            computed[seq_id] += count
        if not scheduled:
            break
        result = runner.execute(SchedulerOutput(step, tuple(scheduled), tuple(new), tuple(updates)))
        assert [s.seq_id for s in result.sampled] == [s.seq_id for s in scheduled if s.samples]
        for sampled in result.sampled:
            outputs[sampled.seq_id].append(sampled.token_id)
        step += 1
    runner.execute(SchedulerOutput(step, (), dropped_seq_ids=tuple(range(len(prompts)))))
    return outputs


def test_logits_equal_transformers(family: tuple[Path, PreTrainedModel]) -> None:
    folder, oracle = family
    config = ModelConfig.from_folder(folder)
    model = LlamaDecoder(config, load_weights(config, torch.device("cpu")))
    shape = (8, config.num_kv_heads, BLOCK_SIZE, config.head_size)
    caches = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(config.num_layers)]
    prompt = PROMPTS[-1]
    metadata = AttentionMetadata(
        query_start_loc=[0, len(prompt)],
        seq_lens=[len(prompt)],
        block_tables=torch.arange(5, dtype=torch.int32).unsqueeze(0),
        slot_mapping=torch.arange(len(prompt)),
    )
    rows = torch.tensor([0, 30, len(prompt) - 1])
    logits = model(torch.tensor(prompt), torch.arange(len(prompt)), caches, metadata, rows)
    with torch.inference_mode():
        expected = oracle(torch.tensor([prompt])).logits[0]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected[rows], atol=2e-4, rtol=2e-4)


def test_the_oracle_does_not_depend_on_its_draft(family: tuple[Path, PreTrainedModel]) -> None:
    """What one pass verifies is what ``generate`` makes, beyond a window, too."""
    _, oracle = family
    prompt, num_tokens = PROMPTS[3], 9
    made = oracle_greedy(oracle, prompt, num_tokens)
    for draft in (made, [*made[:3], made[3] + 1, 7], made[:5], [*made, 7]):
        assert oracle_greedy(oracle, prompt, num_tokens, draft) == made
    ended = made[: made.index(made[4]) + 1]
    for draft in ((), made, [*ended[:-1], made[4] + 1]):
        assert oracle_greedy(oracle, prompt, num_tokens, draft, eos=made[4]) == ended


def test_greedy_equals_transformers(family: tuple[Path, PreTrainedModel]) -> None:
    """Batched in chunks of 5 tokens, and each prompt alone; other chunks are the engine's test's."""
    folder, oracle = family
    runner = make_runner(folder)
    found = greedy(runner, PROMPTS, 5)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        assert tokens == oracle_greedy(oracle, prompt, NUM_NEW, tokens)
        assert greedy(runner, [prompt], 64) == [tokens]


def test_bfloat16_picks_one_of_the_best(tmp_path: Path) -> None:
    """In bfloat16 a token may differ from transformers' own only where its two best logits nearly tie."""
    folder = make_checkpoint("qwen3", tmp_path, torch.bfloat16)
    oracle = load_oracle(folder, torch.bfloat16)
    picked = greedy(make_runner(folder), PROMPTS, 512, num_tokens=1)
    for prompt, (token_id,) in zip(PROMPTS, picked, strict=True):
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt])).logits[0, -1].float()
        assert float(logits.max() - logits[token_id]) <= 0.25


def test_sequence_back_from_preemption_goes_on(runner: ModelRunner, llama: Path) -> None:
    """It is dropped in the middle, then sent again with its generated tokens and other blocks."""
    prompt = PROMPTS[3]
    expected = oracle_greedy(load_oracle(llama), prompt, 8)
    half = greedy(runner, [prompt], 512, num_tokens=4)[0]
    rest = greedy(runner, [prompt + half], 512, num_tokens=4)[0]
    assert half + rest == expected


def test_cached_prefix_and_copied_block(runner: ModelRunner, llama: Path) -> None:
    """A second sequence shares a full block of the first, copies its half-filled one, and computes only the rest."""
    first, rest = PROMPTS[3][:24], make_prompts([9], seed=1)[0]
    prompt = first + rest
    expected = oracle_greedy(load_oracle(llama), prompt, 1)
    new = NewSequence(0, tuple(first), len(first), 0, (3, 5), GREEDY, 0)
    runner.execute(SchedulerOutput(0, (ScheduledSequence(0, 0, len(first), True),), (new,)))
    second = NewSequence(1, tuple(prompt), len(prompt), len(first), (3, 9, 4), GREEDY, 0)
    result = runner.execute(
        SchedulerOutput(
            1,
            (ScheduledSequence(1, len(first), len(rest), True),),
            (second,),
            block_copies=((5, 9),),
            dropped_seq_ids=(0,),
        )
    )
    assert [s.token_id for s in result.sampled] == expected


def test_many_sequences_have_rows_of_the_table(runner: ModelRunner, llama: Path) -> None:
    prompts = make_prompts([5] * 40)
    oracle = load_oracle(llama)
    assert greedy(runner, prompts, 512, num_tokens=3) == [oracle_greedy(oracle, prompt, 3) for prompt in prompts]


def test_longest_sequence_fits(runner: ModelRunner, llama: Path) -> None:
    prompt = make_prompts([MAX_MODEL_LEN - 2])[0]
    assert greedy(runner, [prompt], 100, num_tokens=2) == [oracle_greedy(load_oracle(llama), prompt, 2)]


def test_warm_up_overwrites_block_0_alone(runner: ModelRunner) -> None:
    expected = greedy(runner, PROMPTS, 16)
    runner.warm_up()
    assert greedy(runner, PROMPTS, 16) == expected
    prompt = PROMPTS[2]
    new = NewSequence(0, tuple(prompt), len(prompt), 0, (1,), GREEDY, 0)
    runner.execute(SchedulerOutput(0, (ScheduledSequence(0, 0, 15, False),), (new,)))
    runner.warm_up()
    result = runner.execute(SchedulerOutput(1, (ScheduledSequence(0, 15, 1, True),)))
    assert result.sampled[0].token_id == expected[2][0]


def test_sampling_too_early_is_a_bug(runner: ModelRunner) -> None:
    new = NewSequence(0, (5, 6, 7), 3, 0, (0,), GREEDY, 0)
    with pytest.raises(RuntimeError, match="2 of 3 tokens"):
        runner.execute(SchedulerOutput(0, (ScheduledSequence(0, 0, 2, True),), (new,)))


def test_packed_rows_are_query_key_value(llama: Path) -> None:
    config = ModelConfig.from_folder(llama)
    weights = load_weights(config, torch.device("cpu"))
    stored = load_file(llama / "model.safetensors")
    parts = [stored[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(weights["layers.1.qkv_proj.weight"], torch.cat(parts))
    assert sum(w.numel() for w in weights.values()) == config.num_parameters


@pytest.mark.parametrize(
    ("decoder", "other"),
    [("language_model.model.", "vision_tower."), ("model.language_model.", "model.vision_tower.")],
    ids=["first", "newer"],
)
def test_a_decoder_that_is_one_part_of_its_model(tmp_path: Path, decoder: str, other: str) -> None:
    """As in Gemma 3's models for text and images, by the names of either kind of checkpoint."""
    plain = make_checkpoint("gemma3", tmp_path / "plain")
    config = json.loads((plain / "config.json").read_text())
    stored = load_file(plain / "model.safetensors")
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config, "dtype": "float32"}
            | {"vision_config": {"hidden_size": 8, "num_hidden_layers": 1}, "eos_token_id": 2}
        )
    )
    parts = {decoder + name.removeprefix("model."): tensor for name, tensor in stored.items()}
    save_file(parts | {f"{other}embeddings.weight": torch.ones(3)}, folder / "model.safetensors")
    expected = load_weights(ModelConfig.from_folder(plain), torch.device("cpu"))
    found = load_weights(ModelConfig.from_folder(folder), torch.device("cpu"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    save_file(parts | {f"{decoder}extra.weight": torch.ones(3)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"unexpected tensor 'model\.extra\.weight'"):
        load_weights(ModelConfig.from_folder(folder), torch.device("cpu"))


def test_sharded_checkpoint_loads_alike(llama: Path, tmp_path: Path) -> None:
    load_oracle(llama).save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    whole = load_weights(ModelConfig.from_folder(llama), torch.device("cpu"))
    sharded = load_weights(ModelConfig.from_folder(tmp_path), torch.device("cpu"))
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)
    (tmp_path / min(path.name for path in tmp_path.glob("*.safetensors"))).unlink()
    with pytest.raises(NotFound, match="model-00001"):
        load_weights(ModelConfig.from_folder(tmp_path), torch.device("cpu"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_lent_from_the_file_are_those_that_are_copied(llama: Path, dtype: str) -> None:
    config = ModelConfig.from_folder(llama, dtype=dtype)
    copied = load_weights(config, torch.device("cpu"))
    names = []
    for name, weight in stream_weights(config, torch.device("cpu"), lends_file=True):
        assert torch.equal(weight, copied[name])
        names.append(name)
    assert names == list(copied)


def test_a_tensor_between_words_of_its_file_is_copied() -> None:
    cpu, data = torch.device("cpu"), torch.zeros(9, dtype=torch.bfloat16)
    assert weights._is_ready(data, torch.bfloat16, cpu)
    assert not weights._is_ready(data[1:], torch.bfloat16, cpu)


def test_layers_behind_the_last_are_left_unread(tmp_path: Path) -> None:
    """As many as the config says, which guess further tokens; not more."""
    folder = make_checkpoint("glm4-moe", tmp_path)
    stored, cpu = load_file(folder / "model.safetensors"), torch.device("cpu")
    expected = load_weights(ModelConfig.from_folder(folder), cpu)
    save_file(stored | {"model.layers.3.eh_proj.weight": torch.ones(3, 4)}, folder / "model.safetensors")
    found = load_weights(ModelConfig.from_folder(folder), cpu)
    assert found.keys() == expected.keys()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ConfigError, match=r"unexpected tensor 'model\.layers\.3\.eh_proj\.weight'"):
        load_weights(ModelConfig.from_folder(folder), cpu)


def test_the_bias_of_a_choice_keeps_every_bit(tmp_path: Path) -> None:
    folder = make_checkpoint("glm4-moe", tmp_path)
    stored = load_file(folder / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"]
    held = load_weights(ModelConfig.from_folder(folder, dtype="bfloat16"), torch.device("cpu"))
    assert torch.equal(held["layers.1.router.bias"], stored)
    assert not torch.equal(stored.bfloat16().float(), stored)


def test_weights_are_converted(llama: Path) -> None:
    weights = load_weights(ModelConfig.from_folder(llama, dtype="bfloat16"), torch.device("cpu"))
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("missing", r"'model\.norm\.weight' is missing"),
        ("unexpected", r"unexpected tensor 'model\.extra\.weight'"),
        ("shape", r"'model\.norm\.weight' has shape \(3,\).*asks for \(64,\)"),
    ],
)
def test_wrong_tensors_are_named(llama: Path, tmp_path: Path, change: str, complaint: str) -> None:
    stored = load_file(llama / "model.safetensors")
    if change == "missing":
        del stored["model.norm.weight"]
    elif change == "unexpected":
        stored["model.extra.weight"] = torch.zeros(1)
    else:
        stored["model.norm.weight"] = torch.zeros(3)
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=complaint):
        load_weights(ModelConfig.from_folder(tmp_path), torch.device("cpu"))


def test_damaged_file_is_a_config_error(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cannot be read"):
        load_weights(ModelConfig.from_folder(tmp_path), torch.device("cpu"))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(NotFound, match="neither"):
        load_weights(ModelConfig.from_folder(tmp_path), torch.device("cpu"))
