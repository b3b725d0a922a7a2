"""What the operators of torch_npu compute, on CPU tensors, and the limits that their documentation states.

Limits are those of Atlas A2 and A3 in the documentation that the wheel carries (``torch_npu/_op_plugin_docs.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulated_npu.operators import attention, cache, elementwise, experts, quantised, sampling

REFERENCES: dict[str, Callable[..., Any]] = {
    **attention.REFERENCES,
    **cache.REFERENCES,
    **elementwise.REFERENCES,
    **experts.REFERENCES,
    **quantised.REFERENCES,
    **sampling.REFERENCES,
}
"""By name without namespace, overload included where there is one."""
