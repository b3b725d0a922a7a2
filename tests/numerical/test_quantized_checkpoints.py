"""Quantized checkpoints: their weights are those that their format says, in any shard and on any kernels."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.quantized_checkpoints import (
    Store,
    awq,
    compressed,
    compressed_in_order,
    fp8_blocks,
    gptq,
    quantize_checkpoint,
)
from fixtures.tiny_tokenizer import write_tiny_tokenizer
from safetensors.torch import load_file, save_file
from tiny_models import load_oracle, make_checkpoint, make_prompts, oracle_greedy
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

from shoal_kernels.integers import IntegerWeight
from shoal_replica import LLM, SamplingParams
from shoal_replica.config import ParallelConfig
from shoal_replica.errors import ConfigError
from shoal_replica.model.quantization import quantize
from shoal_replica.model.weights import load_weights, stream_weights
from shoal_replica.model_config import ModelConfig
from shoal_replica.shard import make_shard
from shoal_replica.weight_formats import StoredQuantization

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Form:
    name: str
    store: Store
    said: dict[str, Any]
    served_as: str
    error: float = 0.0  # of a weight, relative to the largest of its group


def _gptq(**said: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False} | said


def _compressed(form: str, weights: dict[str, Any], **inputs: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs or None}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed",
    }  # fmt: skip


PACKED = "pack-quantized"
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
INT4_ZEROS = INT4 | {"symmetric": False}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
DYNAMIC_8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
ROUNDED = 2**-7  # rounding minimums to bf16, and zero points far from the middle
FORMS = [
    Form("gptq", gptq(), _gptq(), "int4"),
    Form("gptq-v2", gptq(shift=0), _gptq(checkpoint_format="gptq_v2"), "int4"),
    Form("gptq-zeros", gptq(sym=False), _gptq(sym=False), "int4", ROUNDED),
    Form("gptq-8", gptq(bits=8), _gptq(bits=8), "int8"),
    Form("gptq-channel", gptq(size=-1), _gptq(group_size=-1, desc_act=True), "int4"),
    Form("gptq-zero", gptq(sym=False, least=0), _gptq(sym=False), "int4", ROUNDED),
    Form("gptq-ordered", gptq(desc_act=True), _gptq(desc_act=True), "int8", 2**-7),
    Form("gptq-8-zeros", gptq(bits=8, sym=False), _gptq(bits=8, sym=False), "int8", 2**-7),
    Form("awq", awq(), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, "int4", ROUNDED),
    Form("packed", compressed(PACKED, **INT4), _compressed(PACKED, INT4), "int4"),
    Form("packed-zeros", compressed(PACKED, **INT4_ZEROS), _compressed(PACKED, INT4_ZEROS), "int4", ROUNDED),
    Form("packed-ordered", compressed_in_order(), _compressed(PACKED, INT4 | {"actorder": "group"}), "int8", 2**-7),
    Form("packed-8", compressed(PACKED, **INT8), _compressed(PACKED, INT8), "int8"),
    Form("w8a8", compressed("int-quantized", **INT8), _compressed("int-quantized", INT8, **DYNAMIC_8), "w8a8"),
    Form("float8", compressed("float-quantized", **FP8), _compressed("float-quantized", FP8), "none"),
    Form("fp8", fp8_blocks(), {"quant_method": "fp8", "weight_block_size": [32, 32]}, "none"),
    Form("fp8-ragged", fp8_blocks(wide=64), {"quant_method": "fp8", "weight_block_size": [32, 64]}, "none"),
]  # fmt: skip

Made = Callable[..., tuple[Path, Path]]


def make(form: Form, tmp_path: Path, family: str = "llama-llama3-rope") -> tuple[Path, Path]:
    return quantize_checkpoint(make_checkpoint(family, tmp_path / "source"), form.store, form.said, tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """``make``, once for all tests that only read what it makes."""
    known: dict[tuple[str, str], tuple[Path, Path]] = {}

    def find(form: Form, family: str = "llama-llama3-rope") -> tuple[Path, Path]:
        if (form.name, family) not in known:
            known[form.name, family] = make(form, tmp_path_factory.mktemp(form.name), family)
        return known[form.name, family]

    return find


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("family", ["llama-llama3-rope", "mixtral", "glm4-moe", "phi3-longrope", "qwen2"])
def test_weights_are_what_the_format_says(form: Form, family: str, made: Made) -> None:
    quantized, plain = made(form, family)
    config = ModelConfig.from_folder(quantized, dtype="float32")
    assert config.quantization == form.served_as
    expected = load_weights(ModelConfig.from_folder(plain), CPU)
    for name, weight in quantize(config, stream_weights(config, CPU)):
        is_projection = name.endswith("_proj.weight")
        assert isinstance(weight, IntegerWeight) == (is_projection and form.served_as != "none")
        if not isinstance(weight, IntegerWeight):
            assert torch.equal(weight, expected[name]), name
            continue
        assert weight.activation_bits == (8 if form.served_as == "w8a8" else 16)
        groups = expected[name].unflatten(1, (-1, 32))
        away = (weight.widen(torch.float32).unflatten(1, (-1, 32)) - groups).abs().amax(-1)
        assert (away <= groups.abs().amax(-1) * form.error).all(), name


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("family", ["llama-llama3-rope", "mixtral"])
def test_ranks_read_their_parts(form: Form, family: str, made: Made) -> None:
    """Whatever word, group or block a part begins in."""
    quantized, _ = made(form, family)
    parallel = ParallelConfig(tensor_parallel_size=2)
    config = ModelConfig.from_folder(quantized, dtype="float32")
    whole = load_weights(config, CPU)
    first, second = (load_weights(config, CPU, make_shard(config, parallel, rank)) for rank in range(2))
    for name, weight in whole.items():
        if not name.endswith("_proj.weight") or ".experts." in name:
            continue
        a, b = first[name], second[name]
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert torch.equal(torch.cat((a, b), dim=1), weight)
        else:  # several projections one above the other, of each of which a rank has a part
            assert sorted(map(tuple, torch.cat((a, b)).tolist())) == sorted(map(tuple, weight.tolist()))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_tokens_are_those_of_transformers(form: Form, made: Made) -> None:
    """On the weights that they stand for, in float32; in bf16, on native kernels, nearly so."""
    quantized, plain = made(form)
    write_tiny_tokenizer(quantized)
    prompts, oracle = make_prompts([5, 21, 60]), load_oracle(plain)
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    if not form.error:
        with LLM(str(quantized), num_blocks=32, dtype="float32") as llm:
            found = [output.token_ids for output in llm.generate(prompts, greedy)]
        assert found == [oracle_greedy(oracle, *asked) for asked in zip(prompts, [12] * 3, found, strict=True)]
    with LLM(str(quantized), num_blocks=32, dtype="bfloat16") as llm:
        first = [output.token_ids[0] for output in llm.generate(prompts, greedy)]
    assert sum([t] == oracle_greedy(oracle, p, 1, [t]) for t, p in zip(first, prompts, strict=True)) >= 2


@pytest.mark.parametrize("name", ["gptq", "packed-8", "float8"])
def test_experts_are_served_as_they_are_stored(name: str, tmp_path: Path) -> None:
    """In bfloat16 the native kernels are as near to float32 as torch's operators, which widen the weights. All experts
    of every token, because rounding would now and then choose others.
    """
    (form,) = [form for form in FORMS if form.name == name]
    quantized, _ = make(form, tmp_path, "mixtral")
    write_tiny_tokenizer(quantized)
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": config["num_local_experts"]}))
    (prompt,) = make_prompts([90])
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)

    def logprobs(dtype: str, block_size: int) -> Tensor:
        with LLM(str(quantized), num_blocks=32, block_size=block_size, dtype=dtype) as llm:
            (output,) = llm.generate([prompt], scored)
        return torch.tensor([token.logprob for token in output.prompt_logprobs])

    exact, by_torch, by_native = logprobs("float32", 8), logprobs("bfloat16", 8), logprobs("bfloat16", 16)
    assert len(exact) == len(prompt) - 1
    assert (by_native - exact).abs().mean() < 1.3 * (by_torch - exact).abs().mean()
    assert (by_torch - exact).abs().mean() < exact.std() / 10


@pytest.mark.parametrize("name", ["packed", "packed-zeros", "packed-8", "w8a8", "float8", "fp8"])
def test_transformers_reads_the_same_checkpoint(name: str, tmp_path: Path) -> None:
    """By compressed-tensors, or by its own code for blocks of 8-bit floats."""
    (form,) = (form for form in FORMS if form.name == name)
    quantized, plain = make(form, tmp_path)
    asked = FineGrainedFP8Config(dequantize=True) if name == "fp8" else CompressedTensorsConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(quantized, dtype=torch.float32, quantization_config=asked)
    token_ids = torch.tensor(make_prompts([40]))
    torch.testing.assert_close(theirs(token_ids).logits, load_oracle(plain)(token_ids).logits, rtol=1e-4, atol=1e-4)


def test_what_is_plain_stays_plain(tmp_path: Path) -> None:
    """A projection that was left out, tables, and biases of zeros that GPTQ's tools add."""
    quantized, plain = make(FORMS[0], tmp_path)
    stored, kept = load_file(quantized / "model.safetensors"), load_file(plain / "model.safetensors")
    left_out = "model.layers.1.self_attn.k_proj"
    stored = {name: tensor for name, tensor in stored.items() if not name.startswith(left_out)}
    stored[f"{left_out}.weight"] = kept[f"{left_out}.weight"] + 0.001
    stored["model.layers.0.mlp.up_proj.bias"] = torch.zeros(96)
    save_file(stored, quantized / "model.safetensors")
    config = ModelConfig.from_folder(quantized, dtype="float32")
    weights = dict(quantize(config, stream_weights(config, CPU)))
    mixed = weights["layers.1.qkv_proj.weight"]
    assert isinstance(mixed, torch.Tensor)
    expected = load_weights(ModelConfig.from_folder(plain), CPU)["layers.1.qkv_proj.weight"]
    assert torch.equal(mixed[64:96], stored[f"{left_out}.weight"])
    assert torch.equal(mixed[:64], expected[:64])
    assert torch.equal(mixed[96:], expected[96:])
    assert isinstance(weights["layers.0.qkv_proj.weight"], IntegerWeight)
    assert isinstance(weights["embed_tokens.weight"], torch.Tensor)


