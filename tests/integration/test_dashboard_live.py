"""The dashboard of a real cluster: it shows what the cluster says, and its controls change the cluster."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
import uuid

import httpx
import pytest
from fixtures.browser import as_percent, browser_page
from fixtures.live_cluster import CHANGE_TIMEOUT_S, LiveCluster, is_idle, num_connected, pid_of, until_cluster
from playwright.async_api import Page, expect

from shoal_cluster.commands.client import GatewayClient
from shoal_cluster.serve.call import GenerateCall
from shoal_cluster.serve.past_sample import PAST_BUCKET_S
from shoal_cluster.serve.rows import ClusterRow
from shoal_replica import SamplingParams
from shoal_replica.request import FinishReason

pytestmark = pytest.mark.integration


def call(max_tokens: int) -> GenerateCall:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    text = "Why is the sea salty? " * 20
    return GenerateCall(request_id=uuid.uuid4().hex, text=text, sampling_params=params, timeout_s=120)


async def run(client: GatewayClient, request: GenerateCall) -> FinishReason | None:
    return [chunk.finish_reason async for chunk in client.generate(request)][-1]


async def tune(page: Page, settings: dict[str, str]) -> None:
    await page.get_by_role("button", name="Controls").click()
    for name, value in settings.items():
        await page.get_by_label(name).fill(value)
    await page.get_by_role("button", name="Apply").click()
    await expect(page.get_by_role("dialog")).to_contain_text("In force.")
    await page.keyboard.press("Escape")


async def test_values_on_the_page_are_the_clusters(cluster: LiveCluster) -> None:
    async with (
        GatewayClient(cluster.grpc_address) as client,
        browser_page(f"http://{cluster.http_address}/dashboard") as watched,
    ):
        page = watched.page
        await expect(page.locator("#connection")).to_have_text("live")
        requests = [call(8) for _ in range(6)]
        await asyncio.gather(*(run(client, request) for request in requests))
        told = await until_cluster(client, is_idle)
        for row in told.replicas:
            card = page.get_by_role("article", name=row.replica_id)
            await expect(card.locator(".state")).to_have_text("ready")
            stats = row.stats
            assert stats is not None
            empty = stats.num_free_blocks - stats.num_cached_blocks
            pool = f"Block pool of {stats.num_total_blocks} blocks: {stats.num_allocated_blocks} running, 0 reserved, "
            whole = f"{pool}{stats.num_cached_blocks} cached, {empty} empty"
            await expect(card.get_by_role("img")).to_have_attribute("aria-label", whole)
            await expect(card.locator("dd").first).to_have_text(f"0 of {stats.max_num_seqs}")
            await expect(card.locator("dd").last).to_have_text(as_percent(stats.hit_rate))
            await expect(card.locator(".node")).to_contain_text(row.node_id[:12])
            await card.get_by_role("button", name="Block map").click()
            await expect(card.locator("canvas")).to_have_attribute("aria-label", re.compile(f"{empty} empty"))
        await expect(page.locator("#strip dd.notes").first).to_contain_text(f"0 active of {told.num_requests}")
        shown = set(await page.locator("#routes td.request button").all_inner_texts())
        assert {request.request_id for request in requests} <= shown
        last = requests[-1].request_id
        (record,) = (await client.explain(last)).records
        await page.get_by_role("button", name=last).click()
        dialog = page.get_by_role("dialog", name=last)
        await expect(dialog.locator(".reason")).to_have_text(record.decision.reason)
        await expect(dialog.locator("tbody tr")).to_have_count(len(told.replicas))
        assert watched.errors == []


async def test_a_scale_up_and_a_drain_are_seen_as_they_happen(cluster: LiveCluster) -> None:
    async with (
        GatewayClient(cluster.grpc_address) as client,
        browser_page(f"http://{cluster.http_address}/dashboard") as watched,
    ):
        page = watched.page
        await expect(page.locator("#connection")).to_have_text("live")
        await page.get_by_role("button", name="Controls").click()
        await page.get_by_label("Admin key").fill(cluster.admin_key)
        await page.get_by_role("button", name="Unlock").click()
        await page.keyboard.press("Escape")

        # The wait begins before the change: a replica that starts fast is shown as starting for a moment only.
        starting = asyncio.create_task(page.locator('.card[data-state="starting"]').wait_for())
        await tune(page, {"max replicas": "3", "min replicas": "3", "downscale delay (s)": "0"})
        await expect(page.locator("#wanted")).to_have_text("3")
        await expect(page.locator("#decisions .step").first).to_have_text("2 → 3")
        await expect(page.locator(".lane button").last).to_have_attribute("aria-label", re.compile("2 to 3 replicas"))
        await starting
        await expect(page.locator("#replica-count")).to_have_text("3 of 3 ready")
        record = [r for r in (await client.scaling()).records if (r.num_before, r.num_after) == (2, 3)][-1]
        await page.locator("#decisions .link").first.click()
        await expect(page.get_by_role("dialog").locator(".reason").first).to_have_text(record.reason)
        await page.keyboard.press("Escape")

        stream = client.generate(call(200))
        await anext(stream)
        busy = next(row.replica_id for row in (await client.cluster()).replicas if row.stats and row.stats.num_running)
        await page.get_by_role("article", name=busy).get_by_role("button", name="Drain").click()
        await page.get_by_role("button", name="Drain it").click()
        await expect(page.get_by_role("article", name=busy).locator(".state")).to_have_text("draining")
        assert [chunk.finish_reason async for chunk in stream][-1] is FinishReason.LENGTH
        await expect(page.get_by_role("article", name=busy)).to_have_count(0)
        await expect(page.locator("#replica-count")).to_have_text("3 of 3 ready")

        await page.get_by_role("button", name="Controls").click()
        await page.get_by_role("button", name="Back to the deployment's").click()
        await page.keyboard.press("Escape")
        await expect(page.locator("#replica-count")).to_have_text("2 of 2 ready")
        kinds = set(await page.locator("#event-list .kind").all_inner_texts())
        assert {"starting", "ready", "draining", "changed"} <= {kind.split()[0] for kind in kinds}
        assert watched.errors == []


async def test_a_new_gateway_knows_what_the_replicas_and_the_autoscaler_remember(cluster: LiveCluster) -> None:
    """It shows decisions and timelines from before its start; replicas remember whole buckets of twenty seconds."""
    async with (
        GatewayClient(cluster.grpc_address) as client,
        browser_page(f"http://{cluster.http_address}/dashboard") as watched,
    ):
        page = watched.page
        await expect(page.locator("#connection")).to_have_text("live")
        await run(client, call(64))
        busy = await until_cluster(client, is_idle)
        ran_in = max(buckets(busy))  # by the clock of whichever replica has told last
        await until_cluster(client, lambda row: min(buckets(row)) > ran_in)
        decisions = [record.seq for record in (await client.scaling()).records]
        os.kill(await asyncio.to_thread(pid_of, cluster, "Gateway"), signal.SIGKILL)
        killed_s = time.time()
        await expect(page.locator("#connection")).to_have_text("reconnecting")
        await expect(page.locator("#connection")).to_have_text("live")
        await expect(page.locator("#replica-count")).to_have_text("2 of 2 ready")
    async with (
        GatewayClient(cluster.grpc_address) as client,
        httpx.AsyncClient(base_url=f"http://{cluster.http_address}/dashboard", timeout=60) as http,
        asyncio.timeout(CHANGE_TIMEOUT_S),
    ):
        await until_cluster(client, lambda row: num_connected(row) == 2)
        before: list[dict[str, float | None]] = []
        while not any(sample["tokens_per_s"] for sample in before):  # replicas report their past one after another
            await asyncio.sleep(0.2)
            columns = (await http.get("/history")).json()
            samples = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
            before = [sample for sample in samples if (sample["time_s"] or 0.0) < killed_s]
        assert {sample["ttft_p50_s"] for sample in before} == {None}, "that was the former gateway's to know"
        told = [mark["seq"] for mark in (await http.get("/decisions")).json()]
        assert told[: len(decisions)] == decisions


def buckets(row: ClusterRow) -> list[float]:
    """The number of the bucket of twenty seconds that each replica has reached."""
    return [replica.stats.time_s // PAST_BUCKET_S for replica in row.replicas if replica.stats is not None]
