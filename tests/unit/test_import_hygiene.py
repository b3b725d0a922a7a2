"""The core stays free of torch: a fresh interpreter imports it without loading anything heavy."""

from __future__ import annotations

import json
import subprocess
import sys

LIGHT = (
    "shoal_replica.scheduler",
    "shoal_replica.engine",
    "shoal_replica.build",
    "shoal_replica.ranks.executor",
    "shoal_replica.ranks.worker",
    "shoal_cluster.chat.chats",
    "shoal_cluster.policies.routing",
    "shoal_cluster.policies.admission",
    "shoal_cluster.policies.autoscaling",
    "shoal_cluster.sim.cluster",
)
HEAVY = {"torch", "ray", "grpc", "transformers"}


def test_the_core_imports_nothing_heavy() -> None:
    program = (
        "import importlib, json, sys\n"
        f"sys.path[:0] = {[p for p in sys.path if p]!r}\n"
        f"for name in {LIGHT!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    loaded = set(json.loads(run.stdout))
    assert {"shoal_replica", "shoal_cluster"} <= loaded
    assert not loaded & HEAVY
