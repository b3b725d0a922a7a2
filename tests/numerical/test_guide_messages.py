"""The NPU guide quotes messages of the product. The limits behind them need torch, so this is not a light test."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import shoal_replica
from shoal_kernels import npu_limits
from shoal_replica.errors import ConfigError
from shoal_replica.memory_plan import GIB, MemoryPlan

DEPLOY = Path(__file__).parents[2] / "deploy"
ROOT = Path(shoal_replica.__file__).parent


def test_the_ten_commonest_failures_say_what_the_guide_quotes() -> None:
    """Checks our own messages, as they are raised or as the source has them; the others come from the runtime."""
    table = (DEPLOY / "README.md").read_text().partition("### The ten commonest failures")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 10
    quoted = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    attention = npu_limits.AttentionShape(
        dtype=torch.bfloat16,
        num_heads=4,
        num_kv_heads=2,
        head_size=128,
        block_size=128,
        num_blocks=8,
        sliding_window=None,
    )
    refused = [
        npu_limits.refusal(replace(attention, **wrong))
        for wrong in ({"block_size": 16}, {"dtype": torch.float32}, {"head_size": 20})
    ]
    plan = MemoryPlan(
        device="npu", dtype="bfloat16", usable=9 * GIB, weights=GIB, activations=0, communication=0, graphs=0,
        block=GIB, num_blocks=9,
    )  # fmt: skip
    for weights, changes in ((1, []), (9, [("tensor_parallel_size=2", plan)])):
        with pytest.raises(ConfigError) as caught:
            replace(plan, weights=weights * GIB).check(changes)
        refused.append(str(caught.value))
    for message in refused:
        assert message is not None
        assert any(re.match(".*".join(map(re.escape, q.split("…"))), message) for q in quoted), message
    source = "".join((ROOT / name).read_text() for name in ("build.py", "model/npu_memory.py", "model/npu_decoder.py"))
    source = re.sub(r'"\s+f?"', "", source)
    for message in (
        "device: 'npu' needs torch_npu (the extra shoal[npu]) and CANN: ",
        "device: no NPU is visible to this process",
        "num_blocks: must be given, or device_memory_gib, for several NPU ranks",
        "decodes or fewer, such steps run without: ",
    ):
        assert message in source
        assert any(message in q for q in quoted), message
