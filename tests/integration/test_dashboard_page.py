"""The dashboard over a scripted core: the page is self-contained, and its stream is small, shared, and ends."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import pytest_asyncio
import uvicorn
from fixtures.fake_core import FakeCore
from fixtures.fake_gateway import ADMIN_KEY, CLUSTER, STATS, example_record
from fixtures.fake_scaling import FIFTH
from fixtures.waiting import DEADLINE_S, until
from msgspec import structs

from shoal_cluster.policies.route_record import RouteRecord
from shoal_cluster.serve.block_map import BlockMap
from shoal_cluster.serve.dashboard import state as dashboard_state
from shoal_cluster.serve.dashboard.broadcast import Broadcast
from shoal_cluster.serve.dashboard.page import FOLDER, STATIC, UPDATE_PERIOD_S
from shoal_cluster.serve.dashboard.roster import roster
from shoal_cluster.serve.dashboard.state import DashboardState
from shoal_cluster.serve.dashboard.update import MAX_UPDATE_BYTES, NUM_ROUTES
from shoal_cluster.serve.deployment_watch import DeploymentRow, ServeReplica
from shoal_cluster.serve.http.api import build_http_app
from shoal_cluster.serve.rows import ClusterRow, ModelRow, ReplicaRow
from shoal_replica.errors import NotFound

MAX_PAGE_BYTES = 250_000
# XML namespaces are names: nothing is fetched by them.
NOT_FETCHED = ("http://www.w3.org/",)


@dataclass(slots=True)
class CountedCore(FakeCore):
    """Counts the updates: only they ask for routes."""

    num_updates: int = 0

    def recent_routes(self, limit: int) -> Any:
        self.num_updates += 1
        return FakeCore.recent_routes(self, limit)


@pytest.fixture
def core() -> CountedCore:
    return CountedCore()


@pytest_asyncio.fixture
async def http(core: CountedCore) -> AsyncIterator[httpx.AsyncClient]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(build_http_app(core), log_config=None, lifespan="on", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client:
        yield client
    server.should_exit = True
    await task


def stand_still(core: FakeCore) -> None:
    """Stop the clock, so that two looks see the same."""
    now = core.clock()
    core.clock = lambda: now


async def next_event(lines: AsyncIterator[str]) -> tuple[str, str]:
    """The next event with data: its name and its data."""
    name = data = ""
    async with asyncio.timeout(DEADLINE_S):
        async for line in lines:
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                data = line.removeprefix("data: ")
            elif not line and data:
                return name, data
    raise AssertionError("the stream ended")


async def test_the_page_asks_nothing_of_other_hosts(http: httpx.AsyncClient) -> None:
    page = await http.get("/dashboard")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    num_bytes = len(page.content)
    texts = {"index.html": page.text}
    for name in STATIC:
        file = await http.get(f"/dashboard/static/{name}")
        assert file.status_code == 200, name
        num_bytes += len(file.content)
        texts[name] = file.text
    for name, text in texts.items():
        assert "@import" not in text, name
        if name.startswith("vendor/"):
            assert not re.search(r"fetch\(|XMLHttpRequest|WebSocket|sendBeacon|createElement\(.script", text), name
        else:
            urls = re.findall(r"https?://[^\s'\"`)]*|(?:src|href)=[\"']//[^\"']*", text)
            assert [url for url in urls if not url.startswith(NOT_FETCHED)] == [], name
    assert num_bytes <= MAX_PAGE_BYTES


async def test_every_file_that_the_page_names_is_served(http: httpx.AsyncClient) -> None:
    page = (await http.get("/dashboard")).text
    named = re.findall(r'(?:src|href)="dashboard/static/([^"]+)"', page)
    scripts = [name for name in STATIC if name.endswith(".js") and not name.startswith("vendor/")]
    imported = {m for name in scripts for m in re.findall(r'from "\./([^"]+)"', (FOLDER / name).read_text())}
    assert len(named) >= 5
    assert {*named, *imported} <= set(STATIC)
    ids = set(re.findall(r'id="([^"]+)"', page))
    assert set(re.findall(r'\$\("([^"]+)"\)', (FOLDER / "dashboard.js").read_text())) <= ids


async def test_only_the_listed_files_are_served(http: httpx.AsyncClient) -> None:
    for name in ("page.py", "../page.py", "%2e%2e/page.py", "vendor", "vendor/../page.py"):
        assert (await http.get(f"/dashboard/static/{name}")).status_code == 404, name


async def test_an_update_says_what_the_core_says(http: httpx.AsyncClient, core: CountedCore) -> None:
    core.clock = lambda: core.started_s + 30.0
    update = (await http.get("/dashboard/data")).json()
    cluster = core.cluster()
    assert update["model"] == cluster.model
    assert update["num_active"] == cluster.num_active
    stats = [row.stats for row in cluster.replicas if row.stats is not None]
    assert update["blocks"]["allocated"] == sum(s.num_allocated_blocks for s in stats)
    assert update["blocks"]["free"] + update["blocks"]["allocated"] == update["blocks"]["total"]
    rows = {
        r["replica_id"]: r
        for r in (dict(zip(update["replica_columns"], row, strict=True)) for row in update["replicas"])
    }
    assert rows.keys() == {row.replica_id for row in cluster.replicas}
    for row in cluster.replicas:
        assert row.stats is not None
        shown = rows[row.replica_id]
        assert shown["state"] == "ready"
        assert shown["blocks"] == [
            row.stats.num_allocated_blocks,
            row.stats.num_cached_blocks,
            row.num_reserved_blocks,
            row.stats.num_free_blocks,
            row.stats.num_total_blocks,
        ]
        assert shown["num_running"] == row.stats.num_running
    latency = cluster.latency
    assert latency is not None
    exact = [latency.ttft.p50_s, latency.ttft.p95_s, latency.ttft.p99_s]
    assert update["latency"]["ttft_s"] == pytest.approx(exact, abs=1e-5)
    assert update["latency"]["attainment"] == pytest.approx(latency.attainment, abs=1e-4)
    scaling = core.scaling()
    assert update["scaling"]["num_wanted"] == scaling.current.num_after
    assert [m["seq"] for m in update["scaling"]["marks"]] == [r.seq for r in scaling.records[-2:]]
    assert [e["seq"] for e in update["events"]] == [e.seq for e in core.events(6)]
    records = core.recent_routes(8)
    assert [r["request_id"] for r in update["routes"]] == [r.query.request_id for r in records]
    assert [r["replica_id"] for r in update["routes"]] == [r.decision.ranked[0] for r in records]
    assert update["models"] == [[*astuple(row)] for row in cluster.models]


class ManyAdapters(FakeCore):
    def cluster(self) -> ClusterRow:
        rows = tuple(ModelRow(f"adapter-{i:02}", 1, i) for i in range(40))
        return replace(CLUSTER, models=(ModelRow("model", 4), *rows))


@dataclass(slots=True)
class SlowMaps(FakeCore):
    """Tells of a replica's blocks when ``told`` is set, and counts how often it was asked."""

    told: asyncio.Event = field(default_factory=asyncio.Event)
    num_asked: int = 0

    async def block_map(self, replica_id: str) -> BlockMap:
        self.num_asked += 1
        await self.told.wait()
        return await FakeCore.block_map(self, replica_id)


