"""The dashboard in a real browser, over a scripted cluster: what it shows, how it is laid out, who can use it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from fixtures.browser import as_percent, browser_page
from fixtures.fake_core import FakeCore
from fixtures.fake_gateway import ADMIN_KEY
from fixtures.live_cluster import free_address
from fixtures.page_probes import LOW_CONTRAST, OVERFLOWING, OVERLAPPING, UNNAMED
from fixtures.served_core import serving
from fixtures.waiting import DEADLINE_S
from playwright.async_api import Page, Route, expect

RETRIES = """async () => {
    const { Log } = await import(new URL("dashboard/static/log.js", location.origin));
    const log = new Log("events", 500, () => {}), counts = [];
    const newest = (time_s) => [28, 29].map((seq) => ({ seq, time_s }));
    await log.load(newest(1));
    counts.push(log.lines.length);
    log.merge(newest(1));
    counts.push(log.lines.length);
    log.retryAt = 0;
    log.merge(newest(5));
    while (log.loading) await new Promise((resolve) => setTimeout(resolve, 10));
    counts.push(log.lines.length);
    return counts;
}"""
"""What a log shows where another gateway answers, whose lines have 5 as their time."""


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest_asyncio.fixture
async def url(core: FakeCore) -> AsyncIterator[str]:
    address = free_address()
    async with serving(core, address):
        yield f"http://{address}/dashboard"


def stand_still(core: FakeCore) -> None:
    """Stop the core's clock a hundred seconds after its start."""
    now = core.started_s
    core.started_s -= 100.0
    core.clock = lambda: now


async def is_live(page: Page) -> None:
    """Wait until the page follows the cluster and has loaded the past that it shows."""
    await expect(page.locator("#connection")).to_have_text("live")
    await expect(page.locator("#scaling-charts")).to_have_attribute("aria-busy", "false")


async def texts(page: Page, selector: str) -> list[str]:
    return [" ".join(text.split()) for text in await page.locator(selector).all_inner_texts()]


async def test_what_the_page_shows_is_what_the_cluster_says(core: FakeCore, url: str) -> None:
    stand_still(core)
    async with browser_page(url) as watched:
        page = watched.page
        await is_live(page)
        cluster = core.cluster()
        spoken = [row.stats for row in cluster.replicas if row.stats is not None]
        assert await texts(page, "#model") == ["smollm2-135m-instruct · npu × 4"]
        tiles = dict(zip(await texts(page, "#strip dt"), await texts(page, "#strip dd.value"), strict=True))
        latency = cluster.latency
        assert latency is not None
        assert latency.ttft is not None
        assert tiles["TTFT p50"] == f"{latency.ttft.p50_s * 1000:.1f} ms"
        assert f"p99 {latency.ttft.p99_s * 1000:.0f} ms" in await texts(page, "#strip dd.notes span")
        assert tiles["Queue"] == str(sum(stats.num_waiting for stats in spoken))
        assert tiles["Within objective"] == f"{latency.num_met / latency.num_requests:.1%}"
        rows = await texts(page, "#model-rows tbody tr")
        assert rows == [
            "smollm2-135m-instruct 5 of 5 700 310K 29% 42",
            "support 5 of 5 30 2,000 0% 7",
            "acme/a-rather-long-name-of-an-adapter-that-nobody-has-yet 0 of 5 0 0 – 0",
        ]
        for row in cluster.replicas:
            card = page.get_by_role("article", name=row.replica_id)
            stats = row.stats
            assert stats is not None
            assert (await card.locator(".state").inner_text()) == "ready"
            shown = dict(
                zip(await card.locator("dt").all_inner_texts(), await card.locator("dd").all_inner_texts(), strict=True)
            )
            assert shown["running"] == f"{stats.num_running} of 64"
            assert shown["hit rate"] == as_percent(stats.hit_rate)
            bar = card.get_by_role("img")
            empty = stats.num_free_blocks - stats.num_cached_blocks - row.num_reserved_blocks
            told = f"{stats.num_allocated_blocks} running, {row.num_reserved_blocks} reserved, "
            told += f"{stats.num_cached_blocks} cached, {empty} empty"
            assert told in str(await bar.get_attribute("aria-label"))
            widths = await bar.locator("span").evaluate_all("all => all.map((s) => s.getBoundingClientRect().width)")
            share = stats.num_allocated_blocks / stats.num_total_blocks
            assert widths[0] / sum(widths) == pytest.approx(share, abs=0.02)
        scaling = core.scaling()
        assert scaling.current is not None
        assert await texts(page, "#wanted") == [str(scaling.current.num_after)]
        assert await texts(page, "#scaling-reason") == [scaling.current.reason]
        decisions = await texts(page, "#decisions .step")
        assert decisions == [f"{r.num_before} → {r.num_after}" for r in reversed(scaling.records)][:5]
        await expect(page.locator(".lane button")).to_have_count(len(scaling.records))
        assert (await texts(page, "#event-list .kind"))[0].split()[0] == core.events(1)[0].kind
        requests = await texts(page, "#routes td.request")
        assert requests == [record.query.request_id for record in core.recent_routes(8)]
        assert watched.errors == []
        assert {urlsplit(asked).netloc for asked in watched.urls if not asked.startswith("data:")} == {
            urlsplit(url).netloc
        }


