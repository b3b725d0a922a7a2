"""A running cluster reports each request: spans to a collector, a line to its log, and never what was said."""

from __future__ import annotations

import itertools
import json
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest
from fixtures.live_cluster import LiveCluster
from fixtures.otlp_collector import attributes
from fixtures.waiting import until

from shoal_cluster.chat.message import Message
from shoal_cluster.commands.client import GatewayClient
from shoal_cluster.serve.call import GenerateCall
from shoal_cluster.serve.trace_context import TraceContext
from shoal_replica import SamplingParams

pytestmark = pytest.mark.integration

LOOK_S = 0.2  # a look reads files
SECRET = "zanzibarquartz"  # a word of neither the code nor other prompts


def new_trace() -> TraceContext:
    return TraceContext(trace_id=uuid.uuid4().hex, span_id=uuid.uuid4().hex[:16], sampled=True)


def lines_of(ray_folder: Path, request_id: str) -> list[dict[str, Any]]:
    """The lines that the cluster's processes have logged about a request."""
    found: dict[str, dict[str, Any]] = {}
    for path in (ray_folder / "session_latest" / "logs").rglob("*.err"):
        for line in path.read_text(errors="replace").splitlines(keepends=True):
            if request_id in line and line.startswith("{") and line.endswith("\n"):  # else it is still being written
                found[line] = json.loads(line)
    return list(found.values())


async def test_both_faces_take_the_callers_trace_and_log_one_line(cluster: LiveCluster):
    by_grpc, by_http = new_trace(), new_trace()
    call = GenerateCall(
        request_id=f"grpc-{uuid.uuid4().hex}",
        messages=(Message("user", f"{SECRET} {SECRET}?"),),
        sampling_params=SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, stop=(f"{SECRET}!",)),
        timeout_s=60,
        trace=by_grpc,
    )
    async with GatewayClient(cluster.grpc_address) as client:
        chunks = [chunk async for chunk in client.generate(call)]
    usage = chunks[-1].usage
    assert usage is not None
    http_id = f"http-{uuid.uuid4().hex}"
    async with httpx.AsyncClient(base_url=f"http://{cluster.http_address}", timeout=60) as http:
        body = {"model": cluster.model, "messages": [{"role": "user", "content": SECRET}], "max_tokens": 3}
        headers = {"x-request-id": http_id, **dict(by_http.headers())}
        assert (await http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
        # Input that is wrong, too long or of an unknown shape is not logged either.
        for wrong in ({"top_p": 7}, {"messages": SECRET}, {"model": SECRET}, {"max_tokens": SECRET}):
            assert (await http.post("/v1/chat/completions", json={**body, **wrong})).status_code in (400, 404)
        long = {**body, "messages": [{"role": "user", "content": f"{SECRET} " * 20_000}]}
        assert (await http.post("/v1/chat/completions", json=long)).status_code == 400

    for trace, request_id in ((by_grpc, call.request_id), (by_http, http_id)):
        await until(lambda trace=trace: len(cluster.collector.trace(trace.trace_id)) >= 6, LOOK_S)
        spans = {span.name: span for span in cluster.collector.trace(trace.trace_id)}
        assert set(spans) == {"generate", "admit", "route", "queue", "prefill", "decode"}
        assert spans["generate"].parent_span_id.hex() == trace.span_id
        assert attributes(spans["generate"])["shoal.request_id"] == request_id
        ordered = [spans[name] for name in ("admit", "route", "queue", "prefill", "decode")]
        for before, after in itertools.pairwise(ordered):
            assert before.start_time_unix_nano <= before.end_time_unix_nano <= after.start_time_unix_nano + 1000
    assert attributes(spans["decode"])["shoal.replica_id"]
    assert SECRET.encode() not in b"".join(r.SerializeToString() for r in cluster.collector.requests)

    await until(lambda: lines_of(cluster.ray_folder, call.request_id) and lines_of(cluster.ray_folder, http_id), LOOK_S)
    (line,) = lines_of(cluster.ray_folder, call.request_id)
    assert line["outcome"] == "finished"
    assert line["trace_id"] == by_grpc.trace_id
    assert line["replica_id"] == usage.replica_id
    assert (line["num_prompt_tokens"], line["num_output_tokens"]) == (usage.num_prompt_tokens, 5)
    assert line["finish_reasons"] == ["length"]
    assert 0 < line["placement_s"] <= line["ttft_s"] <= line["duration_s"]
    assert len(lines_of(cluster.ray_folder, http_id)) == 1
    logs = [path for path in (cluster.ray_folder / "session_latest").rglob("*") if path.is_file()]
    assert len(logs) > 10
    assert [path for path in logs if SECRET.encode() in path.read_bytes()] == []
