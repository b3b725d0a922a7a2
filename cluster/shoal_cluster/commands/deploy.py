"""Applies a Serve YAML as ``serve deploy`` does, but checks it first and shows the progress."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from shoal_cluster.config import ClusterConfig
from shoal_cluster.serve.deployment_watch import last_error
from shoal_cluster.user_config import UserConfig
from shoal_replica.errors import ConfigError, NotFound, Unavailable, shown

GATEWAY = "Gateway"
APP_IMPORT_PATH = "shoal_cluster.serve.app:build"
DEPLOY_TIMEOUT_S = 300.0
POLL_S = 0.25
DEFAULT_DASHBOARD_URL = "http://127.0.0.1:8265"
CODE = ("import_path", "runtime_env", "args")  # of an application: if one changes, Serve replaces all its replicas
ACTOR_OPTIONS = (  # of a deployment: if one changes, Serve replaces the deployment's replicas
    "ray_actor_options",
    "placement_group_bundles",
    "placement_group_strategy",
    "placement_group_bundle_label_selector",
    "max_replicas_per_node",
    "gang_scheduling_config",
)
ROLLING_SHARE = 0.2  # of its replicas that Serve replaces at a time, unless the deployment says otherwise


def read_config(path: Path) -> tuple[dict[str, Any], ClusterConfig]:
    """Read a Serve YAML with a Shoal application, or several.

    Returns:
        The whole document, and the first such application's validated ``args``.

    Raises:
        NotFound: no such file.
        ConfigError: it cannot be read, is not YAML, has no Shoal application, the ``args`` of one or its gateway's
            ``user_config`` are invalid, or two want the same address.
    """
    if not path.is_file():
        raise NotFound(f"no file {str(path)!r}")
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    for application in _entries(document):
        if not isinstance(application, dict):
            raise ConfigError(f"{path}: applications: got {shown(application)}; each must be an object")
    configs = [_checked(application, path) for application in _applications_in(document)]
    if not configs:
        raise ConfigError(f"{path}: no application with import_path {APP_IMPORT_PATH!r}")
    taken = Counter(address for c in configs for address in (c.gateway.grpc_address, c.gateway.http_address))
    for address, count in taken.items():
        if count > 1 and not address.endswith(":0"):
            raise ConfigError(f"{path}: two gateways want {address!r}; each needs addresses of its own")
    return document, configs[0]


def _checked(application: dict[str, Any], path: Path) -> ClusterConfig:
    """Its ``args``, in which folders of adapters become whole paths: other processes run in other folders."""
    config = ClusterConfig.from_args(application["args"])
    if config.adapters:
        application["args"]["adapters"] = dict(config.adapters)
    deployments = application.get("deployments") or []
    is_list = isinstance(deployments, list)
    if not is_list or not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in deployments):
        raise ConfigError(f"{path}: deployments: got {shown(deployments)}; must be a list, each with a name")
    for deployment in deployments:
        if deployment["name"] == GATEWAY and "user_config" in deployment:  # null would not be told to gateways that run
            deployment["user_config"] = deployment["user_config"] or {}
            user_config = UserConfig.from_dict(deployment["user_config"], config)
            if user_config.adapters:
                deployment["user_config"]["adapters"] = dict(user_config.adapters)
    return config


def arguments_of(document: object) -> dict[str, Any] | None:
    """The ``args`` of the first Shoal application in a Serve document, to read or change in place; None if there is
    none.
    """
    return next((application["args"] for application in _applications_in(document)), None)


def _applications_in(document: object) -> Iterator[dict[str, Any]]:
    """The Shoal applications in a Serve document, their ``args`` filled in if missing."""
    for application in _entries(document):
        if isinstance(application, dict) and application.get("import_path") == APP_IMPORT_PATH:
            application["args"] = application.get("args") or {}
            yield application


def _entries(document: object) -> list[Any]:
    applications = document.get("applications") if isinstance(document, dict) else None
    return applications if isinstance(applications, list) else []


def deploy(document: dict[str, Any], dashboard_url: str, on_progress: Callable[[str], None]) -> None:
    """Send the document to the cluster's dashboard. Wait until every application runs and no replica is left of an
    application or deployment whose code, arguments or actor options have changed; their drain time extends the timeout.

    Raises:
        ConfigError: the cluster refused the document, or an application failed; says Shoal's own error, if there is
            one, else the last line of the reason.
        Unavailable: not done after DEPLOY_TIMEOUT_S plus the drain time, or no dashboard at ``dashboard_url``.
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
    except RuntimeError as error:  # the client raises it for HTTP errors
        raise ConfigError(last_error([str(error)])) from None
    limit_s = DEPLOY_TIMEOUT_S + drain_s
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        applications = _applications(client, dashboard_url)
        for name, application in applications.items():
            if application["status"] == "DEPLOY_FAILED":
                messages = [d["message"] for d in application["deployments"].values() if d["status"] != "HEALTHY"]
                raise ConfigError(f"{name}: {last_error([application['message'], *messages])}")
        on_progress(progress(applications, former))
        if applications and is_done(applications, former):
            return
        time.sleep(POLL_S)
    raise Unavailable(f"not done after {limit_s:g} s: {progress(applications, former)}")


