"""Applying a Serve YAML the way ``serve deploy`` does, with the mistakes found first and the wait made visible."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import typer
import yaml
from rich.console import Console

from shoal_cluster.config import ClusterConfig
from shoal_cluster.serve.deployment_watch import error_line
from shoal_cluster.user_config import UserConfig
from shoal_replica.errors import ConfigError, NotFound, Unavailable

GATEWAY = "Gateway"
APP_IMPORT_PATH = "shoal_cluster.serve.app:build"
DEPLOY_TIMEOUT_S = 300.0
POLL_S = 0.25
DEFAULT_DASHBOARD_URL = "http://127.0.0.1:8265"
CODE = ("import_path", "runtime_env", "args")  # of an application: where they change, Serve replaces all replicas
ACTOR_OPTIONS = (  # of a deployment: where they change, Serve replaces its replicas
    "ray_actor_options",
    "placement_group_bundles",
    "placement_group_strategy",
    "placement_group_bundle_label_selector",
    "max_replicas_per_node",
    "gang_scheduling_config",
)
ROLLING_SHARE = 0.2  # of its replicas that Serve replaces at a time, where a deployment does not say


def read_config(path: Path) -> tuple[dict[str, Any], ClusterConfig]:
    """Read a Serve YAML with one Shoal application.

    Returns:
        the whole document, and the application's arguments.

    Raises:
        NotFound: no such file.
        ConfigError: it is not YAML, holds no Shoal application, or its ``args`` or the gateway's ``user_config`` are
            wrong.
    """
    if not path.is_file():
        raise NotFound(f"no file {str(path)!r}")
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    application = _application(document)
    if application is None:
        raise ConfigError(f"{path}: no application with import_path {APP_IMPORT_PATH!r}")
    config = ClusterConfig.from_args(application["args"])
    for deployment in application.get("deployments") or ():
        if isinstance(deployment, dict) and deployment.get("name") == GATEWAY:
            UserConfig.from_dict(deployment.get("user_config") or {}, config)
    return document, config


def arguments_of(document: object) -> dict[str, Any] | None:
    """The ``args`` of the Shoal application in a Serve document, to be read or changed; None where there is none."""
    application = _application(document)
    return None if application is None else application["args"]


def _application(document: object) -> dict[str, Any] | None:
    """Shoal's in a Serve document, with ``args`` that may be empty."""
    applications = document.get("applications") if isinstance(document, dict) else None
    for application in applications if isinstance(applications, list) else ():
        if isinstance(application, dict) and application.get("import_path") == APP_IMPORT_PATH:
            application["args"] = application.get("args") or {}
            return cast("dict[str, Any]", application)
    return None


def deploy(document: dict[str, Any], dashboard_url: str, on_progress: Callable[[str], None]) -> None:
    """Send the document to the cluster's dashboard; wait until every application runs and no replica of what it was
    before, if its code, arguments or actors' options have changed, is left. Those have their time to drain on top.

    Raises:
        ConfigError: the cluster refused it; the last line of its reason.
        Unavailable: not so after DEPLOY_TIMEOUT_S, or no dashboard at ``dashboard_url``.
    """
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient  # heavy

    try:
        client = ServeSubmissionClient(dashboard_url)
        former, drain_s = replaced(_applications(client, dashboard_url), document)
        client.deploy_applications(document)
    except ConnectionError:
        raise Unavailable(f"no Ray dashboard at {dashboard_url}") from None
    except ValueError as error:
        raise ConfigError(f"address: {dashboard_url!r} is not a dashboard's, as http://HOST:8265 is: {error}") from None
    except RuntimeError as error:  # what the client makes of an HTTP error
        raise ConfigError(error_line([str(error)])) from None
    limit_s = DEPLOY_TIMEOUT_S + drain_s
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        applications = _applications(client, dashboard_url)
        for name, application in applications.items():
            if application["status"] == "DEPLOY_FAILED":
                messages = [d["message"] for d in application["deployments"].values() if d["status"] != "HEALTHY"]
                raise ConfigError(f"{name}: {error_line([application['message'], *messages])}")
        on_progress(progress(applications, former))
        if applications and is_done(applications, former):
            return
        time.sleep(POLL_S)
    raise Unavailable(f"not done after {limit_s:g} s: {progress(applications, former)}")