@pytest.mark.parametrize(
    ("form", "asked", "served"),
    [
        ("gptq", "w4a8", "w4a8"), ("awq", "int4", "int4"), ("w8a8", "int8", "int8"), ("packed-8", "w8a8", "w8a8"),
        ("fp8", "int4", "int4"), ("float8", "w8a8", "w8a8"), ("gptq-ordered", "int4", "int4"),
        ("gptq", "int8", "int8"), ("w8a8", "w4a8", "w4a8"),
    ],
)  # fmt: skip
def test_a_deployment_may_ask_for_another_format(form: str, asked: str, served: str, tmp_path: Path) -> None:
    (found,) = (each for each in FORMS if each.name == form)
    quantized, _ = make(found, tmp_path)
    config = ModelConfig.from_folder(quantized, dtype="float32", quantization=asked)
    assert config.quantization == served
    for name, weight in quantize(config, stream_weights(config, CPU)):
        if name.endswith("_proj.weight"):
            assert isinstance(weight, IntegerWeight)
            assert weight.bits == (4 if "4" in served.removesuffix("a8") else 8)
            assert weight.activation_bits == (8 if served.endswith("a8") else 16)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method .* 'bitsandbytes'; must be one of gptq"),
        (_gptq(bits=3), "bits of .* is 3; must be 4 or 8"),
        (_gptq(group_size=16), "group_size of .* is 16; must be -1 or a multiple of 32"),
        (_gptq(checkpoint_format="marlin"), "checkpoint_format of .* 'marlin'; must be 'gptq' or 'gptq_v2'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version of .* 'gemv'"),
        (_compressed(PACKED, INT4 | {"actorder": "sideways"}), "actorder of .* 'sideways'"),
        (_gptq(bits=4.0), "bits of .* is 4.0; must be 4 or 8"),
        (_compressed("nvfp4-pack-quantized", FP8 | {"num_bits": 4}), "num_bits of .* is 4; must be 8"),
        (_compressed(PACKED, INT4) | {"config_groups": {}}, r"config_groups of .* is \[\]; must be one"),
        (_compressed(PACKED, INT4) | {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ([1], "quantization_config in config.json is"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name(said: Any, message: str, tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_folder(folder)


def test_nulls_count_as_absent(tmp_path: Path) -> None:
    said = _gptq(sym=None, desc_act=None, checkpoint_format=None)
    quantized, _ = quantize_checkpoint(make_checkpoint("llama", tmp_path / "source"), gptq(), said, tmp_path)
    assert ModelConfig.from_folder(quantized).stored == StoredQuantization(
        method="gptq", bits=4, group_size=32, zero_point_shift=1
    )


def test_8_bits_with_zero_points_that_the_config_does_not_tell_of(tmp_path: Path) -> None:
    form = Form("gptq-8-told-wrong", gptq(bits=8, sym=False), _gptq(bits=8), "int8")
    quantized, plain = make(form, tmp_path)
    ours, expected = (load_weights(ModelConfig.from_folder(folder, "float32"), CPU) for folder in (quantized, plain))
    for name, weight in expected.items():
        assert (ours[name] - weight).abs().max() <= weight.abs().max() * 2**-7, name


def test_scales_of_kv_and_empty_biases_are_left_unread(tmp_path: Path) -> None:
    quantized, _ = make(FORMS[0], tmp_path)
    config, stored = ModelConfig.from_folder(quantized), load_file(quantized / "model.safetensors")
    before = load_weights(config, CPU)
    for name in ("self_attn.k_scale", "self_attn.v_scale", "self_attn.k_proj.output_scale", "self_attn.kv_scale"):
        stored[f"model.layers.0.{name}"] = torch.ones(1)
    save_file(stored, quantized / "model.safetensors")
    assert all(torch.equal(weight, before[name]) for name, weight in load_weights(config, CPU).items())


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    quantized, _ = make(FORMS[0], tmp_path)
    config = ModelConfig.from_folder(quantized)
    stored = load_file(quantized / "model.safetensors")
    base = "model.layers.1.mlp.down_proj"
    for change, message in (
        ({f"{base}.qzeros": None}, f"'{base}.qzeros' is missing"),
        ({f"{base}.qweight": None}, f"'{base}.weight' is missing"),
        ({f"{base}.scales": torch.ones(2, 64)}, r"shape \(2, 64\); config.json asks for \(3, 64\)"),
        ({f"{base}.qweight": torch.ones(12, 64)}, "is of F32; must be of I32"),
        ({f"{base}.scales": torch.ones(3, 64).int()}, "is of I32; must be of F16 or BF16 or F32"),
        ({f"{base}.g_idx": torch.arange(96).flip(0).int() // 32}, "out of order; desc_act must say so"),
        ({f"{base}.bias": torch.ones(64)}, f"unexpected tensor '{base}.bias'"),
        ({f"{base}.mystery": torch.ones(64)}, f"unexpected tensor '{base}.mystery'"),
    ):
        changed = {name: tensor for name, tensor in (stored | change).items() if tensor is not None}
        save_file(changed, quantized / "model.safetensors")
        with pytest.raises(ConfigError, match=message):
            load_weights(config, CPU)


@pytest.mark.parametrize("name", ["w8a8", "float8"])
def test_weights_that_are_not_what_the_config_says(name: str, tmp_path: Path) -> None:
    """As written before they were compressed: they are rounded already, and scaled."""
    (form,) = (each for each in FORMS if each.name == name)
    quantized, plain = make(form, tmp_path)
    whole = load_file(quantized / "model.safetensors") | load_file(plain / "model.safetensors")
    save_file(whole, quantized / "model.safetensors")
    with pytest.raises(ConfigError, match="is of F32; must be of"):
        load_weights(ModelConfig.from_folder(quantized), CPU)


@pytest.mark.parametrize(
    ("change", "message"), [(None, "g_idx' is missing"), (1, "names groups beyond the 2 there are")]
)
def test_groups_out_of_order_need_to_be_told(change: int | None, message: str, tmp_path: Path) -> None:
    (form,) = (each for each in FORMS if each.name == "gptq-ordered")
    quantized, _ = make(form, tmp_path)
    stored, name = load_file(quantized / "model.safetensors"), "model.layers.0.self_attn.q_proj.g_idx"
    told = stored.pop(name)
    if change is not None:
        stored[name] = told + change
    save_file(stored, quantized / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load_weights(ModelConfig.from_folder(quantized), CPU)