def deploy_file(
    config: Annotated[Path, typer.Argument(help="Serve YAML with one or more Shoal applications.")],
    address: Annotated[
        str, typer.Option(envvar="RAY_DASHBOARD_ADDRESS", help="URL of Ray's dashboard.")
    ] = DEFAULT_DASHBOARD_URL,
) -> None:
    """Check a Serve YAML, apply it as ``serve deploy`` does, and wait until it runs and what it replaces is gone."""
    document, _ = read_config(config)
    with Console().status("deploying") as status:
        deploy(document, address, lambda progress: status.update(f"deploying: {progress}"))
    typer.echo("running")


def _applications(client: Any, dashboard_url: str) -> dict[str, Any]:
    """Serve's status of its applications, by name."""
    try:
        applications: dict[str, Any] = client.get_serve_details()["applications"]
    except (OSError, RuntimeError) as error:  # no connection, or an HTTP error
        raise Unavailable(f"the Ray dashboard at {dashboard_url} does not answer any more: {error}") from None
    return applications


def replaced(applications: Mapping[str, Any], document: Mapping[str, Any]) -> tuple[frozenset[str], float]:
    """What ``document`` replaces in ``applications``, Serve's present status.

    Returns:
        The ids of the replicas of applications that are removed or whose code or arguments change, and of deployments
        whose actor options change; and the longest that any of these deployments may take to drain, in seconds. All
        replicas of a removed application drain at once, others batch by batch.
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
    """Whether all applications run, no ``former`` replica is left, and deployments that should have replicas have one.

    Serve calls an application RUNNING even while its number of replicas changes, however many there are. A deployment
    is HEALTHY when exactly the replicas that it should have are running, in the right version; those stay.
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
    """For each deployment: how many new replicas run, how many should, and how many former ones are left."""
    parts = []
    for application in applications.values():
        for name, deployment in application["deployments"].items():
            num_left = _num_left(deployment, former)
            left = f" ({num_left} of the former version left)" if num_left else ""
            parts.append(f"{name} {_num_running(deployment, former)}/{deployment['target_num_replicas']}{left}")
    return ", ".join(parts) or "building the application"


def _code(application: Mapping[str, Any] | None) -> str:
    """The fields of CODE in canonical JSON, where tuples and lists compare equal."""
    return json.dumps([(application or {}).get(key) or {} for key in CODE], sort_keys=True)


def _options(application: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    """The actor options that the application sets explicitly for a deployment."""
    for deployment in (application or {}).get("deployments") or ():
        if isinstance(deployment, dict) and deployment.get("name") == name:
            return {key: deployment[key] for key in ACTOR_OPTIONS if key in deployment}
    return {}


def _num_batches(deployment: Mapping[str, Any]) -> int:
    """Upper bound on the number of batches in which Serve replaces the deployment's replicas. A batch is the rolling
    share of the replicas, rounded down, but at least one: no less than half the share, or each replica by itself.
    """
    share = deployment["deployment_config"].get("rolling_update_percentage") or ROLLING_SHARE
    return max(1, min(len(deployment["replicas"]), math.ceil(2 / share)))


def _num_running(deployment: Mapping[str, Any], former: Collection[str]) -> int:
    return sum(r["state"] == "RUNNING" and r["replica_id"] not in former for r in deployment["replicas"])


def _num_left(deployment: Mapping[str, Any], former: Collection[str]) -> int:
    return sum(replica["replica_id"] in former for replica in deployment["replicas"])
