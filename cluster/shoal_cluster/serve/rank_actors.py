"""Ranks as Ray actors, each in its own bundle of the replica's placement group. Ray places and ends them; steps travel
over the channel of ``shoal_replica.ranks``."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from shoal_cluster.config import ReplicaSettings
from shoal_replica.ranks.channel import RankAddress
from shoal_replica.ranks.launcher import LOOPBACK, RankProcess

FIRST_RANK_BUNDLE = 1  # the replica's own process has bundle 0
DEVICE_RESOURCES: dict[str, dict[str, float]] = {"cpu": {}, "npu": {"NPU": 1}}


def replica_bundles(settings: ReplicaSettings) -> list[dict[str, float]]:
    """The resources that a replica of several ranks requests: one bundle for its engine, then one per rank."""
    rank = {"CPU": settings.num_cpus} | DEVICE_RESOURCES[settings.device]
    return [{"CPU": settings.engine_num_cpus} | settings.resources, *([rank] * settings.parallel_config().num_ranks)]


class RankActor:
    """The process of one rank. ``serve`` returns when the rank has ended."""

    def pid(self) -> int:
        return os.getpid()

    def serve(self, address: RankAddress, is_one_node: bool) -> None:
        from shoal_replica.model.rank_runner import DistributedRunner
        from shoal_replica.ranks.worker import serve_rank

        host = LOOPBACK if is_one_node else ray.util.get_node_ip_address()
        serve_rank(msgspec.structs.replace(address, rank_host=host), DistributedRunner)


class RayRanks:
    """Starts ranks in the bundles of ``group``. Ray alone decides which devices a rank sees."""

    def __init__(self, settings: ReplicaSettings, group: PlacementGroup) -> None:
        self._settings = settings
        self._group = group
        self._is_one_node = settings.placement_strategy == "STRICT_PACK"

    @property
    def host(self) -> str:
        """The engine's address for its ranks: loopback if all of them are on one node."""
        return LOOPBACK if self._is_one_node else str(ray.util.get_node_ip_address())

    def launch(self, rank: int, port: int, key: str) -> RankProcess:
        bundle = FIRST_RANK_BUNDLE + rank
        actor = ray.remote(RankActor).options(
            num_cpus=self._settings.num_cpus,
            resources=DEVICE_RESOURCES[self._settings.device],
            max_restarts=0,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(self._settings.num_threads)}},  # besides the replica's own
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle),
        )
        handle = actor.remote()
        address = RankAddress(self.host, port, key, rank, rank_host="")
        pid = handle.pid.remote() if self._is_one_node else None
        return _ActorProcess(handle, handle.serve.remote(address, self._is_one_node), pid)


class _ActorProcess:
    """An actor, the pending result of its ``serve`` and, if it is on this node, that of its ``pid``."""

    def __init__(self, actor: Any, end: Any, pid: Any) -> None:
        self._actor = actor
        self._end = end
        self._pid = pid

    def exit_reason(self, timeout_s: float) -> str | None:
        try:
            ray.get(self._end, timeout=timeout_s)
        except GetTimeoutError:
            return None
        except RayActorError as error:
            return str(error).strip().splitlines()[-1]
        except RayTaskError as error:
            return f"{type(error.cause).__name__}: {error.cause}"
        return "ended"

    def kill(self) -> None:
        if self._pid is not None and self.exit_reason(0.0) is None:
            # Ray asks the process to end, and would wait some seconds for one that is suspended.
            with suppress(GetTimeoutError, RayActorError, ProcessLookupError):
                os.kill(ray.get(self._pid, timeout=0.0), signal.SIGKILL)
        ray.kill(self._actor)