async def test_viewers_of_a_replicas_blocks_share_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_state, "MAP_AGE_S", 3600.0)
    core = SlowMaps()
    state, name = DashboardState(core), core.cluster().replicas[0].replica_id
    viewers = [asyncio.create_task(state.block_map(name)) for _ in range(3)]
    await asyncio.sleep(0)
    viewers[0].cancel()
    core.told.set()
    one, other = await asyncio.gather(*viewers[1:])
    assert one is other is await state.block_map(name)
    assert core.num_asked == 1
    for num_asked in (2, 3):
        with pytest.raises(NotFound):
            await state.block_map("nobody")
        assert core.num_asked == num_asked
    monkeypatch.setattr(dashboard_state, "MAP_AGE_S", 0.0)
    aging = core.cluster().replicas[1].replica_id
    first = await state.block_map(aging)
    async with asyncio.timeout(DEADLINE_S):
        while await state.block_map(aging) is first:  # noqa: ASYNC110 - it does not call us
            await asyncio.sleep(0)


def test_of_many_adapters_those_that_are_asked_for_most_are_shown() -> None:
    told = json.loads(DashboardState(ManyAdapters()).update())
    assert [row[0] for row in told["models"]] == ["model", *(f"adapter-{i:02}" for i in range(39, 24, -1))]
    assert told["num_models_left_out"] == 25