def deploy_file(
    config: Annotated[Path, typer.Argument(help="a Serve YAML with one Shoal application")],
    address: Annotated[
        str, typer.Option(envvar="RAY_DASHBOARD_ADDRESS", help="the cluster's dashboard")
    ] = DEFAULT_DASHBOARD_URL,
) -> None:
    """Check a Serve YAML, apply it as ``serve deploy`` does, and wait until it alone runs."""
    document, _ = read_config(config)
    with Console().status("deploying") as status:
        deploy(document, address, lambda progress: status.update(f"deploying: {progress}"))
    typer.echo("running")


def _applications(client: Any, dashboard_url: str) -> dict[str, Any]:
    """What Serve says of its applications, by name."""
    try:
        applications: dict[str, Any] = client.get_serve_details()["applications"]
    except (OSError, RuntimeError) as error:  # no connection, or an HTTP error
        raise Unavailable(f"the Ray dashboard at {dashboard_url} does not answer any more: {error}") from None
    return applications


def replaced(applications: Mapping[str, Any], document: Mapping[str, Any]) -> tuple[frozenset[str], float]:
    """What of ``applications``, as Serve tells them, gives way to ``document``: ids of the replicas of those that go or
    whose code or arguments change, and of deployments whose actors' options do; and the longest that any of these
    takes to drain, in seconds: all replicas of an application that goes at once, others batch by batch.
    """
    ids: set[str] = set()
    drain_s = 0.0
    wanted = {application.get("name", "default"): application for application in document["applications"]}
    for application, present in applications.items():
        after, before = wanted.get(application), present["deployed_app_config"]
        for name, deployment in present["deployments"].items():
            if after and _code(after) == _code(before) and _options(after, name) == _options(before, name):
                continue
            ids.update(replica["replica_id"] for replica in deployment["replicas"])
            num_batches = _num_batches(deployment) if after else 1
            one_s = deployment["deployment_config"].get("graceful_shutdown_timeout_s") or 0.0
            drain_s = max(drain_s, num_batches * one_s)
    return frozenset(ids), drain_s


def is_done(applications: Mapping[str, Any], former: Collection[str]) -> bool:
    """Whether all run, no replica of ``former`` is left, and a deployment that should have replicas has one.

    Serve calls an application running while the count of its replicas changes, whatever there is of them. A deployment
    is healthy when just those that it should have run, and of the version that it should: what is there then stays.
    """
    return all(application["status"] == "RUNNING" for application in applications.values()) and all(
        deployment["status"] == "HEALTHY"
        or (
            (not deployment["target_num_replicas"] or _num_running(deployment, former))
            and not _num_left(deployment, former)
        )
        for application in applications.values()
        for deployment in application["deployments"].values()
    )


def progress(applications: Mapping[str, Any], former: Collection[str]) -> str:
    """Each deployment with its replicas that run, those that should, and those that have yet to go."""
    parts = []
    for application in applications.values():
        for name, deployment in application["deployments"].items():
            num_left = _num_left(deployment, former)
            left = f" ({num_left} of the former version left)" if num_left else ""
            parts.append(f"{name} {_num_running(deployment, former)}/{deployment['target_num_replicas']}{left}")
    return ", ".join(parts) or "building the application"


def _code(application: Mapping[str, Any] | None) -> str:
    """As it is sent: a tuple is a list there."""
    return json.dumps([(application or {}).get(key) or {} for key in CODE], sort_keys=True)


def _options(application: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    """Those of a deployment's actors that are written out."""
    for deployment in (application or {}).get("deployments") or ():
        if deployment["name"] == name:
            return {key: deployment[key] for key in ACTOR_OPTIONS if key in deployment}
    return {}


def _num_batches(deployment: Mapping[str, Any]) -> int:
    """At most, in which Serve replaces its replicas one after the other. A batch is the share of them, rounded down, or
    one: no fewer than half the share, or each replica by itself.
    """
    share = deployment["deployment_config"].get("rolling_update_percentage") or ROLLING_SHARE
    return max(1, min(len(deployment["replicas"]), math.ceil(2 / share)))


def _num_running(deployment: Mapping[str, Any], former: Collection[str]) -> int:
    return sum(r["state"] == "RUNNING" and r["replica_id"] not in former for r in deployment["replicas"])


def _num_left(deployment: Mapping[str, Any], former: Collection[str]) -> int:
    return sum(replica["replica_id"] in former for replica in deployment["replicas"])
