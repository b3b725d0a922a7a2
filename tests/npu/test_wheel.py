"""These tests run on the real torch_npu, and our calls fit its schemas, old and new."""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

SCHEMAS = json.loads((Path(__file__).parent / "schemas.json").read_text())


def test_the_wheel_is_the_real_one(why_not: str | None) -> None:
    if why_not is not None:
        pytest.skip(why_not)
    import torch
    import torch_npu

    assert torch_npu.__version__.startswith("2.13.")
    assert torch.npu.is_available()
    assert torch.npu.get_device_name(0).startswith("Ascend910B")
    # Hundreds of operators, with their schemas, out of the wheel's own libraries.
    registered = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("npu::")]
    assert len(registered) > 350


@pytest.mark.parametrize("version", SCHEMAS)
def test_operators_are_there_in_every_version(version: str) -> None:
    """The schemas were recorded from each wheel; see ``record_schemas.py``."""
    from shoal_kernels import npu_limits

    operators = SCHEMAS[version]
    for name, wanted in {**npu_limits.REQUIRED, **npu_limits.EXPERTS, **npu_limits.INT8}.items():
        assert name in operators, name
        assert set(wanted) <= set(operators[name]), name


def test_all_that_is_called_is_checked_at_the_start() -> None:
    """By name, as the calls in the source have it; what is called only where it is there needs no check."""
    from shoal_kernels import npu_limits

    called: defaultdict[str, set[str]] = defaultdict(set)
    for path in Path(npu_limits.__file__).parent.glob("npu*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch_npu.npu_"):
                name = ast.unparse(node.func).removeprefix("torch_npu.")
                called[name] |= {keyword.arg for keyword in node.keywords if keyword.arg}
    checked = {**npu_limits.REQUIRED, **npu_limits.EXPERTS, **npu_limits.INT8}
    assert called.pop("npu_mrope")
    assert called.keys() == checked.keys()
    for name, passed in called.items():
        assert passed <= set(checked[name]), name


def test_the_installed_schemas_are_those_recorded(why_not: str | None) -> None:
    if why_not is not None:
        pytest.skip(why_not)
    import torch

    recorded: dict[str, list[str]] = SCHEMAS["2.13.0"]
    for name, arguments in recorded.items():
        assert [a.name for a in getattr(torch.ops.npu, name).default._schema.arguments] == arguments


def test_what_is_missing_is_named(why_not: str | None) -> None:
    if why_not is not None:
        pytest.skip(why_not)
    import torch

    from shoal_kernels import npu_limits

    required = {**npu_limits.REQUIRED, **npu_limits.EXPERTS, **npu_limits.INT8}
    assert npu_limits.missing_operators(torch.ops.npu, required) == []
    wanted: dict[str, Any] = {"npu_swiglu": ("dim", "beta"), "npu_no_such_operator": ()}
    assert npu_limits.missing_operators(torch.ops.npu, wanted) == ["npu_swiglu(beta=)", "npu_no_such_operator"]
