"""Serving benchmarks: a fixed number of clients, arms compared round by round, events counted however they are cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal_cluster.bench.serving import MIN_REQUESTS, Batch, Sample, ServingLoad, costs_of, run_batch
from shoal_cluster.bench.stream_clients import EventCounter
from shoal_cluster.cli import app


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
