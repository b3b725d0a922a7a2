"""Applying a Serve YAML the way ``serve deploy`` does, with the mistakes found first and the wait made visible."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast

import typer
import yaml
from rich.console import Console

from shoal_cluster.config import ClusterConfig
from shoal_replica.errors import ConfigError, NotFound, Unavailable

APP_IMPORT_PATH = "shoal_cluster.serve.app:build"
DEPLOY_TIMEOUT_S = 300.0
POLL_S = 0.25
DEFAULT_DASHBOARD_URL = "http://127.0.0.1:8265"
OUR_ERROR = re.compile(r"^shoal_replica\.errors\.\w+: ")


def read_config(path: Path) -> tuple[dict[str, Any], ClusterConfig]:
    """Read a Serve YAML with one Shoal application.

    Returns:
        the whole document, and the application's arguments.

    Raises:
        NotFound: no such file.
        ConfigError: it is not YAML, holds no Shoal application, or its ``args`` are wrong.
    """
    if not path.is_file():
        raise NotFound(f"no file {str(path)!r}")
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    arguments = arguments_of(document)
    if arguments is None:
        raise ConfigError(f"{path}: no application with import_path {APP_IMPORT_PATH!r}")
    return document, ClusterConfig.from_args(arguments)


def arguments_of(document: object) -> dict[str, Any] | None:
    """The ``args`` of the Shoal application in a Serve document, to be read or changed; None where there is none."""
    applications = document.get("applications") if isinstance(document, dict) else None
    for application in applications if isinstance(applications, list) else ():
        if isinstance(application, dict) and application.get("import_path") == APP_IMPORT_PATH:
            application["args"] = application.get("args") or {}
            return cast("dict[str, Any]", application["args"])
    return None


def deploy(document: dict[str, Any], dashboard_url: str, on_progress: Callable[[str], None]) -> None:
    """Send the document to the cluster's dashboard and wait until every application runs.

    Raises:
        ConfigError: the cluster refused it; the last line of its reason.
        Unavailable: not running after DEPLOY_TIMEOUT_S, or no dashboard at ``dashboard_url``.
    """
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient  # heavy

    try:
        client = ServeSubmissionClient(dashboard_url)
        client.deploy_applications(document)
    except ConnectionError:
        raise Unavailable(f"no Ray dashboard at {dashboard_url}") from None
    except RuntimeError as error:  # what the client makes of an HTTP error
        raise ConfigError(_reason([str(error)])) from None
    deadline = time.monotonic() + DEPLOY_TIMEOUT_S
    while time.monotonic() < deadline:
        applications = _applications(client, dashboard_url)
        for name, application in applications.items():
            if application["status"] == "DEPLOY_FAILED":
                messages = [d["message"] for d in application["deployments"].values() if d["status"] != "HEALTHY"]
                raise ConfigError(f"{name}: {_reason([application['message'], *messages])}")
        on_progress(_progress(applications))
        if applications and all(a["status"] == "RUNNING" for a in applications.values()):
            return
        time.sleep(POLL_S)
    raise Unavailable(f"not running after {DEPLOY_TIMEOUT_S:g} s: {_progress(applications)}")


def deploy_file(
    config: Annotated[Path, typer.Argument(help="a Serve YAML with one Shoal application")],
    address: Annotated[
        str, typer.Option(envvar="RAY_DASHBOARD_ADDRESS", help="the cluster's dashboard")
    ] = DEFAULT_DASHBOARD_URL,
) -> None:
    """Check a Serve YAML, apply it as ``serve deploy`` does, and wait until it runs."""
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


def _progress(applications: dict[str, Any]) -> str:
    parts = []
    for application in applications.values():
        for name, deployment in application["deployments"].items():
            running = sum(1 for r in deployment["replicas"] if r["state"] == "RUNNING")
            parts.append(f"{name} {running}/{deployment['target_num_replicas']}")
    return ", ".join(parts) or "building the application"


def _reason(messages: list[str]) -> str:
    """The error itself, without the tracebacks around it: ours if there is one, else the last line."""
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    ours = [line for line in lines if OUR_ERROR.match(line)]
    return OUR_ERROR.sub("", (ours or lines or ["no reason given"])[-1])