async def test_full_records_open_by_keyboard(core: FakeCore, url: str) -> None:
    stand_still(core)
    async with browser_page(url) as watched:
        page = watched.page
        await is_live(page)
        record = core.scaling().records[-1]
        await expect(page.locator(".lane button")).to_have_count(len(core.scaling().records))
        mark = page.locator(".lane button").last
        await mark.focus()
        await page.keyboard.press("ArrowLeft")
        await expect(page.locator(".lane button").nth(-2)).to_be_focused()
        await page.keyboard.press("ArrowRight")
        await page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog", name=f"{record.num_before} → {record.num_after} replicas")
        await expect(dialog).to_contain_text(record.reason)
        pairs = dict(zip(await texts(page, ".pairs dt"), await texts(page, ".pairs dd"), strict=True))
        assert pairs["predicted TTFT (s)"] == ("1.8" if record.num_after > record.num_before else "0.210")
        await page.keyboard.press("Escape")
        await expect(dialog).to_be_hidden()
        await expect(mark).to_be_focused()
        request_id = core.recent_routes(8)[3].query.request_id
        await page.get_by_label("Request id to explain").fill(request_id)
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("dialog", name=request_id).locator("tbody tr")).to_have_count(4)
        await page.keyboard.press("Escape")
        chart = page.get_by_role("group", name="Replicas over time")
        await chart.focus()
        await page.keyboard.press("ArrowLeft")
        await expect(chart.locator("time")).not_to_be_empty()
        assert watched.errors == []


async def test_a_broken_stream_says_so_and_comes_back() -> None:
    address = free_address()
    async with serving(FakeCore(), address):
        watching = browser_page(f"http://{address}/dashboard")
        watched = await watching.__aenter__()
        await is_live(watched.page)
    try:
        page = watched.page
        await expect(page.get_by_role("alert")).to_contain_text("broken; reconnecting. What you see is from")
        await expect(page.locator("#connection")).to_have_text("reconnecting")
        async with serving(FakeCore(num_replicas=2), address):
            await is_live(page)
            await expect(page.get_by_role("alert")).to_be_hidden()
            await expect(page.locator("#replica-count")).to_contain_text("of 3 ready")  # two, and one that starts
    finally:
        await watching.__aexit__(None, None, None)


