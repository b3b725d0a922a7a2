"""Real clusters: one that grows under load and shrinks after it, to nothing and back, with every request answered; two
pools; two gateways on one port; two models."""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fixtures.live_cluster import CHANGE_TIMEOUT_S, LOOK_S, free_address, num_connected, until_cluster

from shoal_cluster.commands.client import GatewayClient
from shoal_cluster.commands.deploy import deploy, read_config
from shoal_cluster.commands.local_ray import LocalRay
from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.serve.call import GenerateCall, Usage
from shoal_cluster.serve.rows import ClusterRow
from shoal_replica import SamplingParams
from shoal_replica.errors import NotFound, ShoalError
from shoal_replica.request import FinishReason

pytestmark = pytest.mark.integration
ADMIN_KEY = "live"
COLD = {"headroom": 0, "burst_memory_s": 0}  # no reserve: replicas come and go with the load alone


class Load:
    """Keeps ``width`` requests open, each of about 800 prompt tokens that no other shares."""

    def __init__(self, client: GatewayClient, width: int) -> None:
        self.reasons: list[FinishReason | None] = []
        self._client = client
        self._width = width
        self._open: set[asyncio.Task[FinishReason | None]] = set()
        self._number = 0

    async def turn(self) -> None:
        """Top up, then wait until a request ends or a moment has passed."""
        while len(self._open) < self._width:
            self._open.add(asyncio.create_task(run(self._client, self._number)))
            self._number += 1
        done, self._open = await asyncio.wait(self._open, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
        self.reasons += [task.result() for task in done]

    async def finish(self) -> None:
        self.reasons += await asyncio.gather(*self._open)


def call(text: str, max_tokens: int) -> GenerateCall:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerateCall(request_id=uuid.uuid4().hex, text=text, sampling_params=params, timeout_s=300)


async def run(client: GatewayClient, number: int) -> FinishReason | None:
    return [chunk.finish_reason async for chunk in client.generate(call(f"{number} " * 400, 8))][-1]


async def stream_until(client: GatewayClient, condition: Callable[[ClusterRow], bool]) -> None:
    """Keep one long stream open, which is hardly any load, and check that each is whole."""
    while True:
        num_tokens = 0
        stream = client.generate(call("Once upon a time", 1000))
        async with aclosing(stream):  # type: ignore[type-var]
            async for chunk in stream:
                num_tokens += len(chunk.token_ids)
                if condition(await client.cluster()):
                    return
        assert num_tokens == 1000


@pytest.fixture(scope="module")
def ray() -> Iterator[LocalRay]:
    with LocalRay(num_cpus=4) as node:
        node.wait_until_up()
        yield node


async def test_none_one_three_one_none(ray, local_yaml):
    document, _ = read_config(local_yaml)
    args = document["applications"][0]["args"]
    grpc_address, http_address = free_address(), free_address()
    args["gateway"].update(grpc_address=grpc_address, http_address=http_address, admin_key=ADMIN_KEY)
    args["scaling"] = {"min_replicas": 0, "max_replicas": 2, "downscale_delay_s": 3} | COLD
    args["replica"]["drain_timeout_s"] = 2  # longer streams go on elsewhere
    deploy(document, ray.dashboard_url, lambda progress: None)
    async with GatewayClient(grpc_address) as client:
        assert num_connected(await client.cluster()) == 0
        async with httpx.AsyncClient() as http:  # load balancers must send what starts the first replica
            assert (await http.get(f"http://{http_address}/healthz")).status_code == 200
        assert await run(client, 0) is FinishReason.LENGTH  # held until there is a replica

        await client.tune({"max_replicas": 3, "min_replicas": 1}, reset=False, admin_key=ADMIN_KEY)
        load = Load(client, 16)
        async with asyncio.timeout(CHANGE_TIMEOUT_S):
            while num_connected(await client.cluster()) < 3:
                await load.turn()
            await load.finish()
        assert set(load.reasons) == {FinishReason.LENGTH}
        async with asyncio.timeout(CHANGE_TIMEOUT_S):
            await stream_until(client, lambda row: num_connected(row) == 1)

        await client.tune({}, reset=True, admin_key=ADMIN_KEY)
        await until_cluster(client, lambda row: num_connected(row) == 0)
        async with asyncio.timeout(CHANGE_TIMEOUT_S):
            while (await client.scaling()).records[-1].num_after != 0:  # noqa: ASYNC110 - it does not call us
                await asyncio.sleep(LOOK_S)
        steps = [(record.num_before, record.num_after) for record in (await client.scaling()).records]
        assert steps[0] == (0, 1)
        assert all(after == before for (_, after), (before, _) in itertools.pairwise(steps))
        assert max(after for _, after in steps) == 3
        assert steps[-1] == (1, 0)


async def test_a_replica_that_serve_stops_finishes_what_serve_has_not_been_told_of(ray, local_yaml):
    """Serve hears of a request after a second. It stops a replica without such requests two seconds later."""
    document, _ = read_config(local_yaml)
    args = document["applications"][0]["args"]
    address = free_address()
    args["gateway"].update(grpc_address=address, http_address=free_address(), admin_key=ADMIN_KEY)
    args["replica"]["kv_transfer"] = False  # answers stay where they began
    args["scaling"] = {"min_replicas": 2, "max_replicas": 2, "downscale_delay_s": 1} | COLD
    await asyncio.to_thread(deploy, document, ray.dashboard_url, lambda progress: None)
    async with GatewayClient(address) as client, asyncio.timeout(CHANGE_TIMEOUT_S):
        await until_cluster(client, lambda row: num_connected(row) == 2)
        answers: list[asyncio.Task[Usage]] = []
        while num_connected(await client.cluster()) == 2:
            answers += [asyncio.create_task(answer_of(client, call(f"{len(answers) + i} ", 500))) for i in range(2)]
            if len(answers) == 2:
                await client.tune({"max_replicas": 1, "min_replicas": 1}, reset=False, admin_key=ADMIN_KEY)
            await asyncio.sleep(0.3)
        usages = await asyncio.gather(*answers)
    assert len({usage.replica_id for usage in usages}) == 2
    assert {usage.num_resumes for usage in usages} == {0}


async def answer_of(client: GatewayClient, asked: GenerateCall) -> Usage:
    usage = [chunk async for chunk in client.generate(asked)][-1].usage
    assert usage is not None
    return usage


async def test_an_answer_outlives_its_gateway_and_its_replica(ray, local_yaml):
    """Both are replaced while it streams, when the application is deployed with other arguments."""
    document, _ = read_config(local_yaml)
    args = document["applications"][0]["args"]
    address, http_address = free_address(), free_address()
    args["gateway"].update(grpc_address=address, http_address=http_address)
    args["scaling"] = {"min_replicas": 1, "max_replicas": 1} | COLD
    await asyncio.to_thread(deploy, document, ray.dashboard_url, lambda progress: None)
    body = {"prompt": "Once upon a time", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(GatewayClient(address))
        await until_cluster(client, lambda row: num_connected(row) == 1)
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=CHANGE_TIMEOUT_S))
        answer = await stack.enter_async_context(
            http.stream("POST", f"http://{http_address}/v1/completions", json=body)
        )
        stream = client.generate(call("Once upon a time", 1500))
        await anext(stream)
        args["gateway"]["request_timeout_s"] = 601
        deploying = asyncio.create_task(asyncio.to_thread(deploy, document, ray.dashboard_url, lambda progress: None))
        num_tokens = 1 + sum([len(chunk.token_ids) async for chunk in stream])
        assert num_tokens == 1500
        lines = [line async for line in answer.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in lines[-2] + lines[-3]
        await deploying
        successor = await stack.enter_async_context(GatewayClient(address))
        assert await run(successor, 0) is FinishReason.LENGTH


async def test_a_new_deployment_keeps_the_number_of_replicas(ray, local_yaml):
    """And the bounds that were set at run time, as its settings of scaling stay the same."""
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient  # after the environment is set

    serve = ServeSubmissionClient(ray.dashboard_url)
    document, _ = read_config(local_yaml)
    args, address = document["applications"][0]["args"], free_address()
    args["gateway"].update(grpc_address=address, http_address=free_address(), admin_key=ADMIN_KEY)
    args["scaling"] = {"min_replicas": 1, "max_replicas": 1, "downscale_delay_s": 600} | COLD
    await asyncio.to_thread(deploy, document, ray.dashboard_url, lambda progress: None)
    async with GatewayClient(address) as client:
        await client.tune({"max_replicas": 2, "min_replicas": 2}, reset=False, admin_key=ADMIN_KEY)
        await until_cluster(client, lambda row: num_connected(row) == 2)
        await client.tune({"min_replicas": 1}, reset=False, admin_key=ADMIN_KEY)
        former = {replica.replica_id for replica in (await client.cluster()).replicas}

    wanted: set[int] = set()

    def note(progress: str) -> None:
        shoal = serve.get_serve_details()["applications"]["shoal"]["deployments"]
        if "ReplicaServer" in shoal:  # not while Serve builds the application
            wanted.add(shoal["ReplicaServer"]["target_num_replicas"])

    args["gateway"]["request_timeout_s"] = 602
    await asyncio.to_thread(deploy, document, ray.dashboard_url, note)
    assert wanted == {2}
    async with GatewayClient(address) as client:
        await until_cluster(client, lambda row: num_connected(row) == 2)
        assert not former & {replica.replica_id for replica in (await client.cluster()).replicas}


def pools(**user_config: Any) -> dict[str, Any]:
    """Two pools in the proportion of 2 to 3: the first is sized by its blocks, the second follows."""
    settings = msgspec.to_builtins(ScaleConfig(max_replicas=2, downscale_delay_s=1)) | COLD
    policy = {"settings": settings, "sized": "Decode", "ratios": {"Prefill": 1.5}}
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    application = {
        "name": "pools",
        "import_path": "fixtures.pools:build",
        "args": settings,
        "runtime_env": {"env_vars": {"PYTHONPATH": path}},
        "autoscaling_policy": {
            "policy_function": "shoal_cluster.serve.pool_scaling:PoolScaling",
            "policy_kwargs": policy,
        },
        "deployments": [{"name": "Decode", "user_config": user_config}],
    }
    return {"applications": [application]}


def test_two_pools_grow_and_shrink_in_proportion(ray):
    """They replace what was served before."""
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient  # after the environment is set

    client = ServeSubmissionClient(ray.dashboard_url)

    def until_running(*counts: int) -> None:
        deadline = time.monotonic() + CHANGE_TIMEOUT_S
        while time.monotonic() < deadline:
            deployments = client.get_serve_details()["applications"]["pools"]["deployments"]
            rows = [deployments[name]["replicas"] for name in ("Decode", "Prefill")]
            running = [[row["state"] for row in replicas] for replicas in rows]
            if running == [["RUNNING"] * count for count in counts]:
                return
            time.sleep(LOOK_S)
        raise AssertionError(f"{running} instead of {counts}")

    deploy(pools(num_free_blocks=20), ray.dashboard_url, lambda progress: None)
    until_running(2, 3)
    deploy(pools(num_free_blocks=100), ray.dashboard_url, lambda progress: None)
    until_running(1, 2)


async def test_two_gateways_answer_explain_and_promise_as_one(ray, local_yaml):
    """They replace what was served before. Each connection to the port that they share belongs to one of them. In the
    end one hangs."""
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient  # after the environment is set

    document, _ = read_config(local_yaml)
    args, address = document["applications"][0]["args"], free_address()
    args["gateway"].update(grpc_address=address, http_address=free_address(), num_replicas=2)
    args["replica"]["dtype"] = "float32"  # tokens then do not depend on what shares their batch
    await asyncio.to_thread(deploy, document, ray.dashboard_url, lambda progress: None)
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(GatewayClient(address))
        await until_cluster(one, lambda row: num_connected(row) == 2)
        asked, tokens = [call("The sea is", 16) for _ in range(2)], []
        tokens.append(await tokens_of(one, asked[0]))
        other = await connect(stack, address, lambda row: row.num_requests == 0)
        await until_cluster(other, lambda row: num_connected(row) == 2)
        tokens.append(await tokens_of(other, asked[1]))
        assert tokens[0] == tokens[1]
        assert [(await client.cluster()).num_requests for client in (one, other)] == [1, 1]

        for request in asked:
            told, told_by_other = await one.explain(request.request_id), await other.explain(request.request_id)
            assert told == told_by_other
            (record,), (look,) = told.records, told.looks
            assert record.query.request_id == request.request_id
            assert record.replay() == record.decision
            assert look.queue[-1].replica_id == record.decision.best
        for client in (one, other):
            with pytest.raises(NotFound, match="no routing decision is kept for 'nobody'"):
                await client.explain("nobody")

        is_seen = False

        async def ask_on() -> None:
            while not is_seen:
                await tokens_of(one, call("The sea is", 1))

        async with asyncio.timeout(CHANGE_TIMEOUT_S), asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(ask_on())
            while not is_seen:  # only between sending a request and the replica's taking it
                row = await other.cluster()
                is_seen = any(replica.num_reserved_blocks for replica in row.replicas)
        assert row.num_active == 0, "what it sees is promised by the other gateway"

        details = ServeSubmissionClient(ray.dashboard_url).get_serve_details()["applications"]["shoal"]["deployments"]
        hangs = details["Gateway"]["replicas"][0]
        os.kill(hangs["pid"], signal.SIGSTOP)
        try:
            asked_now = [asyncio.create_task(client.explain("nobody")) for client in (one, other)]
            (answer, *_), _ = await asyncio.wait(asked_now, return_when=asyncio.FIRST_COMPLETED)
        finally:
            os.kill(hangs["pid"], signal.SIGCONT)
        assert f"gateway {hangs['replica_id']} may know of 'nobody'" in str(answer.exception())
        await asyncio.wait(asked_now)


async def tokens_of(client: GatewayClient, request: GenerateCall) -> list[int]:
    return [token async for chunk in client.generate(request) for token in chunk.token_ids]


async def connect(stack: AsyncExitStack, address: str, condition: Callable[[ClusterRow], bool]) -> GatewayClient:
    """A connection to the gateway for which ``condition`` holds; the system assigns connections by chance."""
    while True:
        client = await stack.enter_async_context(GatewayClient(address))
        if condition(await client.cluster()):
            return client


async def test_two_models_on_one_cluster_know_nothing_of_each_other(ray, local_yaml):
    document, _ = read_config(local_yaml)
    one = document["applications"][0]
    one["args"]["scaling"] = {"min_replicas": 1, "max_replicas": 1}
    two = copy.deepcopy(one) | {"name": "second", "route_prefix": "/second"}
    two["args"]["served_model_name"] = "second"
    two["args"]["replica"] |= {"block_size": 32, "num_blocks": 256}
    for application in (one, two):
        application["args"]["gateway"] |= {"grpc_address": free_address(), "http_address": free_address()}
    document["applications"] = [one, two]
    deploy(document, ray.dashboard_url, lambda progress: None)
    addresses = [application["args"]["gateway"]["grpc_address"] for application in (one, two)]
    async with GatewayClient(addresses[0]) as first, GatewayClient(addresses[1]) as second:
        for client in (first, second):
            await until_cluster(client, lambda row: num_connected(row) == 1)
            assert await run(client, 0) is FinishReason.LENGTH
        before, other = await first.cluster(), await second.cluster()
        assert (before.model, other.model) == ("smollm2-135m-instruct", "second")
        assert [row.stats.block_size for row in (*before.replicas, *other.replicas)] == [16, 32]
        deploy(document | {"applications": [one]}, ray.dashboard_url, lambda progress: None)
        assert await run(first, 1) is FinishReason.LENGTH
        assert [row.replica_id for row in (await first.cluster()).replicas] == [before.replicas[0].replica_id]
        with pytest.raises(ShoalError):
            await run(second, 1)
