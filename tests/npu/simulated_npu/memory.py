"""The same memory as a CPU tensor and as an NPU tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")


def alias(tensor: Tensor) -> Tensor:
    """A CPU tensor over the memory of an NPU tensor; valid while that one lives."""
    storage = tensor.untyped_storage()
    view = torch.empty(0, dtype=tensor.dtype)
    if storage.nbytes() == 0:
        return view.as_strided(tensor.shape, tensor.stride()) if tensor.numel() == 0 else view
    same = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, storage.nbytes())
    return view.set_(same, tensor.storage_offset(), tensor.shape, tensor.stride())


def to_npu(tensor: Tensor, device: torch.device) -> Tensor:
    """A new NPU tensor with the numbers and strides of a CPU tensor."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        alias(made).copy_(tensor)
    return made


def is_npu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "npu"


def map_tensors(value: Any, function: Any) -> Any:
    """``value`` with ``function`` applied to it, or to its items where it is a list or tuple."""
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, function) for item in value)
    return function(value)
