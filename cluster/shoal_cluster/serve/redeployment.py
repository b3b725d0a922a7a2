"""How many replicas an application starts with: as many as it has, where it is deployed anew with other arguments.

Serve begins each deployment with ``initial_replicas``, and if that is fewer than run, it stops the others at once. Left
unset, a first deployment would begin with none, and be called running before there is a replica.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve._private.common import REPLICA_ID_FULL_ID_STR_PREFIX
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.util import list_named_actors

from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.autoscaling_view import ScaleRecord
from shoal_cluster.serve.ray_store import RayStore
from shoal_cluster.serve.scaling_board import ScalingBoard
from shoal_cluster.serve.serve_details import serve_details_now
from shoal_replica.errors import Unavailable

logger = logging.getLogger("ray.serve")


def first_count(args: Mapping[str, Any], settings: ScaleConfig) -> int:
    """The number of replicas to start with, for the application that Serve builds from ``args`` now.

    A first deployment starts with ``settings.min_replicas``, and so does what cannot be found out.
    """
    if not ray.is_initialized():
        return settings.min_replicas
    try:
        name = application_built_from(args, serve_details_now())
        actors = [row["name"] for row in list_named_actors(all_namespaces=True) if row["namespace"] == SERVE_NAMESPACE]
        if name is None or not is_there(name, actors):
            return settings.min_replicas
        return kept_count(ScalingBoard(name, RayStore()).current(), settings)
    except (Unavailable, RayError) as error:
        logger.warning("starting with min_replicas (%d): %s", settings.min_replicas, error)
        return settings.min_replicas


def application_built_from(args: Mapping[str, Any], details: Mapping[str, Any]) -> str | None:
    """The only application in Serve's ``details`` that is being deployed from ``args``; None if there is none, or more.

    Serve does not tell a builder for which application it builds, but has the arguments in its details by then.
    """
    wanted = _canonical(args)
    names = [
        name
        for name, application in details["applications"].items()
        if application["status"] == "DEPLOYING"
        and _canonical((application["deployed_app_config"] or {}).get("args") or {}) == wanted
    ]
    return names[0] if len(names) == 1 else None


def is_there(application: str, actors: Iterable[str]) -> bool:
    """Whether any of Serve's ``actors`` is a gateway or a replica of ``application``. While Serve builds the new
    version, its details leave out what runs of the former.
    """
    return any(actor.startswith(f"{REPLICA_ID_FULL_ID_STR_PREFIX}{application}#") for actor in actors)


def kept_count(decided: ScaleRecord | None, settings: ScaleConfig) -> int:
    """As many replicas as the autoscaler last ``decided`` on, but no fewer than ``settings`` ask for. Whether they are
    too many it says within a second: it knows what ``user_config`` and ``shoal tune`` have set.
    """
    return max(settings.min_replicas, 0 if decided is None else decided.num_after)


def _canonical(args: Mapping[str, Any]) -> str:
    return json.dumps(args, sort_keys=True, default=str)
