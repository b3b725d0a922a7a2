"""Makes ``import torch_npu`` load the stand-in libraries first and put the reference kernels in place afterwards."""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from simulated_npu.build import LIBRARIES, build

PACKAGE = "torch_npu"
DEFAULT_CACHE = Path.home() / ".cache" / "shoal" / "simulated_npu"


def install_on_import() -> None:
    """From now on ``import torch_npu`` brings the simulated device. To be called before anything imports torch."""
    wheel = os.environ["SIMULATED_NPU_WHEEL"]
    # Without this, `import torch` imports torch_npu in every process that can see the wheel.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    os.environ.setdefault("TASK_QUEUE_ENABLE", "0")  # operators run on the calling thread
    if wheel not in sys.path:
        sys.path.append(wheel)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch_npu as the other finders would, and wraps its loader."""

    _is_asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != PACKAGE or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(PACKAGE)
        finally:
            self._is_asking = False
        if spec is None or spec.origin is None or spec.loader is None:
            raise ImportError(f"no {PACKAGE} in {os.environ['SIMULATED_NPU_WHEEL']}")
        spec.loader = _Loader(spec.loader, Path(spec.origin).parent)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, real: importlib.abc.Loader, wheel: Path) -> None:
        self._real = real
        self._wheel = wheel

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        loaded = load_libraries(self._wheel)
        warnings.filterwarnings("ignore", message=".*internal format.*")
        warnings.filterwarnings("ignore", message="Failed to find this aclrt")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch_npu")
        self._real.exec_module(module)
        from simulated_npu import dispatch, graphs, ordering

        ordering.observe(loaded["libascendcl.so"], graphs.observe)
        graphs.record_collectives(loaded["libhccl.so"])
        dispatch.register()


def load_libraries(wheel: Path) -> dict[str, ctypes.CDLL]:
    """Load the stand-ins so that torch_npu's own libraries find them by name."""
    folder = build(wheel, Path(os.environ.get("SIMULATED_NPU_CACHE", DEFAULT_CACHE)))
    return {name: ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL) for name in LIBRARIES}
