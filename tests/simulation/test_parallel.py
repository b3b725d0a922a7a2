"""Runs in two processes, against the same runs in one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from threading import Thread

import msgspec
import pytest

from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.sim import parallel
from shoal_cluster.sim import run as run_module
from shoal_cluster.sim.channel import Channel
from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.config import ScalingPlan, SimConfig
from shoal_cluster.sim.conservation import check_conservation
from shoal_cluster.sim.faults import Stall
from shoal_cluster.sim.latency import StepTime
from shoal_cluster.sim.parallel import can_part, run_beside
from shoal_cluster.sim.run import report, run, simulate
from shoal_cluster.sim.workload import SimRequest, shared_prefixes
from shoal_replica.config import CacheConfig, SchedulerConfig
from shoal_replica.errors import ResourceExhausted

CONFIG = SimConfig(
    num_replicas=4,
    cache=CacheConfig(num_blocks=200, block_size=64),
    scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512, policy="deadline"),
    step_time=StepTime(decode_s=0.015625),
    hold=HoldConfig(),
)


def chats(requests_per_s: float, seed: int = 1) -> list[SimRequest]:
    return shared_prefixes(
        requests_per_s=requests_per_s,
        num_requests=200,
        num_groups=16,
        num_prefix_tokens=1024,
        num_own_tokens=100,
        num_output_tokens=20,
        seed=seed,
    )


def together(requests: list[SimRequest]) -> list[SimRequest]:
    """The requests in bursts, eight a second, so that steps end and requests arrive at the very same instants."""
    return [replace(r, arrival_s=number // 8 * 0.125) for number, r in enumerate(requests)]


def parted(config: SimConfig, requests: list[SimRequest]) -> SimCluster:
    cluster = SimCluster(config)
    for request in requests:
        cluster.arrive(request)
    run_beside(cluster)
    check_conservation(cluster)
    return cluster


@pytest.mark.parametrize("requests", [chats(8.0), chats(60.0, seed=2), together(chats(1.0))])
def test_the_report_is_that_of_one_process_byte_for_byte(requests: list[SimRequest]) -> None:
    assert report(parted(CONFIG, requests)).to_json() == simulate(CONFIG, requests).to_json()


def test_what_seems_to_have_stalled_is_handed_back_as_in_one_process() -> None:
    """A step behind a long cached document takes longer than steps of short prompts do, so these go elsewhere."""
    short = shared_prefixes(
        requests_per_s=30.0,
        num_requests=900,
        num_groups=1,
        num_prefix_tokens=0,
        num_own_tokens=300,
        num_output_tokens=4,
        seed=3,
    )
    times_s = (0.0, 815.0, 820.0, 825.0)  # the document is computed once, in 530 s, then asked about again
    long = [SimRequest(f"long-{n}", time_s, ((7, 600_000), (9 + n, 3000)), 4) for n, time_s in enumerate(times_s)]
    requests = [long[0], *(replace(r, arrival_s=800.0 + r.arrival_s) for r in short), *long[1:]]
    config = replace(
        CONFIG,
        num_replicas=2,
        cache=CacheConfig(num_blocks=4000, block_size=512),
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048, policy="deadline"),
        step_time=StepTime(),
    )
    cluster = parted(config, requests)
    assert sum(outcome.num_moves for outcome in cluster.book.outcomes.values()) > 5
    assert report(cluster).to_json() == simulate(config, requests).to_json()


def test_many_replicas_are_simulated_beside_the_gateways(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = chats(60.0)
    expected = simulate(CONFIG, requests).to_json()
    monkeypatch.setattr(parallel, "MIN_REPLICAS", 4)
    started: list[SimCluster] = []
    monkeypatch.setattr(run_module, "run_beside", lambda cluster: (started.append(cluster), run_beside(cluster)))
    cluster = run(SimCluster(CONFIG), requests)
    assert started == [cluster]
    assert report(cluster).to_json() == expected
    assert len(run(SimCluster(CONFIG), requests, is_watched=True).replicas) == 4
    assert started == [cluster]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_replicas": 3},
        {"num_gateways": 2},
        {"hold": None},
        {"faults": (Stall("replica-0000", 1.0, 2.0),)},
        {"has_shared_pool": True},
        {"feed_delay_s": 0.0},
        {"scheduler": SchedulerConfig(max_num_seqs=9, max_num_waiting=8)},
        {"scaling": ScalingPlan(config=None)},  # type: ignore[arg-type]
    ],
)
def test_where_more_passes_between_them_it_is_done_in_one(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    monkeypatch.setattr(parallel, "MIN_REPLICAS", 4)
    cluster = SimCluster(CONFIG)
    assert can_part(cluster)
    cluster = SimCluster(replace(CONFIG, **{k: v for k, v in changes.items() if k != "scaling"}))  # type: ignore[arg-type]
    cluster.config = replace(CONFIG, **changes)  # type: ignore[arg-type]
    assert not can_part(cluster)


def failing(cluster: SimCluster) -> None:
    def place(*_: object) -> None:
        raise ResourceExhausted("no place in the queue")

    for replica in cluster.replicas.values():
        replica.place = place  # type: ignore[method-assign]


def killed(cluster: SimCluster) -> None:
    def place(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for replica in cluster.replicas.values():
        replica.place = place  # type: ignore[method-assign]


def slow(cluster: SimCluster) -> None:
    """The other process has failed and is gone before the gateways send their next message."""
    failing(cluster)
    cluster.loop.at(cluster.book.requests["request-0"].arrival_s + 0.003, lambda: time.sleep(0.3))


def deaf(cluster: SimCluster) -> None:
    def hear(*_: object) -> None:
        raise KeyError("the gateway does not know it")

    cluster.hear = hear  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("break_", "error", "says"),
    [
        (failing, RuntimeError, "no place in the queue"),
        (slow, RuntimeError, "no place in the queue"),
        (killed, RuntimeError, "without a word"),
        (deaf, KeyError, "the gateway does not know it"),
    ],
)
def test_an_error_on_either_side_ends_both(
    break_: Callable[[SimCluster], None], error: type[Exception], says: str
) -> None:
    cluster = SimCluster(CONFIG)
    cluster.arrive(chats(8.0)[0])
    break_(cluster)
    with pytest.raises(error, match=says):
        run_beside(cluster)
    assert not multiprocessing.active_children()


class Bulk(msgspec.Struct):
    body: bytes


def test_two_that_send_much_at_once_do_not_wait_for_each_other() -> None:
    sides = socket.socketpair()
    channels: list[Channel[Bulk]] = [Channel(side, Bulk) for side in sides]
    messages = [Bulk(bytes([number]) * 8_000_000) for number in range(2)]
    come: dict[int, Bulk] = {}

    def talk(number: int) -> None:
        channels[number].send(messages[number])
        come[number] = channels[number].receive()

    threads = [Thread(target=talk, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert come == {0: messages[1], 1: messages[0]}
    sides[0].close()
    with pytest.raises((EOFError, ConnectionError)):
        channels[1].receive()
    sides[1].close()