@pytest.mark.parametrize(
    ("after_s", "state", "num_running"), [(10.0, "starting", 4), (30.0, "ready", 5), (50.0, "draining", 4)]
)
async def test_a_replica_is_shown_while_it_starts_and_stops_and_only_serve_knows_it(
    http: httpx.AsyncClient, core: CountedCore, after_s: float, state: str, num_running: int
) -> None:
    core.clock = lambda: core.started_s + after_s
    update = (await http.get("/dashboard/data")).json()
    rows = [dict(zip(update["replica_columns"], row, strict=True)) for row in update["replicas"]]
    (its,) = [row for row in rows if row["replica_id"] == FIFTH]
    assert (its["state"], its["age_s"] is None) == (state, state != "ready")
    assert core.scaling().current.num_running == len(core.cluster().replicas) == num_running


async def test_the_stream_sends_named_events_of_bounded_size(http: httpx.AsyncClient) -> None:
    async with http.stream("GET", "/dashboard/stream") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.aiter_lines()
        times = []
        for _ in range(3):
            name, data = await next_event(lines)
            assert name == "update"
            assert len(data) <= MAX_UPDATE_BYTES
            times.append(json.loads(data)["time_s"])
    assert times[0] < times[1] < times[2]


async def test_viewers_share_one_producer_which_ends_with_the_last(http: httpx.AsyncClient, core: CountedCore) -> None:
    async with http.stream("GET", "/dashboard/stream") as first:
        first_lines = first.aiter_lines()
        _, early = await next_event(first_lines)
        async with http.stream("GET", "/dashboard/stream") as second:
            second_lines = second.aiter_lines()
            assert json.loads((await next_event(second_lines))[1])["time_s"] >= json.loads(early)["time_s"]
            before, started_s = core.num_updates, time.monotonic()
            for _ in range(3):
                assert await next_event(first_lines)
                assert await next_event(second_lines)
            num_periods = (time.monotonic() - started_s) / UPDATE_PERIOD_S
            assert core.num_updates - before <= num_periods + 1, "two viewers cost no more than one"
        seen = core.num_updates
        await next_event(first_lines)
        await until(lambda: core.num_updates > seen)
    tasks = {task.get_name() for task in asyncio.all_tasks()}
    async with asyncio.timeout(DEADLINE_S):
        while "shoal-dashboard" in tasks:
            await asyncio.sleep(0.001)
            tasks = {task.get_name() for task in asyncio.all_tasks()}
    assert "shoal-history" in tasks, "the timelines' past is kept without viewers"


