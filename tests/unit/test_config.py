"""Configurations: read correctly from a model folder, and refused in one line if they cannot work."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal_cluster.commands.deploy import read_config
from shoal_cluster.config import ClusterConfig
from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.serve.admission_desk import limits_of
from shoal_replica import memory
from shoal_replica.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from shoal_replica.errors import ConfigError, NotFound
from shoal_replica.memory import available_bytes, default_num_blocks
from shoal_replica.memory_plan import MemoryPlan, plan_host
from shoal_replica.model_config import ModelConfig
from shoal_replica.moe_config import MoeConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "eos_token_id": 2,
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
}


def write(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A model folder with LLAMA's config; a change to None removes the key."""
    config = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


class TestModelConfig:
    def test_reads_a_llama(self, tmp_path: Path) -> None:
        model = ModelConfig.from_folder(write(tmp_path))
        assert (model.num_heads, model.num_kv_heads, model.head_size) == (4, 2, 16)
        assert (model.max_model_len, model.dtype, model.eos_token_ids) == (512, "bfloat16", (2,))
        assert (model.rope_theta, model.rope_scaling, model.sliding_window) == (50000.0, None, None)
        assert not any((model.qkv_bias, model.output_bias, model.mlp_bias, model.qk_norm))

    def test_counts_its_parameters(self, tmp_path: Path) -> None:
        model = ModelConfig.from_folder(write(tmp_path))
        layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64
        assert model.num_parameters == 1000 * 64 + 2 * layer + 64
        biases = ModelConfig.from_folder(write(tmp_path, attention_bias=True, mlp_bias=True))
        assert biases.num_parameters - model.num_parameters == 2 * (64 + 2 * 32 + 64 + 2 * 128 + 64)
        assert model.weight_bytes == 2 * model.num_parameters
        assert replace(model, dtype="float32").weight_bytes == 4 * model.num_parameters
        assert replace(model, tie_word_embeddings=False).num_parameters == model.num_parameters + 1000 * 64

    def test_a_block_is_keys_and_values_of_all_layers(self, tmp_path: Path) -> None:
        assert ModelConfig.from_folder(write(tmp_path)).block_bytes(16) == 2 * 2 * 2 * 16 * 16 * 2

    @pytest.mark.parametrize(
        ("stored", "asked", "used"),
        [
            ("float32", "auto", "float32"),
            ("float16", "auto", "bfloat16"),
            (None, "auto", "bfloat16"),
            ("bfloat16", "float32", "float32"),
        ],
    )
    def test_dtype(self, tmp_path: Path, stored: str | None, asked: str, used: str) -> None:
        assert ModelConfig.from_folder(write(tmp_path, dtype=stored), asked).dtype == used

    def test_generation_config_names_the_ends(self, tmp_path: Path) -> None:
        assert ModelConfig.from_folder(write(tmp_path, {"eos_token_id": [3, 4]})).eos_token_ids == (3, 4)
        assert ModelConfig.from_folder(write(tmp_path, {"temperature": 1.0})).eos_token_ids == (2,)

    def test_families(self, tmp_path: Path) -> None:
        qwen2 = ModelConfig.from_folder(write(tmp_path, architectures=["Qwen2ForCausalLM"], sliding_window=128))
        assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm, qwen2.sliding_window) == (True, False, False, None)
        qwen3 = ModelConfig.from_folder(write(tmp_path, architectures=["Qwen3ForCausalLM"], head_dim=32))
        assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_size) == (False, True, 32)
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        moe = ModelConfig.from_folder(write(tmp_path, architectures=["Qwen3MoeForCausalLM"], **experts))
        assert moe.moe == MoeConfig(
            num_experts=8, num_experts_per_token=2, intermediate_size=32, renormalize=True, layers=(0, 1)
        )
        mistral = ModelConfig.from_folder(write(tmp_path, architectures=["MistralForCausalLM"], sliding_window=128))
        assert mistral.sliding_window == 128
        llama = ModelConfig.from_folder(write(tmp_path, architectures=["LlamaForCausalLM"], sliding_window=128))
        assert llama.sliding_window is None, "transformers' Llama has none"
        experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
        mixtral = ModelConfig.from_folder(write(tmp_path, architectures=["MixtralForCausalLM"], **experts))
        assert mixtral.moe is not None
        assert (mixtral.moe.renormalize, mixtral.moe.intermediate_size, mixtral.moe.layers) == (True, 128, (0, 1))
        assert (mixtral.moe.stored_in, mixtral.moe.projections) == ("block_sparse_moe", ("w1", "w3", "w2"))
        experts = {"num_experts": 8, "num_experts_per_tok": 2}
        olmoe = ModelConfig.from_folder(write(tmp_path, architectures=["OlmoeForCausalLM"], **experts))
        assert olmoe.moe is not None
        assert (olmoe.moe.renormalize, olmoe.norm_placement, olmoe.qk_norm_spans_heads) == (False, "pre", True)
        experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "residual_multiplier": 0.5}
        granite = ModelConfig.from_folder(write(tmp_path, architectures=["GraniteMoeForCausalLM"], **experts))
        assert granite.moe is not None
        assert (granite.moe.router, granite.embedding_scale) == ("router.layer", 2.0)
        experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2}
        glm = ModelConfig.from_folder(
            write(tmp_path, architectures=["Glm4MoeForCausalLM"], routed_scaling_factor=2.5, **experts)
        )
        assert glm.moe == MoeConfig(
            num_experts=8, num_experts_per_token=2, intermediate_size=32, renormalize=True, layers=(1,),
            scores="sigmoid", scale=2.5, router_bias="gate.e_score_correction_bias", shared_size=64,
        )  # fmt: skip
        assert (glm.rotary_size, glm.rms_norm_eps, glm.qk_norm, glm.num_extra_layers) == (8, 1e-5, False, 0)
        dots = ModelConfig.from_folder(write(tmp_path, architectures=["Dots1ForCausalLM"], **experts))
        assert dots.moe is not None
        assert (dots.moe.renormalize, dots.moe.layers, dots.qk_norm, dots.rotary_size) == (False, (0, 1), True, None)
        assert dots.sliding_window is None  # all layers come before the first that has one
        experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8}
        minimax = ModelConfig.from_folder(write(tmp_path, architectures=["MiniMaxM2ForCausalLM"], **experts))
        assert minimax.moe is not None
        assert (minimax.moe.scores, minimax.moe.router_bias) == ("sigmoid", "e_score_correction_bias")
        assert (minimax.qk_norm_spans_heads, minimax.rotary_size, minimax.moe.shared_size) == (True, 8, 0)
        phi = ModelConfig.from_folder(write(tmp_path, architectures=["Phi3ForCausalLM"], partial_rotary_factor=0.75))
        assert (phi.has_packed_projections, phi.rotary_size, phi.head_size) == (True, 12, 16)
        assert not any((phi.qkv_bias, phi.output_bias, phi.mlp_bias, phi.qk_norm))
        smol = {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 9}
        assert ModelConfig.from_folder(write(tmp_path, **smol)).unrotated_layers == (3, 7)
        for architecture, is_tied in (("SmolLM3ForCausalLM", True), ("LlamaForCausalLM", False)):
            untold = {"architectures": [architecture], "tie_word_embeddings": None}
            assert ModelConfig.from_folder(write(tmp_path, **untold)).tie_word_embeddings is is_tied
        smol["sliding_window"] = 64  # which it uses only if it says so
        assert ModelConfig.from_folder(write(tmp_path, **smol)).sliding_window is None
        smol["no_rope_layers"] = [0, 1, 1, 1, 1, 1, 1, 1, 0]
        assert ModelConfig.from_folder(write(tmp_path, **smol)).unrotated_layers == (0, 8)

    def test_windows_in_some_layers(self, tmp_path: Path) -> None:
        """By ``layer_types``, or by what each family goes by without them."""

        def full_layers(architecture: str, **fields: Any) -> tuple[int | None, tuple[int, ...]]:
            fields = {"num_hidden_layers": 8, "sliding_window": 64} | fields
            model = ModelConfig.from_folder(write(tmp_path, architectures=[architecture], **fields))
            return model.sliding_window, model.full_layers

        qwen = {"use_sliding_window": True, "max_window_layers": 5}
        assert full_layers("Qwen2ForCausalLM", **qwen) == (64, (0, 1, 2, 3, 4))
        assert full_layers("Qwen3ForCausalLM", **qwen | {"max_window_layers": 8}) == (None, ())
        types = ["sliding_attention"] * 7 + ["full_attention"]
        assert full_layers("Qwen3ForCausalLM", **qwen, layer_types=types) == (64, (7,))
        assert full_layers("Gemma3ForCausalLM", sliding_window_pattern=3) == (64, (2, 5))
        assert full_layers("Gemma3ForCausalLM") == (64, (5,))
        assert full_layers("Olmo3ForCausalLM") == (64, (3, 7))
        assert full_layers("Olmo2ForCausalLM") == (None, ())
        assert full_layers("Exaone4ForCausalLM", sliding_window_pattern="LLG") == (64, (2, 5))
        (tmp_path / "config.json").write_text(
            json.dumps(LLAMA | {"architectures": ["Exaone4ForCausalLM"], "sliding_window": None})
        )
        model = ModelConfig.from_folder(tmp_path)
        assert (model.sliding_window, model.full_layers, model.unrotated_layers) == (None, (), ())
        exaone = {"architectures": ["Exaone4ForCausalLM"], "layer_types": ["full_attention"] * 2}
        model = ModelConfig.from_folder(write(tmp_path, **exaone))  # whose window is there, if in no layer
        assert (model.sliding_window, model.full_layers, model.unrotated_layers) == (None, (), (0, 1))

    @pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Olmo3ForCausalLM"])
    def test_null_is_as_good_as_nothing(self, tmp_path: Path, architecture: str) -> None:
        """But for a window, where it says that there is none."""
        config = LLAMA | {"architectures": [architecture], "num_hidden_layers": 6}
        absent = {key: value for key, value in config.items() if key not in ("rope_theta", "rms_norm_eps")}
        (tmp_path / "config.json").write_text(json.dumps(absent))
        expected = ModelConfig.from_folder(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": None, "rms_norm_eps": None}))
        assert ModelConfig.from_folder(tmp_path) == expected
        assert expected.sliding_window == 4096
        (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": None}))
        assert ModelConfig.from_folder(tmp_path).sliding_window is None

    def test_a_layer_with_a_window_may_be_rotated_differently(self, tmp_path: Path) -> None:
        gemma = {"architectures": ["Gemma3ForCausalLM"], "rope_theta": 1e6, "rope_local_base_freq": 1e4}
        first = ModelConfig.from_folder(write(tmp_path, **gemma, rope_scaling={"rope_type": "linear", "factor": 8.0}))
        assert (first.rope_theta, first.window_rope_theta) == (1e6, 1e4)
        assert first.rope_scaling == {"rope_type": "linear", "factor": 8.0}
        by_kind = {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
        again = ModelConfig.from_folder(write(tmp_path, architectures=gemma["architectures"], rope_parameters=by_kind))
        assert again == first
        yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
        olmo = ModelConfig.from_folder(
            write(tmp_path, architectures=["Olmo3ForCausalLM"], num_hidden_layers=4, rope_scaling=yarn)
        )
        assert (olmo.rope_theta, olmo.window_rope_theta) == (50000.0, 50000.0)
        plain = ModelConfig.from_folder(write(tmp_path, architectures=["Olmo3ForCausalLM"], num_hidden_layers=4))
        assert (plain.rope_theta, plain.window_rope_theta) == (50000.0, None)

    def test_gemma_leaves_out_what_transformers_knows(self, tmp_path: Path) -> None:
        """As its models for text and images do, whose decoder is one part of them."""
        text = {
            "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "model_type": "gemma3_text",
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
            "eos_token_id": 1,  # as transformers saves it: the family's default, which ends no turn of a chat
        }  # fmt: skip
        raw = {
            "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": text,
            "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152}, "image_token_index": 262144,
        }  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(raw))
        model = ModelConfig.from_folder(tmp_path)
        assert (model.num_heads, model.num_kv_heads, model.head_size, model.vocab_size) == (8, 4, 256, 262208)
        assert (model.hidden_size, model.activation, model.norm_placement) == (2560, "gelu_tanh", "both")
        assert (model.rope_theta, model.window_rope_theta, model.max_model_len) == (1e6, 1e4, 131072)
        assert (model.sliding_window, model.full_layers) == (1024, (5, 11, 17, 23, 29))
        assert model.tie_word_embeddings
        assert model.eos_token_ids == (1, 106)
        assert model.attention_scale == 1 / 16
        assert model.embedding_scale == 50.5  # the root of 2560 is 50.596, which bfloat16 does not have
        assert ModelConfig.from_folder(tmp_path, "float32").embedding_scale == 2560**0.5

    def test_granite_scales_its_stream(self, tmp_path: Path) -> None:
        scales = {
            "embedding_multiplier": 12, "residual_multiplier": 0.25, "attention_multiplier": 0.0625, "logits_scaling": 8
        }  # fmt: skip
        model = ModelConfig.from_folder(
            write(tmp_path, architectures=["GraniteForCausalLM"], rms_norm_eps=1e-5, **scales)
        )
        assert (model.embedding_scale, model.attention_scale, model.logits_divisor) == (48.0, 0.0625, 8.0)
        assert model.rms_norm_eps == 1.6e-4

    def test_norms_of_all_heads_are_not_for_tensor_parallel_ranks(self, tmp_path: Path) -> None:
        model = ModelConfig.from_folder(write(tmp_path, architectures=["Olmo2ForCausalLM"]))
        cache = CacheConfig(num_blocks=64)
        EngineConfig(model=model, cache=cache, parallel=ParallelConfig(pipeline_parallel_size=2))
        with pytest.raises(ConfigError, match=r"tensor_parallel_size: got 2; must be 1 for Olmo2ForCausalLM"):
            EngineConfig(model=model, cache=cache, parallel=ParallelConfig(tensor_parallel_size=2))

    def test_no_rank_is_without_experts(self, tmp_path: Path) -> None:
        experts = {"num_local_experts": 3, "num_experts_per_tok": 2}
        model = ModelConfig.from_folder(write(tmp_path, architectures=["MixtralForCausalLM"], **experts))
        cache = CacheConfig(num_blocks=64)
        EngineConfig(model=model, cache=cache, parallel=ParallelConfig(tensor_parallel_size=3))
        with pytest.raises(ConfigError, match=r"tensor_parallel_size: got 4; must be at most 3, .* number of experts"):
            EngineConfig(model=model, cache=cache, parallel=ParallelConfig(tensor_parallel_size=4))

    def test_yarn_says_for_which_length_it_is(self, tmp_path: Path) -> None:
        """Qwen's instructions add it to the config, and leave the length there as it was."""
        scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
        asked = write(tmp_path, max_position_embeddings=40960, rope_scaling=scaled)
        assert ModelConfig.from_folder(asked).max_model_len == 131072
        scaled.pop("original_max_position_embeddings")
        asked = write(tmp_path, max_position_embeddings=1000, rope_scaling=scaled)
        assert ModelConfig.from_folder(asked).max_model_len == 4000

    def test_a_pool_changes_no_angles(self, tmp_path: Path) -> None:
        """It may lower the length, but replicas with other pools must go on with the same keys."""
        scaled = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
        lengths = {"max_position_embeddings": 1024, "original_max_position_embeddings": 128}
        model = ModelConfig.from_folder(write(tmp_path, rope_scaling=scaled, **lengths))
        engine = EngineConfig(model=model, cache=CacheConfig(num_blocks=4, block_size=16))
        assert (engine.model.max_model_len, engine.model.rope_scaling) == (64, model.rope_scaling)

    def test_longrope_takes_its_factor_from_the_lengths(self, tmp_path: Path) -> None:
        scaled = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
        lengths = {"max_position_embeddings": 1024, "original_max_position_embeddings": 128}
        model = ModelConfig.from_folder(write(tmp_path, rope_scaling=scaled, **lengths))
        assert model.rope_scaling is not None
        assert (model.rope_scaling["rope_type"], model.rope_scaling["factor"]) == ("longrope", 8.0)
        assert model.max_model_len == 1024
        assert model.rope_scaling["divisors"] == [2.0] * 8
        short = ModelConfig.from_folder(write(tmp_path, rope_scaling=scaled, **lengths), max_model_len=128)
        assert short.rope_scaling is not None
        assert short.rope_scaling["divisors"] == [1.0] * 8
        for name in ({"type": "su"}, {"rope_type": "su"}, {"type": "yarn"}):  # as the first checkpoints have it
            named = {key: value for key, value in scaled.items() if key != "type"} | name
            assert ModelConfig.from_folder(write(tmp_path, rope_scaling=named, **lengths)) == model
        scaled["factor"] = 3.0  # unless it is given
        model = ModelConfig.from_folder(write(tmp_path, rope_scaling=scaled, **lengths))
        assert model.rope_scaling is not None
        assert model.rope_scaling["factor"] == 3.0

    def test_rope_of_either_spelling(self, tmp_path: Path) -> None:
        scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scaled["original_max_position_embeddings"] = 64
        old = ModelConfig.from_folder(write(tmp_path, rope_scaling=scaled))
        assert (old.rope_scaling, old.rope_theta) == (scaled, 50000.0)
        parameters = scaled | {"rope_theta": 7.0}
        new = ModelConfig.from_folder(write(tmp_path, rope_parameters=parameters, rope_theta=None))
        assert (new.rope_scaling, new.rope_theta) == (scaled, 7.0)
        del scaled["original_max_position_embeddings"]  # transformers takes the model's length for it
        assert ModelConfig.from_folder(write(tmp_path, rope_scaling=scaled)).rope_scaling == scaled | {
            "original_max_position_embeddings": 512
        }

    def test_a_shorter_length_may_be_asked_for(self, tmp_path: Path) -> None:
        assert ModelConfig.from_folder(write(tmp_path), max_model_len=100).max_model_len == 100

    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match="no folder"):
            ModelConfig.from_folder(tmp_path / "absent")

    def test_no_config(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match="holds no config"):
            ModelConfig.from_folder(tmp_path)

    @pytest.mark.parametrize("text", ["{", "[]", "\x00"])
    def test_not_a_config(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"config\.json"):
            ModelConfig.from_folder(tmp_path)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            (
                {"architectures": ["GPT2LMHeadModel"]},
                "architecture 'GPT2LMHeadModel' is not one of Dots1ForCausalLM, Exaone4ForCausalLM, ",
            ),
            ({"architectures": None}, "architecture '?' is not one of"),
            ({"architectures": []}, "architecture '?' is not one of"),
            ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
            ({"rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic' is not one of"),
            (
                {"rope_scaling": {"type": "yarn"}},
                "factor of rope type 'yarn' in config.json is None; must be a number above 0",
            ),
            ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor of rope type 'linear' in config.json is 0"),
            (
                {"rope_scaling": {"type": "llama3", "factor": 8.0}},
                "low_freq_factor of rope type 'llama3' in config.json is None",
            ),
            (
                {"rope_scaling": {"type": "su", "original_max_position_embeddings": 64, "short_factor": [1.0] * 8}},
                "long_factor in config.json must be a list of 8 numbers above 0",
            ),
            (
                {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.2},
                "partial_rotary_factor in config.json rotates 3 of a head's 16",
            ),
            (
                {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 5},
                "num_experts_per_tok in config.json is 5; must be at most 4",
            ),
            ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "no_rope_layers in config.json is [1]"),
            (
                {"architectures": ["SmolLM3ForCausalLM"], "use_sliding_window": True, "sliding_window": 64},
                "use_sliding_window",
            ),
            (
                {"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0},
                "final_logit_softcapping in config.json is 30.0; it is not supported",
            ),
            (
                {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True},
                "use_bidirectional_attention in config.json is set",
            ),
            (
                {"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "relu"},
                "hidden_activation 'relu' is not supported, only silu, gelu_pytorch_tanh",
            ),
            (
                {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": 3},
                "text_config in config.json is 3; must be an object",
            ),
            (
                {"architectures": ["Olmo3ForCausalLM"], "layer_types": ["full_attention"]},
                "layer_types in config.json is ['full_attention']; must be a list of 2, each 'sliding_attention'",
            ),
            (
                {"architectures": ["Olmo3ForCausalLM"], "layer_types": ["full_attention", "linear_attention"]},
                "layer_types in config.json is ['full_attention', 'linear_attention']; must be a list of 2",
            ),
            (
                {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8}
                | {"max_window_layers": "x"},
                "max_window_layers in config.json is 'x'",
            ),
            (
                {
                    "architectures": ["Gemma3ForCausalLM"],
                    "rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "yarn"}},
                },
                "rope type 'yarn' is not supported in layers with a window alone",
            ),
            (
                {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
                | {"hidden_act": "gelu_pytorch_tanh"},
                "hidden_act 'gelu_pytorch_tanh' is not supported in experts, only 'silu'",
            ),
            (
                {"architectures": ["Glm4MoeForCausalLM"], "n_group": 8},
                "n_group in config.json is 8; groups of experts are not supported",
            ),
            (
                {"architectures": ["Dots1ForCausalLM"], "n_routed_experts": 4, "moe_intermediate_size": 32}
                | {"first_k_dense_replace": -1},
                "first_k_dense_replace in config.json is -1; must be an integer of at least 0",
            ),
            (
                {"architectures": ["OlmoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 8.0},
                "clip_qkv in config.json is 8.0; it is not supported",
            ),
            ({"architectures": "LlamaForCausalLM"}, "architecture '?' is not one of"),
            ({"rope_scaling": "yarn"}, "rope_scaling in config.json is 'yarn'; must be an object"),
            ({"rope_parameters": [1]}, "rope_parameters in config.json is [1]; must be an object"),
            ({"rope_theta": "x"}, "rope_theta in config.json is 'x'; must be a number above 0"),
            ({"rope_theta": -1.0}, "rope_theta in config.json is -1.0; must be a number above 0"),
            (
                {"rope_scaling": {"type": "linear", "factor": math.nan}},
                "factor of rope type 'linear' in config.json is nan",
            ),
            (
                {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": "12"}},
                "beta_fast of rope type 'yarn' in config.json is '12'; must be a number above 0",
            ),
            (
                {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": math.inf}},
                "original_max_position_embeddings in config.json is inf; must be a number above 0",
            ),
            ({"rms_norm_eps": [1]}, "rms_norm_eps in config.json is [1]; must be a number above 0"),
            ({"max_position_embeddings": "x"}, "max_position_embeddings in config.json is 'x'"),
            ({"head_dim": "16"}, "head_dim in config.json is '16'; must be an integer of at least 1"),
            ({"eos_token_id": "x"}, "eos_token_id is 'x'; must be a token id, or a list of them"),
            ({"vocab_size": None}, "vocab_size in config.json is None; must be an integer of at least 1"),
            ({"hidden_size": "64"}, "hidden_size in config.json is '64'"),
            ({"hidden_size": None, "head_dim": None}, "hidden_size in config.json is None"),
            ({"intermediate_size": 1.5}, "intermediate_size in config.json is 1.5"),
            ({"num_hidden_layers": True}, "num_hidden_layers in config.json is True"),
            ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads evenly"),
            (
                {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 5},
                "num_experts_per_tok in config.json is 5; must be at most 4",
            ),
            ({"num_attention_heads": 0}, "num_attention_heads in config.json is 0"),
            (
                {"architectures": ["Qwen3MoeForCausalLM"], "use_sliding_window": True, "sliding_window": 64}
                | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
                "use_sliding_window",
            ),
        ],
    )
    def test_models_that_cannot_be_served(self, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigError) as caught:
            ModelConfig.from_folder(write(tmp_path, **changes))
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_a_dtype_nobody_computes_in(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="dtype: got 'int4'; must be 'auto' or one of bfloat16, float32"):
            ModelConfig.from_folder(write(tmp_path), "int4")

    @pytest.mark.parametrize("length", [0, -1, 513])
    def test_a_length_beyond_the_model(self, tmp_path: Path, length: int) -> None:
        with pytest.raises(ConfigError, match=f"max_model_len: got {length}; the model allows 1 to 512"):
            ModelConfig.from_folder(write(tmp_path), max_model_len=length)


class TestEngineConfigs:
    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda: CacheConfig(num_blocks=0), "num_blocks: got 0; must be an integer of at least 1"),
            (lambda: CacheConfig(num_blocks=1, block_size=0), "block_size: got 0"),
            (
                lambda: CacheConfig(num_blocks=1, num_host_blocks=-1),
                "num_host_blocks: got -1; must be an integer of at least 0",
            ),
            (
                lambda: CacheConfig(num_blocks=1, num_host_blocks=4, enable_prefix_caching=False),
                "num_host_blocks: got 4; must be 0 without enable_prefix_caching",
            ),
            (lambda: CacheConfig(num_blocks=1.5), "num_blocks: got 1.5"),  # type: ignore[arg-type]
            (lambda: CacheConfig(num_blocks=True), "num_blocks: got True"),
            (lambda: SchedulerConfig(max_num_seqs=0), "max_num_seqs: got 0"),
            (lambda: SchedulerConfig(max_num_waiting=0), "max_num_waiting: got 0"),
            (lambda: SchedulerConfig(max_num_batched_tokens=512.0), "max_num_batched_tokens: got 512.0"),  # type: ignore[arg-type]
            (
                lambda: SchedulerConfig(max_num_seqs=9, max_num_batched_tokens=8),
                "max_num_batched_tokens: got 8; must be at least max_num_seqs (9)",
            ),
            (lambda: SchedulerConfig(policy="lifo"), "policy: got 'lifo'; must be one of fcfs, priority"),
            (lambda: ParallelConfig(num_threads=0), "num_threads: got 0"),
            (lambda: ParallelConfig(num_threads=1025), "num_threads: got 1025; must be at most 1024"),
            (lambda: ParallelConfig(rank_timeout_s=0.5), "rank_timeout_s: got 0.5; must be at least 1 second"),
            (lambda: ParallelConfig(device="tpu"), "device: got 'tpu'; must be one of cpu"),
        ],
    )
    def test_impossible_values(self, make: Any, words: str) -> None:
        with pytest.raises(ConfigError) as caught:
            make()
        assert str(caught.value).startswith(words)

    def test_a_sequence_never_outgrows_the_pool(self, tmp_path: Path) -> None:
        model = ModelConfig.from_folder(write(tmp_path))
        assert EngineConfig(model=model, cache=CacheConfig(num_blocks=31)).model.max_model_len == 496
        assert EngineConfig(model=model, cache=CacheConfig(num_blocks=32)).model is model


class TestMemory:
    def plan(
        self, model: ModelConfig, num_blocks: int, free: int, parallel: ParallelConfig | None = None
    ) -> MemoryPlan:
        cache = CacheConfig(num_blocks=num_blocks)
        return plan_host(model, SchedulerConfig(), parallel or ParallelConfig(), cache, free)

    def test_what_fits_passes_to_the_byte(self, tmp_path: Path) -> None:
        model = ModelConfig.from_folder(write(tmp_path))
        taken = self.plan(model, 10, 0)
        exact = model.weight_bytes + taken.tables + taken.activations + 10 * model.block_bytes(16)
        self.plan(model, 10, exact).check()
        with pytest.raises(ConfigError, match=r"num_blocks: got 10; .*; num_blocks=9 fits"):
            self.plan(model, 10, exact - 1).check()

    def test_the_advice_is_right(self, tmp_path: Path) -> None:
        model = ModelConfig.from_folder(write(tmp_path))
        taken = self.plan(model, 7, 0)
        free = model.weight_bytes + taken.tables + taken.activations + 7 * model.block_bytes(16) + 5
        with pytest.raises(ConfigError, match="num_blocks=7 fits"):
            self.plan(model, 1000, free).check()
        self.plan(model, 7, free).check()

    def test_a_model_too_big_has_no_advice(self, tmp_path: Path) -> None:
        model = ModelConfig.from_folder(write(tmp_path))
        with pytest.raises(ConfigError, match="the weights alone do not fit"):
            self.plan(model, 1, model.weight_bytes - 1).check()
        with pytest.raises(ConfigError, match="not one block fits"):
            self.plan(model, 1, model.weight_bytes).check()

    def test_ranks_share_the_host(self, tmp_path: Path) -> None:
        """Weights are sharded, except norms. Two KV heads on four ranks are held twice: projections and blocks."""
        model = ModelConfig.from_folder(write(tmp_path))
        whole, cut = self.plan(model, 1, 0), self.plan(model, 1, 0, ParallelConfig(tensor_parallel_size=4))
        norms = 3 * (2 * model.num_layers + 1) * model.hidden_size
        kv_projections = model.num_layers * 2 * model.num_kv_heads * model.head_size * model.hidden_size
        assert cut.weights == whole.weights + 2 * (norms + kv_projections)
        assert cut.block == 2 * whole.block
        assert cut.communication > whole.communication == 0
        assert "cpu, bfloat16: weights" in cut.report()

    def test_a_pool_for_ordinary_traffic(self, tmp_path: Path) -> None:
        model = ModelConfig.from_folder(write(tmp_path))
        assert default_num_blocks(model, self.plan(model, 1, 2**40), 16, 8) == 8 * 512 // 16
        taken = self.plan(model, 1, 0)
        tight = model.weight_bytes + taken.tables + taken.activations + 10 * model.block_bytes(16)
        assert default_num_blocks(model, self.plan(model, 1, tight), 16, 8) == 8
        assert default_num_blocks(model, self.plan(model, 1, 0), 16, 8) == 1

    def test_files_that_were_read_are_not_memory_that_is_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = {"LIMIT": "1000", "USAGE": "900", "STAT": "anon 300\ninactive_file 500\n"}
        for name, text in files.items():
            (tmp_path / name).write_text(text)
            monkeypatch.setattr(memory, f"CGROUP_{name}", tmp_path / name)
        assert available_bytes() == 600


class TestClusterConfig:
    def test_a_model_is_enough(self) -> None:
        config = ClusterConfig.from_args({"model": "/models/tiny/"})
        assert config.name == "tiny"
        assert config.replica.scheduler_config() == SchedulerConfig(policy="deadline")
        assert config.replica.parallel_config() == ParallelConfig()

    def test_ranks_reach_the_engine(self) -> None:
        settings = {"tensor_parallel_size": 3, "pipeline_parallel_size": 2, "num_threads": 2, "rank_timeout_s": 9.0}
        replica = ClusterConfig.from_args({"model": "m", "replica": settings}).replica
        assert replica.parallel_config() == ParallelConfig(**settings)
        assert replica.num_ranks == replica.parallel_config().num_ranks == 6
        assert replica.devices == "6 × cpu × 2 threads"

    def test_a_name_may_be_given(self) -> None:
        assert ClusterConfig.from_args({"model": "org/name", "served_model_name": "x"}).name == "x"

    @pytest.mark.parametrize(
        ("args", "line"),
        [
            ({}, "model: required"),
            ({"model": ""}, "model: got ''; string should have at least 1 character"),
            ({"model": "m", "modle": 1}, "modle: unknown key"),
            ({"model": "m", "replica": {"blocks": 3}}, "replica.blocks: unknown key"),
            (
                {"model": "m", "replica": {"num_blocks": 0}},
                "replica.num_blocks: got 0; input should be greater than or equal to 1",
            ),
            (
                {"model": "m", "replica": {"tensor_parallel_size": 65}},
                "replica.tensor_parallel_size: got 65; input should be less than or equal to 64",
            ),
            (
                {"model": "m", "replica": {"tensor_parallel_size": 2, "max_replicas_per_node": 1}},
                "replica: max_replicas_per_node (1) is for replicas of one rank; Ray places the 2 ranks as a group",
            ),
            (
                {"model": "m", "replica": {"placement_strategy": "SPREAD"}},
                "replica.placement_strategy: got 'SPREAD'; input should be 'STRICT_PACK' or 'PACK'",
            ),
            (
                {"model": "m", "replica": {"dtype": "int4"}},
                "replica.dtype: got 'int4'; input should be 'auto', 'bfloat16' or 'float32'",
            ),
            (
                {"model": "m", "replica": {"max_num_seqs": 64, "max_num_batched_tokens": 8}},
                "replica.max_num_batched_tokens: got 8; must be at least max_num_seqs (64), "
                "one token for each running sequence",
            ),
            (
                {"model": "m", "replica": {"resources": {"NPU": -1}}},
                "replica.resources.NPU: got -1; input should be greater than or equal to 0",
            ),
            (
                {"model": "m", "scaling": {"min_replicas": 3, "max_replicas": 2}},
                "scaling.min_replicas: got 3; must be at most max_replicas (2)",
            ),
            (
                {"model": "m", "scaling": {"target_utilization": 1.5}},
                "scaling.target_utilization: got 1.5; must be from 0.05 to 1",
            ),
            (
                {"model": "m", "scaling": {"schedules": [{"cron": "8 o'clock", "duration_s": 60, "min_replicas": 1}]}},
                'scaling.schedules: got cron "8 o\'clock"; must be five fields of a date that comes',
            ),
            (
                {"model": "m", "gateway": {"cors_origins": ["https://chat.example/"]}},
                "gateway.cors_origins.0: got 'https://chat.example/'; must be '*' or like 'https://chat.example:8443'",
            ),
            (
                {"model": "m", "gateway": {"cors_origins": ["https://Chat.example"]}},
                "gateway.cors_origins.0: got 'https://Chat.example'; must be '*' or like 'https://chat.example:8443'",
            ),
            (
                {"model": "m", "gateway": {"http_address": "8000"}},
                "gateway.http_address: got '8000'; must be host:port, or [IPv6 address]:port, with a port of at most",
            ),
            (
                {"model": "m", "gateway": {"grpc_address": "127.0.0.1:99999"}},
                "gateway.grpc_address: got '127.0.0.1:99999'; must be host:port, or [IPv6 address]:port, with",
            ),
            (
                {"model": "m", "gateway": {"http_address": "127.0.0.1:9000"}},
                "gateway: http_address is '127.0.0.1:9000', as grpc_address is; each needs a port of its own",
            ),
            (
                {"model": "m", "replica": {"feed_host": "0.0.0.0"}},
                "replica.feed_host: got '0.0.0.0'; must be an address that gateways can dial, or 'node'",
            ),
            (
                {"model": "m", "gateway": {"http_address": "::1:8000"}},
                "gateway.http_address: got '::1:8000'; must be host:port, or [IPv6 address]:port",
            ),
            (
                {"model": "m", "gateway": {"request_timeout_s": float("inf")}},
                "gateway.request_timeout_s: got inf; input should be a finite number",
            ),
            ({"model": "m", "gateway": None}, "gateway: got None; input should be a valid dictionary"),
            ("text", "args: got 'text'; input should be a valid dictionary"),
            ({"model": "m", "replica": {"a": 1}, "b": 2}, "replica.a: unknown key; b: unknown key"),
            (
                {"model": "m", "adapters": {f"{number}": "x" for number in range(4097)}},
                "adapters: got {'0': 'x'",
            ),
            ({"model": ["x"] * 100}, f"model: got {str(['x'] * 100)[:79]}…; input should be a valid string"),
        ],
    )
    def test_one_line_for_each_mistake(self, args: Any, line: str) -> None:
        with pytest.raises(ConfigError) as caught:
            ClusterConfig.from_args(args)
        assert str(caught.value).startswith(line)
        assert "\n" not in str(caught.value)

    def test_what_a_model_recommends_may_be_left_aside(self, tmp_path: Path) -> None:
        (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
        for asked, expected in (("auto", {"temperature": 0.6}), ("none", {})):
            config = ClusterConfig.from_args({"model": "m", "generation_config": asked})
            assert config.sampling_defaults(tmp_path) == expected

    def test_what_is_checked_stays_so(self) -> None:
        config = ClusterConfig.from_args({"model": "m"})
        with pytest.raises(ValueError, match="frozen"):
            config.replica.num_blocks = 0  # type: ignore[misc]


class TestReadConfig:
    YAML = "applications:\n  - import_path: shoal_cluster.serve.app:build\n    args:\n      model: m\n"

    def test_finds_the_application(self, tmp_path: Path) -> None:
        path = tmp_path / "serve.yaml"
        path.write_text("applications:\n  - import_path: other:app\n" + self.YAML.partition("\n")[2])
        document, config = read_config(path)
        assert len(document["applications"]) == 2
        assert config.model == "m"

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match="no file"):
            read_config(tmp_path / "absent.yaml")

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"{", "not YAML"),
            (b"\xff\xfe\x00", "not YAML"),
            (b"[" * 2000, "not YAML"),
            (b"since: 2024-02-30", "not YAML: day is out of range"),
            (
                b"applications: [{import_path: 'shoal_cluster.serve.app:build', deployments: [{}], args: {model: m}}]",
                "deployments: got [{}]; must be a list, each with a name",
            ),
            (
                b"applications: [{import_path: 'shoal_cluster.serve.app:build', args: {model: m, "
                b"adapters: {a: ~no-such-user/a}}}]",
                "adapters.a: got '~no-such-user/a'; Could not determine home directory",
            ),
            (b"", "no application"),
            (b"applications: 5", "no application"),
            (b"applications: [text, 3]", "applications: got 'text'; each must be an object"),
            (b"- a", "no application"),
            (YAML.replace("model", "modle").encode(), "model: required; modle: unknown key"),
        ],
    )
    def test_one_line_for_each_mistake(self, tmp_path: Path, content: bytes, words: str) -> None:
        path = tmp_path / "serve.yaml"
        path.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            read_config(path)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_every_application_is_checked(self, tmp_path: Path) -> None:
        second = self.YAML.partition("\n")[2]
        ports = "      gateway: {grpc_address: 'h:1', http_address: 'h:2'}\n"
        path = tmp_path / "serve.yaml"
        path.write_text(self.YAML + second + ports)
        assert [a["args"]["model"] for a in read_config(path)[0]["applications"]] == ["m", "m"]
        path.write_text(self.YAML + second)
        with pytest.raises(
            ConfigError, match=r"two gateways want '127\.0\.0\.1:9000'; each needs addresses of its own"
        ):
            read_config(path)
        path.write_text(self.YAML + second + ports.replace("grpc", "grcp"))
        with pytest.raises(ConfigError, match="grcp_address: unknown key"):
            read_config(path)


def test_an_npu_has_its_own_block_size() -> None:
    def settings(**replica: Any) -> Any:
        return ClusterConfig.from_args({"model": "m", "replica": replica}).replica

    assert settings().block_size == 16
    npu = settings(device="npu", graph_sizes=[1, 8], device_memory_gib=60, tensor_parallel_size=2)
    assert (npu.block_size, npu.devices) == (128, "2 × npu")
    assert npu.parallel_config().graph_sizes == (1, 8)
    assert npu.parallel_config().device_memory_bytes == 60 * 2**30
    assert settings(device="npu", block_size=16).block_size == 16  # refused by name later, once the model is known
    with pytest.raises(ConfigError, match=r"replica\.device: got 'tpu'"):
        settings(device="tpu")


@pytest.mark.parametrize("shed_late", [False, True])
def test_an_objective_is_a_limit_only_where_late_calls_are_refused(shed_late: bool) -> None:
    settings = {"shed_late": shed_late, "max_waiting_tokens": 500}
    config = ClusterConfig.from_args({"model": "m", "gateway": settings, "replica": {"max_num_waiting": 7}})
    limits = limits_of(config, HoldConfig())
    assert limits.objective == (HoldConfig().objective if shed_late else None)
    assert (limits.max_waiting_tokens, limits.max_waiting_requests) == (500, 7)
