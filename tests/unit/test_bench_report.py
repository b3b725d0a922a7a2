"""The engine benchmark's workloads, ratios and command line."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from shoal_cluster.cli import app
from shoal_replica.bench import steps, worker
from shoal_replica.bench.contender import FLOOR, SHOAL, Contender, Entries, make_contenders
from shoal_replica.bench.floor import Floor
from shoal_replica.bench.report import as_json, lines, paired_ratio, table
from shoal_replica.bench.runner import Outcome, Sample
from shoal_replica.bench.workloads import GENERATED, Prompts, Request, check_workloads
from shoal_replica.errors import ConfigError, InvalidArgument

MODEL = {
    "folder": "/", "architecture": "LlamaForCausalLM", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128,
    "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_size": 16, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "rope_scaling": None, "max_model_len": 2048, "tie_word_embeddings": True, "qkv_bias": False, "output_bias": False,
    "mlp_bias": False, "qk_norm": False, "sliding_window": None, "eos_token_ids": [2], "dtype": "bfloat16",
}  # fmt: skip
HELLO = {"versions": {}, "info": {"model": MODEL}}


FLOORS = [Floor(1e9, 1e10), Floor(2e9, 2e10), Floor(4e9, 4e10)]  # one per round


def samples(name: str, values: list[float], row: str = "b") -> list[Sample]:
    return [Sample(row, name, number, value, 0.1 * number, FLOORS[number]) for number, value in enumerate(values)]


@pytest.mark.parametrize(
    ("letter", "shapes"),
    [
        ("a", [(64, 256, 64)]),
        ("b", [(1, 32, 1), (1, 32, 128)]),
        ("c", [(1, 1024, 1)]),
        ("d", [(32, 832, 32), (32, 832, 32)]),
        ("h", [(64, 256, 64)]),
        ("i", [(1, 256, 64)]),
    ],
)
def test_shapes_of_the_workloads(letter: str, shapes: list[tuple[int, int, int]]) -> None:
    requests = GENERATED[letter].requests(Prompts(1000, "seed"))
    assert [(len(r.prompts), len(r.prompts[0]), r.max_tokens) for r in requests] == shapes
    assert all(100 <= token < 1000 for r in requests for prompt in r.prompts for token in prompt)


def test_equal_seeds_give_equal_prompts_and_others_fresh_ones() -> None:
    one, again, other = (Prompts(1000, seed).batch(4, 32) for seed in ("0/a/0", "0/a/0", "0/a/1"))
    assert one == again
    assert one != other


def test_how_tokens_are_chosen_is_told_also_while_warming_up() -> None:
    prompts = Prompts(1000, "seed")
    for letter, how in (("a", {}), ("h", {"temperature": 0.8, "top_p": 0.9}), ("i", {"beam_width": 4})):
        workload = GENERATED[letter]
        for request in (*workload.requests(prompts), *workload.warm_up(prompts)):
            assert request.message(steps=False)["how"] == how


def test_the_shared_prefix_is_shared_and_the_rest_is_not() -> None:
    cold, warm = GENERATED["d"].requests(Prompts(1000, "seed"))
    prompts = [*cold.prompts, *warm.prompts]
    assert len({tuple(prompt[:768]) for prompt in prompts}) == 1
    assert len({tuple(prompt[768:]) for prompt in prompts}) == 64


def test_figures_of_answers() -> None:
    step = {"num_seqs": 64, "num_new_tokens": 64, "seconds": 0.10, "forward_s": 0.09}
    prefill = {"num_seqs": 1, "num_new_tokens": 256, "seconds": 9.0, "forward_s": 1.0}
    assert GENERATED["a"].figures([{"seconds": 4.0, "steps": [prefill, step, step]}]) == {
        "a": 1024.0,
        "g": pytest.approx(10.0),
    }
    assert GENERATED["a"].figures([{"seconds": 4.0}]) == {"a": 1024.0}
    assert GENERATED["b"].figures([{"seconds": 0.1}, {"seconds": 1.37}]) == {"b": pytest.approx(10.0)}
    assert GENERATED["h"].figures([{"seconds": 4.0}]) == {"h": 1024.0}
    assert GENERATED["i"].figures([{"seconds": 0.5}]) == {"i": 500.0}
    assert GENERATED["d"].figures([{"seconds": 3.0}, {"seconds": 2.0}]) == {"d_cold": 3.0, "d_warm": 2.0}


def test_workload_letters() -> None:
    assert check_workloads("sgb") == "abgs"
    for wrong in ("x", ""):
        with pytest.raises(InvalidArgument, match=f"--workloads: got '{wrong}'; must be letters of 'abcdefghis'"):
            check_workloads(wrong)


def test_step_times_are_gathered_by_shape() -> None:
    def step(num_seqs: int, new: int, computed: int, seconds: float) -> dict[str, float]:
        return {"num_seqs": num_seqs, "num_new_tokens": new, "num_computed_tokens": computed} | {
            "seconds": seconds,
            "forward_s": seconds / 2,
        }

    def answer(request: Request) -> dict[str, object]:
        num_seqs, num_tokens = len(request.prompts), len(request.prompts[0])
        prefill = [step(1, min(512, num_tokens - c), c, 1.0) for c in range(0, num_tokens, 512)]
        decode = [step(num_seqs, num_seqs, num_seqs * (num_tokens + i), float(i)) for i in range(3)]
        too_many = num_seqs == 64  # this engine never runs them together
        return {"steps": prefill if too_many or request.max_tokens == 1 else [*prefill, *decode]}

    found = steps.StepTable()
    requests = steps.requests(Prompts(1000, "s"), 512)
    for _ in range(2):
        found.add(requests, [answer(request) for request in requests])
    tables = found.as_json()
    last = next(p for p in tables["prefill"] if p["num_computed_tokens"] == 1024)
    assert last == {"num_new_tokens": 512, "num_computed_tokens": 1024, "seconds": [1.0, 1.0], "forward_s": [0.5, 0.5]}
    assert tables["decode"][2] == {"num_seqs": 8, "context": 65.0, "seconds": [1.0, 1.0], "forward_s": [0.5, 0.5]}
    assert {d["num_seqs"] for d in tables["decode"]} == {1, 8, 32}
    console = Console(width=140, record=True, file=StringIO())
    console.print(table(Outcome(steps=found), [], "title"))
    shown = console.export_text()
    (row,) = (line.split() for line in shown.splitlines() if "512 prompt tokens after 1024" in line)
    assert row[-3:] == ["1000", "1000", "1000"]
    assert "decode of 8 at 65" in shown


def test_decodes_that_are_timed_last_longer_than_the_prefills_before_them() -> None:
    for request in steps.requests(Prompts(1000, "s"), 512)[len(steps.PREFILL_LENS) :]:
        num_tokens = sum(map(len, request.prompts))
        free = 512 - len(request.prompts)  # tokens of a step for prefill, once all the others decode
        assert request.max_tokens - steps.DECODE_STEPS > num_tokens / free


def test_a_batch_that_fills_a_step_by_its_decodes_is_left_out_and_the_table_says_so() -> None:
    requests = steps.requests(Prompts(1000, "s"), 64)
    assert max(len(request.prompts) for request in requests) == 32
    assert max(request.max_tokens for request in requests) < 300
    found = steps.StepTable()
    found.left_out = steps.left_out(64)
    assert found.as_json()["left_out"] == ["decode of 64 at 64", "decode of 64 at 256"]
    console = Console(width=140, record=True, file=StringIO())
    console.print(table(Outcome(steps=found), [], "title"))
    assert "decode of 64 at 256: left out, max_num_batched_tokens is too small" in console.export_text()
    assert steps.left_out(512) == []


def test_a_ratio_is_the_median_over_common_rounds() -> None:
    # Round 1 was slow for both, so its ratio is that of round 0; round 2 is the outlier.
    assert paired_ratio(samples("x", [10, 30, 10]), samples("y", [20, 60, 5])) == 0.5
    assert paired_ratio(samples("x", [10, 30]), samples("y", [40])) == 0.25
    assert paired_ratio(samples("x", []), samples("y", [40])) is None


def outcome_of(*found: Sample) -> Outcome:
    hellos = dict.fromkeys((FLOOR, SHOAL, "vllm"), HELLO)
    quantized = {"versions": {}, "info": {"model": MODEL | {"quantization": "int8"}}}
    return Outcome(samples=list(found), floors=FLOORS, hellos=hellos | {"shoal-int8": quantized})


CONTENDERS = [
    Contender(name=FLOOR, command=("python",), workloads=""),
    Contender(name=SHOAL, command=("python",), workloads="abcdefg", is_shoal=True),
    Contender(name="shoal-int8", command=("python",), workloads="b", is_shoal=True),
    Contender(name="vllm", command=("python",), workloads="abcdef"),
]


def test_lines_have_floors_of_their_own_weights_and_ratios_to_each_shoal() -> None:
    outcome = outcome_of(*samples(SHOAL, [2, 4]), *samples("shoal-int8", [1, 1]), *samples("vllm", [4, 4]))
    ours, quantized, vllm = lines(outcome, CONTENDERS)
    by_round = [GENERATED["b"].floors(floor, outcome.model(SHOAL))["b"] for floor in FLOORS[:2]]
    assert list(ours.floors) == list(vllm.floors) == by_round
    assert ours.floor == pytest.approx(sum(by_round) / 2)
    assert all(small < 0.6 * large for small, large in zip(quantized.floors, ours.floors, strict=True))
    assert vllm.ratios == {SHOAL: 0.75, "shoal-int8": 0.25}
    assert ours.ratios == {"shoal-int8": 0.375}
    assert vllm.foreign == 0.1


def test_a_ratio_to_the_floor_is_the_median_of_each_rounds_own() -> None:
    # The machine was slow in round 0 and fast in round 2: neither counts against the engine or for it.
    (ours,) = lines(outcome_of(*samples(SHOAL, [8, 4, 2])), CONTENDERS)
    ratios = [value / floor for value, floor in zip(ours.values, ours.floors, strict=True)]
    assert ratios[0] == pytest.approx(ratios[1]) == pytest.approx(ratios[2])
    assert ours.ratio_to_floor == pytest.approx(ratios[0])
    (disturbed,) = lines(outcome_of(*samples(SHOAL, [8, 4, 4])), CONTENDERS)
    assert disturbed.ratio_to_floor == pytest.approx(ratios[0])


@pytest.mark.parametrize("row", ["d_warm", "i"])
def test_the_floor_reads_what_sequences_share_once(row: str) -> None:
    """Where only reading takes time, 31 steps of 32 sequences of 64 own tokens, and 63 of 4 beams."""
    model = outcome_of().model(SHOAL)
    weights, per_token = model.weight_bytes, model.block_bytes(1)
    expected = {
        "d_warm": sum(weights + (768 + 32 * (64 + i)) * per_token for i in range(1, 32)) / 1e9,
        "i": 1e3 * 63 * (weights + (256 + 4 * 32) * per_token) / 1e9,
    }
    assert GENERATED[row[0]].floors(Floor(1e9, 1e30), model)[row] == pytest.approx(expected[row])


def test_rows_without_a_floor_have_no_ratio_to_it() -> None:
    (ours,) = lines(outcome_of(*[replace(s, floor=None) for s in samples(SHOAL, [2, 4], "e")]), CONTENDERS)
    assert ours.floor is None
    assert ours.ratio_to_floor is None


def test_a_run_without_a_floor_is_written_too() -> None:
    outcome = replace(outcome_of(*[replace(s, floor=None) for s in samples(SHOAL, [2, 4], "e")]), floors=[])
    assert as_json(outcome, CONTENDERS)["floor"] == {"best": None, "samples": []}


def test_the_table_and_the_json_say_the_same() -> None:
    outcome = outcome_of(*samples(SHOAL, [2, 4, 9]), *samples("vllm", [4, 8, 12]))
    console = Console(width=140, record=True, file=StringIO())
    console.print(table(outcome, CONTENDERS, "title"))
    shown = console.export_text().splitlines()
    (ours,) = (line.split() for line in shown if " shoal " in line and "engine" not in line)
    told = json.loads(json.dumps(as_json(outcome, CONTENDERS)))["rows"]["b"]["engines"]
    assert ours[-5:-1] == ["2.00", "4.00", "9.00", f"{told['shoal']['ratio_to_floor']:.2f}"]
    assert told["vllm"]["ratios"] == {"shoal": 0.5}
    assert told["vllm"]["rounds"] == [0, 1, 2]


def peers(*texts: str, **others: tuple[str, ...]) -> list[Contender]:
    return make_contenders("/models/m", 1, Entries(peers=texts, **others))


def test_contenders_of_a_command_line(tmp_path: Path) -> None:
    file = tmp_path / "q8.gguf"
    file.touch()
    floor, shoal, int8, vllm, llama = peers(
        f"vllm={sys.executable}",
        f"llamacpp-q8={sys.executable}:{file}",
        variants=("int8:quantization=int8", "int8:num_blocks=64"),
        engine_options=("block_size=32",),
        environment=("vllm:LD_PRELOAD=libfast.so:libomp.so",),
        options=("vllm:enforce_eager=true",),
        only=("llamacpp-q8:b",),
    )
    assert (floor.name, shoal.name) == (FLOOR, SHOAL)
    assert json.loads(shoal.command[-1])["options"] == {"block_size": 32}
    assert int8.is_shoal
    assert json.loads(int8.command[-1])["options"] == {"block_size": 32, "quantization": "int8", "num_blocks": 64}
    assert vllm.environment["LD_PRELOAD"] == "libfast.so:libomp.so"
    assert json.loads(vllm.command[-1])["options"] == {"enforce_eager": True}
    assert json.loads(vllm.command[-1])["model"] == "/models/m"
    assert llama.command[2] == "llamacpp"
    assert (llama.workloads, json.loads(llama.command[-1])["model"]) == ("b", str(file))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("vllm",), "--peer: got 'vllm'; must be NAME=INTERPRETER"),
        (("tgi=python",), "'tgi' is not one of vllm, openvino, llamacpp, transformers"),
        (("vllm=/nowhere/python",), "--peer vllm: there is no interpreter '/nowhere/python'"),
        ((f"llamacpp={sys.executable}",), "llamacpp reads GGUF files"),
        ((f"vllm={sys.executable}:/nowhere",), "there is no file or folder '/nowhere'"),
        ((f"vllm={sys.executable}", f"vllm={sys.executable}"), "there are two of 'vllm'"),
    ],
)
def test_peers_that_cannot_be(texts: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        peers(*texts)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"environment": ("ov:A=B",)}, "--peer-env: 'ov' is not one of the peers"),
        ({"options": ("vllm:A",)}, "--peer-option: got 'vllm:A'; must be NAME:KEY=VALUE"),
        ({"engine_options": ("x",)}, "--engine-option: got 'x'; must be KEY=VALUE"),
        ({"only": ("ov:b",)}, "--only: 'ov' is not one of the peers and variants"),
        ({"only": ("vllm:bs",)}, r"--only vllm: \(s\) is for 'shoal' alone"),
    ],
)
def test_settings_that_cannot_be(others: dict[str, tuple[str, ...]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        peers(f"vllm={sys.executable}", **others)


def test_vllm_computes_on_the_cores_given_not_on_those_between(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def load(package: str) -> None:
        told.append(os.environ["VLLM_CPU_OMP_THREADS_BIND"])
        raise worker.Missing(package)

    monkeypatch.setattr(worker.os, "environ", dict[str, str]())
    monkeypatch.setattr(worker, "load", load)
    with pytest.raises(worker.Missing):
        worker.Vllm(worker.Settings("/models/m", 2, [0, 2]))
    assert told == ["0,2"]


def test_more_threads_than_cores() -> None:
    with pytest.raises(ConfigError, match="--threads: got 4096; this process may use"):
        make_contenders("/models/m", 4096, Entries())


def test_the_command_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    options = ["--model", str(tmp_path), "--peer", "vllm=/nowhere/python"]
    run = CliRunner().invoke(app, ["bench", "engine", *options])
    assert run.exit_code == 1
    assert run.stderr.strip() == "--peer vllm: there is no interpreter '/nowhere/python'"