async def test_history_is_columns_of_equal_length(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            columns = (await http.get("/dashboard/history?seconds=60")).json()
            if columns["time_s"]:
                break
            await asyncio.sleep(0.05)
    assert {len(column) for column in columns.values()} == {len(columns["time_s"])}
    assert columns["num_ready"][-1] == 4


async def test_history_goes_back_to_what_the_replicas_remember(http: httpx.AsyncClient, core: CountedCore) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            columns = (await http.get("/dashboard/history")).json()
            if len(columns["time_s"]) > 900 and columns["num_ready"][0] == 4:
                break
            await asyncio.sleep(0.05)
    assert columns["time_s"][0] < core.started_s - 4.9 * 3600
    assert columns["time_s"] == sorted(set(columns["time_s"]))
    past = await core.replica_past(core.cluster().replicas[0].replica_id)
    busy = next(n for n, sample in enumerate(past) if sample.tokens_per_s > 0)  # part of the five hours is quiet
    assert columns["time_s"][busy] == past[busy].time_s
    assert columns["tokens_per_s"][busy] > past[busy].tokens_per_s, "the sum of all replicas"
    assert columns["attainment"][0] is None


async def test_a_full_record_has_every_candidate_and_term(http: httpx.AsyncClient, core: CountedCore) -> None:
    (body,) = (await http.get("/dashboard/routes/req-1007")).json()
    (record,) = (await core.explain("req-1007")).records
    assert body["reason"] == record.decision.reason
    ranked = [c["replica_id"] for c in body["candidates"] if c["rank"] is not None]
    assert tuple(ranked) == record.decision.ranked
    assert len(body["candidates"]) == len(record.decision.candidates)
    terms = {c.replica_id: dict(c.terms) for c in record.decision.candidates}
    assert all(c["terms"] == terms[c["replica_id"]] for c in body["candidates"])


async def test_an_unknown_request_is_not_found(http: httpx.AsyncClient) -> None:
    for request_id in ("never", "a/b"):
        answer = await http.get(f"/dashboard/routes/{quote(request_id, safe='')}")
        assert answer.status_code == 404
        assert repr(request_id) in answer.json()["error"]["message"]


async def test_a_decision_has_all_that_it_weighed(http: httpx.AsyncClient, core: CountedCore) -> None:
    stand_still(core)
    marks = (await http.get("/dashboard/decisions")).json()
    records = core.scaling().records
    assert [m["seq"] for m in marks] == [r.seq for r in records]
    body = (await http.get(f"/dashboard/decisions/{records[0].seq}")).json()
    assert (body["num_before"], body["num_after"]) == (records[0].num_before, records[0].num_after)
    assert (body["reason"], body["terms"]) == (records[0].reason, dict(records[0].terms))
    assert (await http.get("/dashboard/decisions/9999")).status_code == 404


async def test_all_kept_events_can_be_had(http: httpx.AsyncClient, core: CountedCore) -> None:
    stand_still(core)
    events = (await http.get("/dashboard/events")).json()
    assert [e["seq"] for e in events] == [e.seq for e in core.events(500)]
    assert events[0]["kind"] == "deployed"


async def test_a_block_map_has_a_cell_a_block(http: httpx.AsyncClient, core: CountedCore) -> None:
    replica_id = core.cluster().replicas[0].replica_id
    told = (await http.get(f"/dashboard/replicas/{replica_id}/blocks")).json()
    assert told["num_blocks"] == len(base64.b64decode(told["cells"])) == 2048
    assert (await http.get("/dashboard/replicas/never/blocks")).status_code == 404


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "Bearer wrong")],
        [("authorization", ADMIN_KEY)],
        [("authorization", f"Bearer {ADMIN_KEY}"), ("authorization", "Bearer wrong")],
    ],
)
async def test_nothing_changes_without_the_key(
    http: httpx.AsyncClient, core: CountedCore, headers: list[tuple[str, str]]
) -> None:
    replica_id = core.cluster().replicas[0].replica_id
    answers = [
        await http.get("/dashboard/controls", headers=headers),
        await http.post("/dashboard/controls/tune", headers=headers, json={"changes": {"max_replicas": 9}}),
        await http.post(f"/dashboard/controls/drain/{replica_id}", headers=headers),
    ]
    assert [answer.status_code for answer in answers] == [403, 403, 403]
    assert (core.changes, core.drained) == ({}, set())


async def test_settings_change_in_place_within_their_limits(http: httpx.AsyncClient, core: CountedCore) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    limits = (await http.get("/dashboard/controls", headers=headers)).json()["limits"]
    assert limits["max_replicas"][0] == 1
    told = await http.post("/dashboard/controls/tune", headers=headers, json={"changes": {"max_replicas": 9}})
    assert told.json()["settings"]["max_replicas"] == 9
    assert told.json()["tuned"] == ["max_replicas"]
    update = (await http.get("/dashboard/data")).json()
    assert (update["scaling"]["settings"]["max_replicas"], update["scaling"]["tuned"]) == (9, ["max_replicas"])
    bad = await http.post("/dashboard/controls/tune", headers=headers, json={"changes": {"target_utilization": 7}})
    assert bad.status_code == 400
    assert "target_utilization" in bad.json()["error"]["message"]
    for odd in (True, "2"):
        bad = await http.post("/dashboard/controls/tune", headers=headers, json={"changes": {"min_replicas": odd}})
        assert bad.status_code == 400
    back = await http.post("/dashboard/controls/tune", headers=headers, json={"changes": {}, "reset": True})
    assert back.json()["tuned"] == []


