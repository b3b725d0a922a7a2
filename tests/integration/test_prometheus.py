"""Prometheus itself, with the shipped configuration, on a running cluster: every number arrives, and is right."""

from __future__ import annotations

import asyncio
import json
import subprocess
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fixtures.live_cluster import LiveCluster
from fixtures.prometheus_tools import RULES, Prometheus, require_prometheus, running_prometheus
from prometheus_client.parser import text_string_to_metric_families

from shoal_cluster.commands.client import GatewayClient
from shoal_cluster.serve.call import GenerateCall
from shoal_cluster.serve.metrics import definitions as d
from shoal_replica import SamplingParams

pytestmark = pytest.mark.integration

ALERTS = Path(__file__).parents[1] / "fixtures" / "alerts.yaml"
BOARD = RULES.parent / "grafana" / "shoal.json"
ARRIVAL_S = 90.0  # Ray's agents are some seconds behind
MOVING = (d.FEED_AGE, d.GATEWAY_MEMORY, d.REPLICA_MEMORY)  # never the same at two looks


def test_promtool_accepts_the_configuration_and_the_alerts_fire():
    require_prometheus()
    subprocess.run(["promtool", "check", "config", str(RULES / "prometheus.yml")], check=True, timeout=60)
    subprocess.run(["promtool", "test", "rules", str(ALERTS)], check=True, timeout=60)
    rules = yaml.safe_load((RULES / "rules.yaml").read_text())["groups"]
    alerts = {rule["alert"] for group in rules for rule in group["rules"] if "alert" in rule}
    cases = [case for test in yaml.safe_load(ALERTS.read_text())["tests"] for case in test.get("alert_rule_test", ())]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == alerts
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == alerts


def test_every_expression_of_the_board_parses(tmp_path: Path):
    require_prometheus()
    exprs = [target["expr"] for panel in json.loads(BOARD.read_text())["panels"] for target in panel["targets"]]
    rules = [{"record": f"board:{number}", "expr": expr} for number, expr in enumerate(exprs)]
    path = tmp_path / "rules.yaml"
    for broken in ("", ")"):
        rules[-1]["expr"] += broken
        path.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
        done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, timeout=60)
        assert done.returncode == (1 if broken else 0), done.stderr


async def arrives(look: Callable[[], bool], meanwhile: Callable[[], Awaitable[object]]) -> None:
    """Await ``meanwhile`` again and again until ``look`` is true."""
    async with asyncio.timeout(ARRIVAL_S):
        while not await asyncio.to_thread(look):
            await meanwhile()


def page_text(address: str) -> str:
    return httpx.get(f"http://{address}/metrics", timeout=60).text


def gateway_series(address: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The series of the gateway's own page now, except those that change by themselves."""
    text = page_text(address)
    moving = {family.name for family in MOVING}
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        if family.name not in moving
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def differences(server: Prometheus, page: dict[tuple[str, frozenset[tuple[str, str]]], float]) -> list[str]:
    """Series of the gateway's page that Prometheus lacks or has with another value."""
    known: dict[str, list[tuple[set[tuple[str, str]], float]]] = {}
    for sample in server.query('{__name__=~"shoal_.+",job="ray"}'):
        labels = {(key, _bound(key, value)) for key, value in sample["metric"].items()}
        known.setdefault(sample["metric"]["__name__"], []).append((labels, float(sample["value"][1])))
    wrong = []
    for (name, labels), value in page.items():
        found = [other for tags, other in known.get(name, ()) if {(k, _bound(k, v)) for k, v in labels} <= tags]
        if found != [value]:
            wrong.append(f"{name}{dict(labels)}: {value} here, {found} there")
    return wrong


def _bound(label: str, value: str) -> str:
    return str(float(value)) if label == "le" else value


async def test_prometheus_scrapes_a_running_cluster(cluster: LiveCluster, tmp_path: Path):
    require_prometheus()
    with running_prometheus(
        tmp_path, cluster.ray_folder / "prom_metrics_service_discovery.json", cluster.http_address
    ) as server:
        async with GatewayClient(cluster.grpc_address) as client:

            async def talk() -> None:
                params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
                call = GenerateCall(
                    request_id=uuid.uuid4().hex, text="A reef is " * 8, sampling_params=params, timeout_s=60
                )
                async for _ in client.generate(call):
                    pass

            # Rates need a sample from before the first event.
            await arrives(lambda: bool(server.query("shoal_replica_step_seconds_count")), lambda: asyncio.sleep(0.5))
            expressions = [
                target["expr"] for panel in json.loads(BOARD.read_text())["panels"] for target in panel["targets"]
            ]
            await arrives(lambda: all(server.query(expression) for expression in expressions), talk)

            page: dict[Any, float] = {}

            def agrees() -> bool:
                page.clear()
                page.update(gateway_series(cluster.http_address))
                return not differences(server, page)

            await arrives(agrees, lambda: asyncio.sleep(0.5))
        assert len(page) > 150
        told = {family.name: family for family in text_string_to_metric_families(page_text(cluster.http_address))}
        assert {name: family.type for name, family in told.items()} == {
            f.name.removesuffix("_total"): f.kind for f in d.FAMILIES
        }, "the gateway's page has every metric, with its type"
        names = {sample["metric"]["__name__"] for sample in server.query('{__name__=~"shoal_.+",job="ray"}')}
        suffixes = {d.Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
        assert names == {f.name + suffix for f in d.FAMILIES for suffix in suffixes.get(f.kind, ("",))}
        assert server.value("count(shoal_gateway_requests_active)") == 1, "the gateway's own page is not counted beside"
        assert server.value("sum(shoal_gateway_feed_connected)") == 2
        assert server.value("max(shoal_autoscaler_running_replicas)") == 2
        assert 0 < server.value('shoal:ttft_seconds{quantile="0.5"}') < 60
        rules = [rule for group in server.get("rules")["groups"] for rule in group["rules"]]
        assert {rule["health"] for rule in rules} == {"ok"}
        assert [rule["name"] for rule in rules if rule["type"] == "alerting" and rule["state"] == "firing"] == []
        assert {target["health"] for target in server.get("targets")["activeTargets"]} == {"up"}
