"""Serve's application-level scaling policy: one pool of replicas is sized by its load, others in proportion to it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

from ray.serve.config import AutoscalingContext

from shoal_cluster.serve.autoscaler import BlockScaling
from shoal_replica.errors import ConfigError

DeploymentID = TypeVar("DeploymentID", bound=Hashable)  # Serve's own type, opaque here


class PoolScaling:
    """Callable policy for an application's scaling deployments; ``applications[].autoscaling_policy`` names it.

    Args:
        settings: of the pool that is ``sized``: a ScaleConfig as builtins, as BlockScaling takes it.
        sized: the deployment whose count ``desired_replicas()`` decides.
        ratios: for other deployments, by name: replicas for each replica of the sized pool, rounded up. A deployment
            that is not named keeps its count.

    Raises:
        ConfigError: a ratio is not a finite number above 0, or is for the sized pool itself.
    """

    def __init__(
        self, settings: dict[str, Any], sized: str = "ReplicaServer", ratios: Mapping[str, float] | None = None
    ) -> None:
        self._sized = sized
        self._ratios = dict(ratios or {})
        for name, ratio in self._ratios.items():
            if name == sized:
                raise ConfigError(f"ratios: got one for {name!r}; it is sized by its load")
            if not (math.isfinite(ratio) and ratio > 0):
                raise ConfigError(f"ratios: got {ratio!r} for {name!r}; must be a finite number above 0")
        self._policy = BlockScaling(settings)

    def __call__(
        self, contexts: Mapping[DeploymentID, AutoscalingContext]
    ) -> tuple[dict[DeploymentID, int], dict[DeploymentID, dict[str, Any]]]:
        decisions: dict[DeploymentID, int] = {}
        by_name = {context.deployment_name: deployment_id for deployment_id, context in contexts.items()}
        if (sized := by_name.get(self._sized)) is None:
            return decisions, {}  # it is not deployed yet, or no longer: nothing to go by
        decisions[sized], _ = self._policy(contexts[sized])
        for name, ratio in self._ratios.items():
            if name in by_name:
                decisions[by_name[name]] = math.ceil(decisions[sized] * ratio - 1e-9)
        return decisions, {}
