"""The ledger of a running cluster: fresh, right about hits, replayed from its records, whole again after a restart."""

from __future__ import annotations

import asyncio
import time
import uuid

import psutil
import pytest
from fixtures.live_cluster import CHANGE_TIMEOUT_S, LiveCluster, pid_of

from shoal_cluster.commands.client import GatewayClient
from shoal_cluster.policies.block_offer import best_offer
from shoal_cluster.serve.call import GenerateCall, Usage
from shoal_cluster.serve.rows import ClusterRow
from shoal_replica import SamplingParams
from shoal_replica.errors import ShoalError
from shoal_replica.testing import num_reused_tokens

pytestmark = pytest.mark.integration

NUM_CONVERSATIONS, NUM_TURNS = 6, 3
MAX_ERROR = 0.01
MAX_AGE_S = 0.25  # on cores shared with whatever else runs; idle replicas used to report once a second
WHOLE_AGAIN_S = 2.0
BLOCK = 16


def prompt(conversation: int, num_tokens: int) -> tuple[int, ...]:
    """The beginning of one conversation; all begin with the same 128 tokens."""
    own = range(2000 + 1000 * conversation, 2000 + 1000 * conversation + num_tokens)
    return (*range(1000, 1128), *own)


async def ask(client: GatewayClient, token_ids: tuple[int, ...], tenant: str = "") -> tuple[str, Usage]:
    """Run a call to its end. Returns its id and its usage."""
    call = GenerateCall(
        request_id=uuid.uuid4().hex,
        token_ids=token_ids,
        sampling_params=SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
        tenant=tenant,
        timeout_s=120,
    )
    chunks = [chunk async for chunk in client.generate(call)]
    usage = chunks[-1].usage
    assert usage is not None
    return call.request_id, usage


async def test_a_run_is_placed_by_a_young_and_true_view_and_every_decision_replays(cluster: LiveCluster) -> None:
    async with GatewayClient(cluster.grpc_address) as client:
        before = (await client.cluster()).quality

        async def converse(conversation: int) -> list[str]:
            turns = [await ask(client, prompt(conversation, 40 * turn)) for turn in range(1, NUM_TURNS + 1)]
            return [request_id for request_id, _ in turns]

        ids = [i for each in await asyncio.gather(*map(converse, range(NUM_CONVERSATIONS))) for i in each]
        after = (await client.cluster()).quality
        num_prompt = after.num_prompt_tokens - before.num_prompt_tokens
        num_predicted = after.num_predicted_tokens - before.num_predicted_tokens
        num_cached = after.num_cached_tokens - before.num_cached_tokens
        records = [record for i in ids for record in (await client.explain(i)).records]
        offers = [best_offer(record.replicas, record.decision.ranked[0]) for record in records]
        assert len(records) == len(ids)
        # What another replica may give blocks to says nothing of the view; a busy machine sends some elsewhere.
        assert after.num_requests - before.num_requests == offers.count(None) >= len(ids) / 2
        assert num_cached > num_prompt / 3
        assert abs(num_predicted - num_cached) <= MAX_ERROR * num_prompt, (num_predicted, num_cached, num_prompt)
        assert after.age_p99_s <= MAX_AGE_S
        for record in records:
            assert record.replay() == record.decision
            assert record.decision.ranked[0] in record.replicas.replica_ids


async def test_a_restarted_gateway_is_whole_again_and_knows_what_is_cached(cluster: LiveCluster) -> None:
    """Within ``WHOLE_AGAIN_S`` of its first answer; before that Ray starts a process, which takes several seconds."""
    async with GatewayClient(cluster.grpc_address) as client:
        _, first = await ask(client, prompt(7, 200))
        num_replicas = len((await client.cluster()).replicas)
    gateway = psutil.Process(await asyncio.to_thread(pid_of, cluster, "Gateway"))
    gateway.kill()
    await asyncio.to_thread(gateway.wait, 30)
    async with asyncio.timeout(CHANGE_TIMEOUT_S):
        while not (row := await _state(cluster)):
            pass  # each look is a new connection
    up_s = time.monotonic()
    async with asyncio.timeout(CHANGE_TIMEOUT_S):
        while not (len(row.replicas) == num_replicas and all(r.connected and r.stats for r in row.replicas)):
            row = await _state(cluster) or row
    assert time.monotonic() - up_s <= WHOLE_AGAIN_S
    async with GatewayClient(cluster.grpc_address) as client:
        _, again = await ask(client, prompt(7, 200))
        quality = (await client.cluster()).quality
    assert (again.replica_id, again.num_cached_tokens) == (first.replica_id, num_reused_tokens(328, 4, BLOCK))
    assert quality.num_predicted_tokens == quality.num_cached_tokens == 327 // BLOCK * BLOCK


async def _state(cluster: LiveCluster) -> ClusterRow | None:
    try:
        async with GatewayClient(cluster.grpc_address) as client:
            return await client.cluster()
    except ShoalError:
        return None
