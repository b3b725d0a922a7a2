"""Memory, streams, graphs and collectives: our helpers on the simulated device, and mistakes that it must catch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch_npu
from paged_steps import NPU, TOLERANCE, make_step, randn
from simulated_npu import graphs
from simulated_npu.ordering import POISON, Race

from shoal_kernels import ops
from shoal_kernels.metadata import AttentionMetadata
from shoal_kernels.npu_graph import StepGraph, memory_info
from shoal_kernels.npu_swap import BlockSwap

MIB = 2**20
SCALE = 128**-0.5


def test_memory_is_counted_and_runs_out() -> None:
    free, total = memory_info()
    assert total == 1024 * MIB
    held = torch.empty(64 * MIB, dtype=torch.int8, device=NPU)
    assert memory_info()[0] <= free - 60 * MIB
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 4\.00 GiB"):
        torch.empty(4096 * MIB, dtype=torch.int8, device=NPU)
    del held
    torch_npu.npu.empty_cache()
    assert memory_info()[0] >= free


def test_what_was_never_written_reads_as_nan() -> None:
    """This shows padded rows and skipped writes, which zeros would hide."""
    torch_npu.npu.empty_cache()
    assert torch.empty(5000, dtype=torch.float32, device=NPU).isnan().all()


def test_blocks_go_to_host_memory_and_come_back() -> None:
    """More blocks than the staging tensors hold, to rows that are not adjacent, and one of them out again."""
    blocks = [randn(12, 128, 2, 16, seed=seed) for seed in range(2)]
    caches = [tensor.to(NPU) for tensor in blocks]
    swap = BlockSwap(caches, num_rows=9, num_at_once=2)
    swap.move_out([(3, 4), (7, 0), (1, 5), (5, 8), (2, 6)])
    for cache in caches:
        cache.zero_()  # after the gather, so that it does no harm
    swap.move_in([(5, 2), (0, 9)])
    swap.move_out([(2, 0)])  # over a row that has just been read
    swap.move_in([(0, 11), (4, 0), (8, 10), (6, 4)])
    sources = {2: 1, 9: 7, 11: 1, 0: 3, 10: 5, 4: 2}
    for cache, expected in zip(caches, blocks, strict=True):
        actual = cache.cpu()
        for block in range(12):
            assert torch.equal(actual[block], expected[sources[block]] if block in sources else torch.zeros(128, 2, 16))


def test_what_is_copied_to_pinned_memory_is_not_there_before_it_is_waited_for() -> None:
    host = torch.zeros(4, 16, dtype=torch.int8, pin_memory=True)
    host.copy_(torch.ones(4, 16, dtype=torch.int8, device=NPU), non_blocking=True)
    assert set(host.flatten().view(torch.uint8).tolist()) == {POISON}
    other = torch_npu.npu.Stream()
    with torch_npu.npu.stream(other), pytest.raises(Race, match="is not ordered after the copy into it"):
        torch.empty(4, 16, dtype=torch.int8, device=NPU).copy_(host, non_blocking=True)
    torch_npu.npu.synchronize()
    assert set(host.flatten().tolist()) == {1}


def test_a_missing_wait_between_streams_is_a_race() -> None:
    x, other = torch.zeros(8, device=NPU), torch_npu.npu.Stream()
    x.add_(1)
    with torch_npu.npu.stream(other), pytest.raises(Race, match=r"aten::mul.* is not ordered after aten::add_"):
        x.mul(2)
    other.wait_stream(torch_npu.npu.current_stream())
    with torch_npu.npu.stream(other):
        assert x.mul(2).cpu().tolist() == [2.0] * 8


def test_pinned_memory_is_not_filled_again_before_its_copy_is_over() -> None:
    host, x = torch.zeros(8, dtype=torch.int32).pin_memory(), torch.zeros(8, dtype=torch.int32, device=NPU)
    x.copy_(host, non_blocking=True)
    host.fill_(1)
    with pytest.raises(Race, match="the host has changed pinned memory before"):
        x.copy_(host, non_blocking=True)
    torch_npu.npu.synchronize()
    x.copy_(host, non_blocking=True)


def test_a_captured_step_is_replayed_with_other_lengths() -> None:
    """Attention of a captured decode uses the lengths and the queries of the replay."""
    paged = make_step([(6, 1), (129, 1)])
    q, keys, values, metadata = paged.on_npu()
    captured = AttentionMetadata(
        query_start_loc=metadata.query_start_loc,
        seq_lens=[1, 1],
        block_tables=metadata.block_tables,
        slot_mapping=metadata.slot_mapping,
    )
    inputs = torch.zeros_like(q)

    def run() -> torch.Tensor:
        return ops.paged_attention(inputs, keys, values, captured, SCALE) * 2

    run()
    graph = StepGraph(run)
    inputs.copy_(q)
    out = graph.replay(metadata.seq_lens)
    torch.testing.assert_close(out.cpu().float(), paged.expected(SCALE) * 2, atol=2 * TOLERANCE, rtol=2 * TOLERANCE)
    shorter = replace(paged, q=paged.q.flip(0), metadata=replace(paged.metadata, seq_lens=[7, 100]))
    inputs.copy_(q.flip(0))
    again = graph.replay([7, 100])
    assert again.data_ptr() == out.data_ptr()
    torch.testing.assert_close(again.cpu().float(), shorter.expected(SCALE) * 2, atol=2 * TOLERANCE, rtol=2 * TOLERANCE)
    graph.close()


def test_capturing_runs_nothing() -> None:
    x = torch.zeros(4, device=NPU)
    graph = StepGraph(lambda: x.add_(1))
    assert x.cpu().tolist() == [0.0] * 4
    graph._graph.replay()
    graph._graph.replay()
    assert x.cpu().tolist() == [2.0] * 4
    graph.close()


@pytest.mark.parametrize("what", ["item", "cpu", "tensor"])
def test_host_and_device_do_not_wait_for_each_other_in_a_graph(what: str) -> None:
    x = torch.ones(4, device=NPU)
    touch = {
        "item": lambda: x.sum().item(),
        "cpu": lambda: x.cpu(),
        "tensor": lambda: x.copy_(torch.zeros(4)),
    }[what]
    with pytest.raises(RuntimeError, match="while a graph is captured"):
        StepGraph(touch)  # type: ignore[arg-type]
    assert not graphs.is_capturing()


def start_ranks(devices: str) -> list[subprocess.Popen[bytes]]:
    """Two processes that try every collective, one on each of ``devices``."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name("collective_rank.py"))]
    return [
        subprocess.Popen(
            [*command, str(rank), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"ASCEND_RT_VISIBLE_DEVICES": device, "HCCL_CONNECT_TIMEOUT": "120"},
        )
        for rank, device in enumerate(devices)
    ]


def test_two_ranks_on_one_device_are_refused() -> None:
    ranks = start_ranks("00")
    for process, (_, error) in [(rank, rank.communicate(timeout=120)) for rank in ranks]:
        assert process.returncode == 1
        assert b"call hccl api failed" in error


def test_hccl_collectives_of_two_processes() -> None:
    """torch_npu's own process group: every collective of the engine, and those of pipelines and experts."""
    for rank, process in enumerate(start_ranks("01")):
        said, _ = process.communicate(timeout=120)
        assert json.loads(said.splitlines()[-1]) == {
            "backend": "ProcessGroupHCCL",
            "sum": [3.0] * 5,
            "large": 2.0 * 600_000,
            "gather": [7.0, 7.0, 8.0, 8.0],
            "scatter": [[0.0, 2.0], [4.0, 6.0]][rank],
            "broadcast": [0.0, 1.0, 2.0],
            "all to all": [[0.0, 10.0], [1.0, 11.0]][rank],
            "received": 9.0 * 40_000,
        }