async def test_a_stream_that_is_late_says_so_and_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway sends one update, then nothing, and keeps the connection open; a new connection gets an update."""
    monkeypatch.setattr("shoal_cluster.serve.dashboard.page.UPDATE_PERIOD_S", 3600.0)
    address = free_address()
    async with serving(FakeCore(), address), browser_page(f"http://{address}/dashboard") as watched:
        page = watched.page
        await is_live(page)
        await page.route(
            "**/dashboard/stream*", lambda route: None
        )  # the page's new request waits until the page has been checked
        await expect(page.locator("#connection")).to_have_text("reconnecting")
        await expect(page.get_by_role("alert")).to_contain_text("What you see is from")
        await page.unroute("**/dashboard/stream*")
        await is_live(page)
        assert watched.errors == []


async def test_the_charts_go_back_six_hours(core: FakeCore, url: str) -> None:
    """By keyboard alone: choose the range, and go to the first moment that a chart shows."""
    stand_still(core)
    async with browser_page(url) as watched:
        page = watched.page
        await is_live(page)
        ranges = page.get_by_role("group", name="Time range of all charts").get_by_role("button")
        await expect(ranges).to_have_text(["10 min", "1 h", "6 h"])
        chart = page.get_by_role("group", name="Replicas over time")
        moments = []
        for number in range(3):
            await ranges.nth(number).press("Enter")
            await expect(ranges.nth(number)).to_have_attribute("aria-pressed", "true")
            await expect(page.locator("#ranges [aria-pressed=true]")).to_have_count(1)
            await expect(page.locator("#scaling-charts")).to_have_attribute("aria-busy", "false")
            await chart.focus()
            await page.keyboard.press("Home")
            await expect(chart.locator("time")).not_to_be_empty()
            moments.append(await chart.locator("time").get_attribute("datetime"))
        now = core.clock()
        ages_s = [now - datetime.fromisoformat(moment or "").timestamp() for moment in moments]
        assert ages_s[0] <= 600
        assert 600 < ages_s[1] <= 3600
        assert 4.5 * 3600 < ages_s[2] <= 6 * 3600, "what the replicas of this scripted cluster remember"
        assert watched.errors == []


async def test_a_range_that_was_left_before_its_past_came_is_not_shown(core: FakeCore, url: str) -> None:
    stand_still(core)
    async with browser_page(url) as watched:
        page = watched.page
        await is_live(page)
        charts = page.locator("#scaling-charts")
        is_asked, may_answer, has_answered = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def answer_late(route: Route) -> None:
            is_asked.set()
            async with asyncio.timeout(DEADLINE_S):
                await may_answer.wait()
            await route.continue_()

        await page.route("**/history?seconds=3600", answer_late)
        page.on("requestfinished", lambda request: has_answered.set() if "seconds=3600" in request.url else None)
        async with asyncio.timeout(DEADLINE_S):
            await page.get_by_role("button", name="1 h").press("Enter")
            await is_asked.wait()
            await page.get_by_role("button", name="6 h").press("Enter")
            await expect(charts).to_have_attribute("aria-busy", "false")
            may_answer.set()
            await has_answered.wait()
        chart = page.get_by_role("group", name="Replicas over time")
        await chart.focus()
        await page.keyboard.press("Home")
        await expect(chart.locator("time")).not_to_be_empty()
        moment = await chart.locator("time").get_attribute("datetime")
        assert core.clock() - datetime.fromisoformat(moment or "").timestamp() > 4.5 * 3600
        assert watched.errors == []


async def test_events_of_another_gateway_at_the_same_address_are_not_mixed_in(core: FakeCore, url: str) -> None:
    others = [{"seq": number, "time_s": 5.0, "kind": "ready", "text": "elsewhere"} for number in range(1, 30)]
    num_asked = 0

    async def answer(route: Route) -> None:
        nonlocal num_asked
        num_asked += 1
        await route.fulfill(json=others)

    async with browser_page(url) as watched:
        page = watched.page
        await page.route("**/dashboard/events", answer)
        await page.reload()
        await is_live(page)
        rows = page.locator("#event-list")
        await expect(rows).to_contain_text(core.events(1)[0].text)
        num_before = num_asked
        await page.wait_for_timeout(3000)  # six more updates
        await expect(rows).not_to_contain_text("elsewhere")
        assert num_asked <= num_before + 1, "not with every update; once more if the stream was late"
        counts = await page.evaluate(RETRIES)
        assert counts == [2, 2, 29], "the newest alone, also the next time, and after a while all"
        assert watched.errors == []


async def test_controls_need_the_key_and_change_the_cluster(core: FakeCore, url: str) -> None:
    async with browser_page(url) as watched:
        page = watched.page
        await is_live(page)
        drain = page.get_by_role("button", name="Drain", exact=True)
        await expect(drain.first).to_be_hidden()
        await page.get_by_role("button", name="Controls, locked").click()
        await page.get_by_label("Admin key").fill("wrong")
        await page.get_by_role("button", name="Unlock").click()
        await expect(page.get_by_role("status").filter(has_text="key")).to_contain_text("missing or wrong")
        await page.get_by_label("Admin key").fill(ADMIN_KEY)
        await page.get_by_role("button", name="Unlock").click()
        await page.get_by_label("max replicas").fill("9")
        await page.get_by_role("button", name="Apply").click()
        await expect(page.get_by_role("dialog")).to_contain_text("In force.")
        assert core.changes == {"max_replicas": 9}
        await expect(page.locator("#bounds")).to_have_text("of 2 to 9 · tuned")
        await page.keyboard.press("Escape")
        replica_id = core.cluster().replicas[0].replica_id
        await page.get_by_role("article", name=replica_id).get_by_role("button", name="Drain").click()
        await page.get_by_role("button", name="Drain it").click()
        await expect(page.get_by_role("article", name=replica_id).locator(".state")).to_have_text("draining")
        assert core.drained == {replica_id}


async def test_an_answer_after_its_dialog_was_closed_does_not_open_it_again(core: FakeCore, url: str) -> None:
    async with browser_page(url) as watched:
        page = watched.page
        await is_live(page)
        held: asyncio.Queue[Route] = asyncio.Queue()
        for pattern in ("**/dashboard/controls", "**/dashboard/controls/*", "**/dashboard/routes/*"):
            await page.route(pattern, held.put)

        async def closed_then_answered() -> None:
            route = await held.get()
            await page.keyboard.press("Escape")
            await expect(page.get_by_role("dialog")).to_be_hidden()
            async with page.expect_event("requestfinished", lambda request: request == route.request):
                await route.continue_()
            await page.evaluate("new Promise(resolve => setTimeout(resolve))")  # callbacks that waited for it have run
            await expect(page.get_by_role("dialog")).to_be_hidden()

        await page.locator("#routes td.request button").first.click()
        await closed_then_answered()
        await page.get_by_role("button", name="Controls, locked").click()
        await page.get_by_label("Admin key").fill(ADMIN_KEY)
        await page.get_by_role("button", name="Unlock").click()
        await closed_then_answered()
        await page.get_by_role("button", name="Controls", exact=True).click()
        await page.get_by_label("max replicas").fill("9")
        await page.get_by_role("button", name="Apply").click()
        await closed_then_answered()
        await expect(page.locator("#bounds")).to_have_text("of 2 to 9 · tuned")
        # A dialog that was opened again meanwhile changes what it is told to, and nothing else.
        await page.get_by_role("button", name="Controls", exact=True).click()
        await page.get_by_label("max replicas").fill("7")
        await page.get_by_role("button", name="Apply").click()
        route = await held.get()
        await page.keyboard.press("Escape")
        await page.get_by_role("button", name="Controls", exact=True).click()
        await route.continue_()
        await expect(page.locator("#bounds")).to_have_text("of 2 to 7 · tuned")
        await page.get_by_label("min replicas").fill("3")
        await page.get_by_role("button", name="Apply").click()
        await (await held.get()).continue_()
        await expect(page.locator("#bounds")).to_have_text("of 3 to 7 · tuned")
        assert watched.errors == []


async def test_the_block_map_shows_the_pool(core: FakeCore, url: str) -> None:
    stand_still(core)
    async with browser_page(url) as watched:
        page = watched.page
        await is_live(page)
        row = core.cluster().replicas[0]
        assert row.stats is not None
        card = page.get_by_role("article", name=row.replica_id)
        await card.get_by_role("button", name="Block map").press("Enter")
        picture = card.locator("canvas")
        await page.wait_for_function("canvas => canvas.ariaLabel", arg=await picture.element_handle())
        told = str(await picture.get_attribute("aria-label"))
        assert f"{row.stats.num_cached_blocks} cached" in told
        colours = (
            "c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size"
        )
        assert await picture.evaluate(colours) > 4, "it is painted"
        assert watched.errors == []


SIZES = [(360, 780), (1280, 900), (2560, 1300)]


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_layout_holds_at_every_width_and_text_can_be_read(url: str, scheme: str) -> None:
    async with browser_page(url, color_scheme=scheme) as watched:
        page = watched.page
        await is_live(page)
        await expect(page.locator(".lane button").first).to_be_attached()
        for width, height in SIZES:
            await page.set_viewport_size({"width": width, "height": height})
            await page.get_by_role("button", name="Block map").first.click()
            assert await page.evaluate("document.documentElement.scrollWidth") == width, "nothing scrolls sideways"
            assert await page.evaluate(OVERFLOWING) == [], width
            assert await page.evaluate(OVERLAPPING) == [], width
            assert await page.evaluate(UNNAMED) == []
            assert await page.evaluate(LOW_CONTRAST) == [], (scheme, width)
        assert watched.errors == []


async def test_the_page_opens_with_an_api_key_as_password() -> None:
    address = free_address()
    async with serving(FakeCore(api_keys={"alice": "sk-a"}), address):
        url = f"http://{address}/dashboard"
        async with browser_page(url, http_credentials={"username": "anybody", "password": "sk-a"}) as watched:
            await is_live(watched.page)