async def test_a_replica_is_drained(http: httpx.AsyncClient, core: CountedCore) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    replica_id = core.cluster().replicas[0].replica_id
    assert (await http.post(f"/dashboard/controls/drain/{replica_id}", headers=headers)).status_code == 200
    assert core.drained == {replica_id}
    assert (await http.post("/dashboard/controls/drain/never", headers=headers)).status_code == 404


class LargeCore(FakeCore):
    def cluster(self) -> ClusterRow:
        rows = [
            ReplicaRow(replica_id=f"replica-{i:04}", node_id="n" * 56, stats=STATS, age_s=0.1, connected=i != 500)
            for i in range(1000)
        ]
        return replace(CLUSTER, replicas=tuple(rows))

    def deployment(self) -> None:
        return None

    def recent_routes(self, limit: int) -> Sequence[RouteRecord]:
        return [example_record()] * min(limit, 10)


def test_a_large_cluster_is_cut_to_size_with_those_in_trouble_first() -> None:
    body = DashboardState(LargeCore()).update()
    told = json.loads(body)
    assert len(body) <= MAX_UPDATE_BYTES
    assert told["replicas"][0][:2] == ["replica-0500", "not connected"]
    assert len(told["replicas"]) + told["num_replicas_left_out"] == 1000
    assert len(told["replicas"]) > 20
    assert len(told["routes"]) == NUM_ROUTES
    assert told["blocks"]["total"] == 100 * 1000, "sums are over all replicas"


def test_states_are_told_apart() -> None:
    rows = (
        ReplicaRow(replica_id="a", stats=STATS, connected=True),
        ReplicaRow(replica_id="b", stats=structs.replace(STATS, draining=True), connected=True),
        ReplicaRow(replica_id="c", stats=STATS),
        ReplicaRow(replica_id="d", connected=True),
        ReplicaRow(replica_id="s", stats=STATS, connected=True, stalled=True),
        ReplicaRow(replica_id="t", stats=structs.replace(STATS, draining=True), connected=True, stalled=True),
    )
    serve = [
        ServeReplica(replica_id=i, state=state, node_id="n", started_s=7.0)
        for i, state in (("a", "RUNNING"), ("e", "STARTING"), ("f", "STOPPING"), ("g", "RUNNING"))
    ]
    row = DeploymentRow(num_wanted=3, status="HEALTHY", message="", deployed_s=1.0, replicas=tuple(serve))
    cards = roster(rows, row)
    assert [(card.row.replica_id, card.state.value) for card in cards] == [
        ("c", "not connected"),
        ("s", "stalled"),
        ("d", "silent"),
        ("b", "draining"),
        ("f", "draining"),
        ("t", "draining"),
        ("e", "starting"),
        ("a", "ready"),
    ]
    assert [card.started_s for card in cards] == [None, None, None, None, 7.0, None, 7.0, 7.0]


async def test_a_failed_producer_tells_every_viewer_and_starts_again() -> None:
    answers: list[bytes | Exception] = [b"one", RuntimeError("broken"), b"two"]

    def produce() -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    broadcast = Broadcast(produce, 0.01)
    viewers = [broadcast.events(), broadcast.events()]
    assert [await anext(viewer) for viewer in viewers] == [b"one", b"one"]
    for viewer in viewers:
        with pytest.raises(RuntimeError, match="broken"):
            await anext(viewer)
    assert broadcast._num_viewers == 0
    assert not broadcast.is_running
    again = broadcast.events()
    assert await anext(again) == b"two"
    await again.aclose()
    assert not broadcast.is_running
