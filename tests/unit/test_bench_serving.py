"""Serving benchmarks: a fixed number of clients, arms compared round by round, events counted however they are cut."""

from __future__ import annotations

import asyncio
import multiprocessing
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from fixtures.model_configs import make_model
from typer.testing import CliRunner

from shoal_cluster.bench import engine_arm
from shoal_cluster.bench.closed_loop import Batch, Sample, run_batch
from shoal_cluster.bench.lone_replica import make_lone_replica
from shoal_cluster.bench.serving import MIN_REQUESTS, ServingLoad, costs_of
from shoal_cluster.bench.stream_clients import EventCounter
from shoal_cluster.cli import app
from shoal_cluster.commands.deploy import APP_IMPORT_PATH, GATEWAY, read_config
from shoal_replica.config import CacheConfig, EngineConfig
from shoal_replica.errors import InvalidArgument, ShoalError, Unavailable


def test_so_many_clients_share_the_prompts_and_every_token_counts() -> None:
    running, most, seen = 0, 0, []

    async def stream(prompt: tuple[int, ...]) -> AsyncIterator[int]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        seen.append(prompt)
        for count in (0, 1, 2):
            await asyncio.sleep(0)
            yield count
        running -= 1

    prompts = tuple((number,) for number in range(10))
    sample = asyncio.run(run_batch(stream, Batch(prompts, 4, 3)))
    assert sorted(seen) == sorted(prompts)
    assert most == 4
    assert sample.tokens_per_s > 0
    assert sample.ttft_p50_s > 0


def test_arms_are_compared_within_a_round() -> None:
    slow, fast = Sample((0.2,), 100.0, 0.15), Sample((0.1,), 200.0, 0.05)  # the machine is busy in the first two rounds
    served_slow, served_fast = Sample((0.203,), 98.0, 0.151), Sample((0.103,), 196.0, 0.051)
    cost = costs_of(4, [(slow, served_slow), (slow, served_slow), (fast, served_fast)])
    assert cost.added_ttft_ms == pytest.approx((3.0, 3.0, 3.0))
    assert cost.added_hops_ms == pytest.approx((2.0, 2.0, 2.0))
    assert (cost.engine_hops_ms, cost.served_hops_ms) == pytest.approx((50.0, 52.0))
    assert cost.throughput_ratio == pytest.approx(0.98)


@pytest.mark.parametrize("concurrency", [1, 4, 16, 64])
def test_few_clients_have_more_turns(concurrency: int) -> None:
    load = ServingLoad(path=Path("local.yaml"), num_rounds=3)
    num_prompts = len(load.batch(concurrency, 1).prompts)
    assert load.num_turns(concurrency) >= 3
    assert load.num_turns(concurrency) * num_prompts >= MIN_REQUESTS
    assert num_prompts >= 2 * concurrency


def test_both_arms_get_the_same_prompts_and_no_two_rounds_do() -> None:
    load = ServingLoad(path=Path("local.yaml"), num_prompt_tokens=8)
    assert load.batch(4, 1) == load.batch(4, 1)
    prompts = [prompt for number in range(3) for prompt in load.batch(4, number).prompts]
    assert len(set(prompts)) == len(prompts)


def test_only_the_first_application_is_measured_as_one_replica_whose_gateway_asks_for_nothing(tmp_path: Path) -> None:
    """The clients of the benchmark have no keys and speak no TLS."""
    user_config = {"scaling": {"max_replicas": 4}, "routing": {"rule": "round_robin"}, "adapters": {}}
    gateway = {"api_keys": {"a": "x"}, "api_keys_file": "k", "tls_cert": "c", "tls_key": "k", "num_cpus": 0.3}
    application = {
        "name": "first",
        "import_path": APP_IMPORT_PATH,
        "args": {"model": "m", "gateway": gateway, "scaling": {"min_replicas": 2, "max_replicas": 3}},
        "deployments": [{"name": "ReplicaServer"}, {"name": GATEWAY, "user_config": user_config}],
    }
    addresses = {"grpc_address": "127.0.0.1:9100", "http_address": "127.0.0.1:8100"}
    other = {"name": "second", "import_path": APP_IMPORT_PATH, "args": {"model": "m", "gateway": addresses}}
    path, environment = tmp_path / "serve.yaml", {"SHOAL_API_KEYS": "b=y", "SHOAL_ADMIN_KEY": "root"}
    path.write_text(yaml.safe_dump({"applications": [{"import_path": "others:app"}, application, other]}))
    document, _ = read_config(path)
    args = make_lone_replica(document, "127.0.0.1:9", "127.0.0.1:8", environment)
    (left,) = document["applications"]
    assert left["name"] == "first"
    assert left["args"] is args
    assert args["scaling"] == {"min_replicas": 1, "max_replicas": 1}
    assert args["gateway"] == {"grpc_address": "127.0.0.1:9", "http_address": "127.0.0.1:8", "num_cpus": 0.3}
    assert left["deployments"] == [{"name": "ReplicaServer"}, {"name": GATEWAY, "user_config": {"adapters": {}}}]
    assert environment == {"SHOAL_ADMIN_KEY": "root"}


def test_what_does_not_fit_the_context_is_refused() -> None:
    load = ServingLoad(path=Path("local.yaml"), num_prompt_tokens=1000, num_output_tokens=24)
    load.check_fits(1024)
    with pytest.raises(InvalidArgument, match=r"^prompt_tokens: got 1000; with output_tokens \(24\) .* at most 1023$"):
        load.check_fits(1023)


def test_a_stream_s_error_is_the_batch_s() -> None:
    async def stream(prompt: tuple[int, ...]) -> AsyncIterator[int]:
        raise Unavailable("no more")
        yield

    with pytest.raises(Unavailable, match="no more"):
        asyncio.run(run_batch(stream, Batch(((1,), (2,)), 2, 3)))


def test_an_engine_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the pipe, as from a process of its own (which would leave multiprocessing's tracker here)."""
    monkeypatch.setattr(engine_arm.signal, "signal", lambda number, handler: None)
    ours, theirs = multiprocessing.Pipe()
    config = EngineConfig(model=make_model(folder=str(tmp_path)), cache=CacheConfig(num_blocks=8, block_size=16))
    with ours, theirs:
        engine_arm._run_engine(config, theirs)
        with pytest.raises(ShoalError, match=re.escape(str(tmp_path))):
            engine_arm._receive(ours)


@pytest.mark.parametrize("text", ["", "0", "1,x", "-1"])
def test_a_wrong_number_of_clients_is_named(text: str) -> None:
    run = CliRunner().invoke(app, ["bench", "serving", "--concurrency", text])
    assert run.exit_code != 0
    assert "concurrency" in run.stderr


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_events_are_counted_however_they_are_cut(size: int) -> None:
    body = b'data: {"choices":[]}\n\n' * 9 + b'data: {"usage":{"completion_tokens":9,"x":1}}\n\ndata: [DONE]\n\n'

    async def read() -> EventCounter:
        counter = EventCounter("stream-0", 9)
        for start in range(0, len(body), size):
            counter.data_received(body[start : start + size])
        counter.connection_lost(None)
        await counter.ended
        return counter

    counter = asyncio.run(read())
    assert (counter.num_events, counter.num_tokens) == (9, 9)
