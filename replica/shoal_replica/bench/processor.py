"""How busy the machine's processors are, and a description of the machine."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16", "i8mm")


class ForeignShare:
    """The CPU time that other processes have used since this object was created, as a share of one core.

    A share of 0.2 means that one core did something else for a fifth of the time. The system counts in hundredths of a
    second, so over a few tenths of a second the share says little.

    Args:
        own_cpu_s: returns the CPU seconds that the measured process has used; those of this process are not foreign
            either.
    """

    def __init__(self, own_cpu_s: Callable[[], float]) -> None:
        self._own_cpu_s = own_cpu_s
        self._before = self._others_cpu_s()
        self._started = time.perf_counter()

    def read(self) -> float:
        return max(0.0, self._others_cpu_s() - self._before) / (time.perf_counter() - self._started)

    def _others_cpu_s(self) -> float:
        times = psutil.cpu_times()
        busy = sum(getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))
        return float(busy) - self._own_cpu_s() - time.process_time()


def usable_cores(num_threads: int) -> list[int]:
    """The first ``num_threads`` cores that this process may use, fewer if it may use fewer. Where the system has no
    affinity, cores 0 to ``num_threads`` - 1.
    """
    if not hasattr(os, "sched_getaffinity"):
        return list(range(num_threads))
    return sorted(os.sched_getaffinity(0))[:num_threads]


def describe_machine() -> dict[str, Any]:
    """What is needed to compare figures between machines: processor, its vector and matrix features, cores, memory and
    system.
    """
    fields = _cpuinfo()
    flags = fields.get("flags", fields.get("Features", "")).split()
    return {
        "processor": fields.get("model name") or platform.processor() or platform.machine(),
        "family_model": f"{fields.get('cpu family', '?')}/{fields.get('model', '?')}",
        "features": [feature for feature in FEATURES if feature in flags],
        "num_cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _cpuinfo() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return {}
    first = path.read_text(encoding="utf-8").split("\n\n")[0]
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
