"""Steps of a replica that only decodes, taken together as one event in simulated time."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from shoal_cluster.sim import replica as sim_replica
from shoal_cluster.sim.event_loop import EventLoop
from shoal_cluster.sim.latency import StepTime
from shoal_cluster.sim.replica import FeedMessage, SimReplica
from shoal_replica.config import CacheConfig, SchedulerConfig
from shoal_replica.stats import ReplicaStats
from shoal_replica.testing import make_request


def told_with_two(arrival_s: float) -> tuple[float, ReplicaStats]:
    """When a decoding replica first reports a second request, due 1.9 s after its arrival, and that report."""
    loop = EventLoop()
    told: list[tuple[float, ReplicaStats]] = []

    def hear(_: SimReplica, message: FeedMessage) -> None:
        if message.stats is not None and "second" in message.added:
            told.append((loop.now, message.stats))

    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=256, policy="deadline")
    replica = SimReplica("a", loop, scheduler, CacheConfig(num_blocks=20, block_size=64), StepTime(decode_s=0.1), hear)
    first = make_request("first", range(20), max_tokens=40)
    second = make_request("second", range(100, 150), arrival_s=arrival_s, due_s=arrival_s + 1.9)
    loop.at(0.0, lambda: replica.add(first))
    loop.at(arrival_s, lambda: replica.add(second))
    loop.run()
    (one,) = told
    return one


@pytest.mark.parametrize("arrival_s", [1.05, 1.15, 1.35])
def test_what_comes_during_a_stretch_is_told_of_as_it_is_between_steps(
    monkeypatch: pytest.MonkeyPatch, arrival_s: float
) -> None:
    told = told_with_two(arrival_s)
    monkeypatch.setattr(sim_replica, "MAX_STRETCH_S", 0.0)
    told_s, stats = told_with_two(arrival_s)
    assert told == (pytest.approx(told_s), replace(stats, time_s=told[1].time_s, busy_s=told[1].busy_s))
    assert stats.due_tokens[:3] == (0, 50, 50)
