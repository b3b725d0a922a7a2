"""The files under deploy/ parse, agree with each other, and name only metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal_cluster.commands.demo import NUM_RAY_CPUS
from shoal_cluster.commands.deploy import read_config
from shoal_cluster.commands.local_ray import SERVING_ENVIRONMENT
from shoal_cluster.config import ClusterConfig
from shoal_cluster.serve.metrics.definitions import FAMILIES, Family, Kind
from shoal_cluster.serve.metrics.exposition import markdown_table
from shoal_cluster.settings_table import VLLM, fields_of, markdown_tables

DEPLOY = Path(__file__).parents[2] / "deploy"
SERVE_FILES = sorted((DEPLOY / "serve").glob("*.yaml"))
YAML_FILES = sorted(path for path in DEPLOY.rglob("*") if path.suffix in (".yaml", ".yml"))
SEEN_ELSEWHERE = {  # totals that the rate of another metric already shows
    "shoal_gateway_reserved_blocks",
    "shoal_gateway_sequences_total",
    "shoal_replica_requests_total",
    "shoal_replica_steps_total",
}
SUFFIXES = {Kind.COUNTER: ("",), Kind.GAUGE: ("",), Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}


@pytest.fixture(scope="module")
def exported() -> dict[str, Family]:
    """Every sample name that is defined. Other tests check the exporters against the definitions."""
    return {family.name + suffix: family for family in FAMILIES for suffix in SUFFIXES[family.kind]}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def board() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DEPLOY / "grafana" / "shoal.json").read_text())
    return loaded


def expressions() -> list[str]:
    return [r["expr"] for r in rules()] + [t["expr"] for p in board()["panels"] for t in p["targets"]]


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_yaml_parses(path: Path) -> None:
    assert [document for document in yaml.safe_load_all(path.read_text()) if document]


@pytest.mark.parametrize("path", SERVE_FILES, ids=lambda path: path.name)
def test_serve_files_are_valid_applications(path: Path) -> None:
    _, config = read_config(path)
    assert config.scaling.min_replicas >= 2


def test_there_are_serve_files() -> None:
    assert {path.name for path in SERVE_FILES} >= {"local.yaml", "cluster.yaml", "tensor_parallel.yaml"}


def test_every_metric_named_is_defined(exported: dict[str, Family]) -> None:
    named = {name for expr in expressions() for name in re.findall(r"\bshoal_\w+", expr)}
    assert len(named) > 15
    assert named - exported.keys() == set()


# The parts of an expression that name no metric: strings, label matchers, ranges, label lists, functions, operators.
NO_NAMES = re.compile(
    r'"(?:[^"\\]|\\.)*"|\{[^}]*\}|\[[^\]]*\]|\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)'
    r"|\b[a-z_0-9]+\s*(?=\(|\b(?:by|without)\b)|\b(?:and|or|unless|bool|offset|by|without)\b|\b[\d.]+(?:[smhd]\b)?"
)


def metric_names(expression: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_:][\w:]*", NO_NAMES.sub(" ", expression)))


def test_names_are_found_in_expressions() -> None:
    asked = (
        'sum by (a) (rate(b_total{c="d", e!~"f|g{"}[5m] offset 1h)) / on(h) (k:l > bool 0.5) or absent(m) and up == 1'
    )
    assert metric_names(asked) == {"b_total", "k:l", "m", "up"}


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_names_metrics_of_the_table_only(expression: str, exported: dict[str, Family]) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert metric_names(expression)
    assert metric_names(expression) - exported.keys() - recorded - {"up"} == set()


def test_every_metric_is_on_the_board_or_in_a_rule(exported: dict[str, Family]) -> None:
    """A metric that nobody looks at need not be exported."""
    used = {exported[name] for expr in expressions() for name in re.findall(r"\bshoal_\w+", expr)}
    assert {family.name for family in set(FAMILIES) - used} <= SEEN_ELSEWHERE


def test_what_every_gateway_tells_is_counted_once() -> None:
    """Replicas and the autoscaler are told of by each gateway. Quantiles stay as they are if all counts are doubled."""
    once = r"max(?: by \([\w, ]+\))? ?\((?:rate\(|increase\()?$"
    for expr in expressions():
        for found in re.finditer(r"\bshoal_(?:replica|autoscaler)_\w+", expr):
            assert found[0].endswith("_bucket") or re.search(once, expr[: found.start()]), expr


def test_labels_and_their_values_exist(exported: dict[str, Family]) -> None:
    matchers = [
        (name, *matcher)
        for expr in expressions()
        for name, body in re.findall(r"\b(shoal_\w+)\{([^}]*)\}", expr)
        for matcher in re.findall(r'(\w+)[=!~]+"([^"]*)"', body)
    ]
    assert matchers
    for name, label, values in matchers:
        allowed = {each.name: each.values for each in exported[name].labels}
        assert set(values.split("|")) <= set(allowed[label] or ()), (name, label, values)


def test_the_table_of_metrics_is_the_definitions() -> None:
    """`python -m shoal_cluster.serve.metrics.exposition` prints it."""
    assert markdown_table() in (DEPLOY / "prometheus" / "METRICS.md").read_text()


def test_the_tables_of_settings_are_the_settings() -> None:
    """`python -m shoal_cluster.settings_table` prints them."""
    told = (DEPLOY / "SETTINGS.md").read_text()
    assert all(table in told for table in markdown_tables())
    keys = {key for key, _ in fields_of(ClusterConfig)}
    assert VLLM.keys() <= keys
    assert all(field.description for _, field in fields_of(ClusterConfig))


def test_every_record_used_is_recorded() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    used = {name for expr in expressions() for name in re.findall(r"\bshoal:\w+", expr)}
    assert used
    assert used <= recorded


def test_alerts_say_what_is_wrong_and_how_bad_it_is() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) >= 5
    for rule in alerts:
        assert rule["annotations"]["summary"], rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]


def test_prometheus_scrapes_the_gateways_and_loads_the_rules() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert all((DEPLOY / "prometheus" / name).is_file() for name in config["rule_files"])
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    named = {job for expr in expressions() for job in re.findall(r'job="([^"]+)"', expr)}
    assert named <= jobs


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board()["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


KUBERAY = [("cpu.yaml", "cluster.yaml"), ("npu.yaml", "npu.yaml")]


@pytest.mark.parametrize(("kuberay", "serve"), KUBERAY)
def test_kuberay_runs_the_serve_file(kuberay: str, serve: str) -> None:
    (service,) = yaml.safe_load_all((DEPLOY / "kuberay" / kuberay).read_text())
    embedded = yaml.safe_load(service["spec"]["serveConfigV2"])
    cluster = yaml.safe_load((DEPLOY / "serve" / serve).read_text())
    assert embedded == cluster
    gateway = cluster["applications"][0]["args"]["gateway"]
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]
    assert "app.kubernetes.io/name" not in head["metadata"]["labels"], "KubeRay's Service for the head selects by it"
    assert head["metadata"]["annotations"]["prometheus.io/port"] == gateway["http_address"].rpartition(":")[2]
    ports = {port["name"]: port["containerPort"] for port in head["spec"]["containers"][0]["ports"]}
    assert gateway["grpc_address"].endswith(f":{ports['grpc']}")
    assert gateway["http_address"].endswith(f":{ports['http']}")


@pytest.mark.parametrize(("kuberay", "serve"), KUBERAY)
def test_kuberay_workers_offer_what_replicas_ask_for(kuberay: str, serve: str) -> None:
    service = next(iter(yaml.safe_load_all((DEPLOY / "kuberay" / kuberay).read_text())))
    args = yaml.safe_load((DEPLOY / "serve" / serve).read_text())["applications"][0]["args"]
    (workers,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    offered = json.loads(json.loads(workers["rayStartParams"]["resources"]))
    asked = args["replica"].get("resources", {}) | ({"NPU": 1} if args["replica"].get("device") == "npu" else {})
    assert asked
    per_worker = min(offered[name] // amount for name, amount in asked.items())
    assert workers["minReplicas"] * per_worker >= args["scaling"]["min_replicas"]
    assert workers["maxReplicas"] * per_worker >= args["scaling"]["max_replicas"]
    grace_s = workers["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > args["replica"]["drain_timeout_s"]


def test_kuberay_offers_the_npus_that_kubernetes_gives() -> None:
    """Three places give the same count, and only Ray chooses among the NPUs."""
    service = next(iter(yaml.safe_load_all((DEPLOY / "kuberay" / "npu.yaml").read_text())))
    (workers,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    offered = json.loads(json.loads(workers["rayStartParams"]["resources"]))["NPU"]
    resources = container["resources"]
    assert int(resources["limits"]["huawei.com/Ascend910"]) == offered
    assert int(resources["requests"]["huawei.com/Ascend910"]) == offered
    assert not [variable["name"] for variable in container["env"] if "VISIBLE_DEVICES" in variable["name"]]


@pytest.mark.parametrize("name", ["cpu.yaml", "npu.yaml"])
def test_heads_have_room_for_the_next_version_s_gateway_beside_the_former(name: str) -> None:
    """Serve starts it before it stops the other."""
    service = next(iter(yaml.safe_load_all((DEPLOY / "kuberay" / name).read_text())))
    offered = float(service["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"])
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    assert 2 * application["args"]["gateway"]["num_cpus"] <= offered


def test_the_demo_has_room_for_the_next_gateway_too() -> None:
    _, config = read_config(DEPLOY / "serve" / "local.yaml")
    used = config.scaling.max_replicas * config.replica.num_cpus + 2 * config.gateway.num_cpus
    assert round(used, 9) <= NUM_RAY_CPUS


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.npu"])
def test_images_run_unprivileged_and_report_health(name: str) -> None:
    lines = (DEPLOY / name).read_text().splitlines()
    words = [line.split(maxsplit=1) for line in lines if line and not line.startswith((" ", "#"))]
    (user,) = [rest for word, rest in words if word == "USER"]
    assert user not in ("root", "0")
    assert [word for word, _ in words].count("HEALTHCHECK") == 1
    pinned = re.search(r'"torch==([\d.]+)\.\*"', (DEPLOY.parent / "pyproject.toml").read_text())
    assert pinned is not None
    assert f"torch=={pinned[1]}." in "\n".join(lines)


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.npu"])
def test_images_give_ray_the_environment_that_local_clusters_have(name: str) -> None:
    given = dict(re.findall(r"(RAY_\w+)=(\S+)", (DEPLOY / name).read_text()))
    assert SERVING_ENVIRONMENT.items() <= given.items()
