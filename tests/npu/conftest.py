"""Puts the simulated NPU in place, in this process and in those that tests start, before anything imports torch."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import warnings
from pathlib import Path

import pytest

HERE = Path(__file__).parent
WHEEL = Path(os.environ.get("SIMULATED_NPU_WHEEL") or Path(sys.prefix) / "npu-wheel")


def _why_not() -> str | None:
    if not (WHEEL / "torch_npu").is_dir():
        return f"no torch_npu in {WHEEL}; `make npu-wheel` installs it"
    if any(shutil.which(tool) is None for tool in ("gcc", "nm")):
        return "gcc and nm are needed to build the simulated runtime"
    if "torch" in sys.modules or not any(HERE.name in argument for argument in sys.argv[1:]):
        return "these tests need a process of their own: pytest tests/npu"
    return None


REASON = _why_not()


def _install() -> None:
    paths = [str(HERE / "site"), str(HERE)]
    sys.path[:0] = paths
    # Ray's workers and ranks get these by PYTHONPATH; site/sitecustomize.py does there what this does here.
    inherited = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *([inherited] if inherited else [])])
    os.environ["SIMULATED_NPU_WHEEL"] = str(WHEEL)
    spec = importlib.util.find_spec("simulated_npu.loading")
    assert spec is not None
    from simulated_npu.loading import install_on_import

    install_on_import()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import torch_npu  # noqa: F401
    torch.set_num_threads(1)


if REASON is None:
    _install()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without a device only the test that says why is collected."""
    if REASON is not None and collection_path.name.startswith("test_") and collection_path.name != "test_wheel.py":
        return True
    return None


@pytest.fixture(scope="session")
def why_not() -> str | None:
    return REASON
