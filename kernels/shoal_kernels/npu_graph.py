"""Steps captured once as graphs and replayed with a single call, so that the host keeps up with small batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch_npu
from torch import Tensor


class StepGraph:
    """What ``run`` does, captured as a graph over the tensors that it uses. Capturing executes nothing.

    ``run`` must read changing inputs from fixed tensors, and must have run once before, so that everything created on
    first use exists. Attention lengths are host integers and are set before each replay.

    Args:
        pool: memory shared by graphs that are never replayed at the same time; None creates one.
    """

    def __init__(self, run: Callable[[], Tensor], pool: Any = None) -> None:
        self._graph = torch_npu.npu.NPUGraph()
        with torch_npu.npu.graph(self._graph, pool=pool, auto_dispatch_capture=True):
            self._output = run()

    @property
    def pool(self) -> Any:
        return self._graph.pool()

    def replay(self, seq_lens: Sequence[int]) -> Tensor:
        """Run it with these lengths. Returns the same tensor each time, valid until the pool's next replay."""
        self._graph.update(cpu_update_input=[{"actual_seq_lengths_kv": list(seq_lens)}])
        self._graph.replay()
        return self._output

    def close(self) -> None:
        self._graph.reset()


def memory_info() -> tuple[int, int]:
    """Free and total bytes of the current device."""
    free, total = torch_npu.npu.mem_get_info()
    return int(free), int(total)
