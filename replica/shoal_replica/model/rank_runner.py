"""A rank's model runner, connected to its peers by ``torch.distributed``: gloo between CPUs, HCCL between NPUs."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from shoal_replica.adapter import AdapterConfig
from shoal_replica.config import EngineConfig
from shoal_replica.executor import BlockPart, SchedulerOutput, StepResult, finish
from shoal_replica.memory import available_bytes
from shoal_replica.memory_advice import check_host
from shoal_replica.model.model_runner import ModelRunner
from shoal_replica.model.npu_memory import check_memory, open_device
from shoal_replica.model.parallel_group import RankGroup
from shoal_replica.ranks.runner import Rendezvous
from shoal_replica.shard import make_shard

BACKENDS = {"cpu": "gloo", "npu": "hccl"}
MEETING_TIMEOUT = timedelta(seconds=300)


class DistributedRunner:
    """One of ``config.parallel.num_ranks`` ranks. The constructor loads and warms up the model; all ranks must be
    constructed at the same time.

    Raises:
        NotFound, ConfigError: from ``ModelRunner``; ConfigError also if this host's ranks do not fit its memory.
        CollectiveError: another rank did not take part.
    """

    def __init__(self, config: EngineConfig, rank: int, meeting: Rendezvous) -> None:
        parallel = config.parallel
        if parallel.device == "cpu" and not parallel.is_one_host and rank == meeting.ranks_here[0]:
            check_host(config, available_bytes(), meeting.ranks_here)  # before any of them has allocated its memory
        shard = make_shard(config.model, parallel, rank)
        self.samples = shard.samples
        self._store = _open_store(meeting, parallel.num_ranks)
        self._join(config, rank, meeting)
        self._group = RankGroup(
            rank,
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            self._store,
            MEETING_TIMEOUT.total_seconds(),
        )
        self._runner = ModelRunner(
            config.model, config.cache, parallel, shard, self._group, config.adapters, config.scheduler.max_num_seqs
        )
        self._runner.warm_up()

    @property
    def num_collectives(self) -> int:
        return self._group.num_calls + self._group.num_exchanges

    @property
    def progress(self) -> int:
        return self._runner.progress

    @property
    def awaited_rank(self) -> int | None:
        return self._group.awaited_rank

    def load_adapter(self, adapter: AdapterConfig) -> None:
        finish(self._runner.load_adapter(adapter))

    def unload_adapter(self, name: str) -> None:
        self._runner.unload_adapter(name)

    def read_blocks(self, block_ids: Sequence[int]) -> BlockPart:
        (part,) = self._runner.read_blocks(block_ids)
        return part

    def write_blocks(self, block_ids: Sequence[int], part: BlockPart) -> None:
        self._runner.write_blocks(block_ids, (part,))

    def execute(self, output: SchedulerOutput) -> StepResult:
        return self._runner.execute(output)

    def take_sampled(self, tokens: Iterable[tuple[int, int]]) -> None:
        self._runner.take_sampled(tokens)

    def close(self) -> None:
        self._runner.close()
        dist.destroy_process_group()

    def _join(self, config: EngineConfig, rank: int, meeting: Rendezvous) -> None:
        device = config.parallel.device
        if device == "npu":
            open_device()  # imports torch_npu, which registers HCCL
            check_memory(config, rank)
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface_of(meeting.own_host))
        dist.init_process_group(
            BACKENDS[device],
            store=self._store,
            rank=rank,
            world_size=config.parallel.num_ranks,
            timeout=MEETING_TIMEOUT,
        )


def _open_store(meeting: Rendezvous, num_ranks: int) -> Any:
    """The store by which the ranks find each other; its keeper serves it on the socket that it has already opened."""
    listener: socket.socket | None = meeting.listener
    return dist.TCPStore(  # type: ignore[attr-defined]
        meeting.host,
        meeting.port,
        num_ranks,
        is_master=listener is not None,
        timeout=MEETING_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener is not None else None,
    )


def _interface_of(host: str) -> str:
    """Name of the network interface with the address ``host``; by itself, gloo would choose one by the host name."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return name
    raise RuntimeError(f"no network interface of this host has the address {host}")
