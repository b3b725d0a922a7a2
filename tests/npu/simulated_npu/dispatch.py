"""Puts a CPU kernel behind every operator for which torch_npu has an NPU kernel.

``aten`` operators run on CPU tensors that share the NPU tensors' memory. ``npu`` and ``atb`` operators run the
references of ``operators``; one without a reference raises. Where torch_npu has a Meta kernel for an operator, the
shapes and dtypes that it promises must be those that the reference returned.
"""

from __future__ import annotations

import ctypes
import itertools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from simulated_npu import graphs, ordering
from simulated_npu.memory import alias, is_npu, map_tensors, to_npu
from simulated_npu.operators import REFERENCES

Kernel = Callable[..., Any]

# Allocation, metadata and storage: torch_npu's own C++ does these on the simulated runtime.
OWN_KERNELS = {
    "_pin_memory", "_reshape_alias", "as_strided", "empty.memory_format", "empty_like", "empty_strided", "is_pinned",
    "is_set_to", "new_empty_strided", "record_stream", "resize_", "resize_as_", "set_", "set_.source_Storage",
    "set_.source_Storage_storage_offset", "set_.source_Tensor", "squeeze", "squeeze.dim", "unfold", "unsqueeze", "view",
    "view_as_complex", "view_as_real",
}  # fmt: skip
HOST_READS = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select"}
NAMESPACES = ("aten", "npu", "atb")

calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
"""Name and arguments (shapes for tensors) of every npu and atb call; tests read and clear it."""

_libraries: list[torch.library.Library] = []
_generators: dict[tuple[int, int], torch.Generator] = {}
_promises: dict[Any, list[tuple[tuple[int, ...], torch.dtype]] | None] = {}


def register() -> None:
    """Replace the NPU kernels. Once per process, after torch_npu has been imported."""
    libraries = {namespace: torch.library.Library(namespace, "IMPL") for namespace in NAMESPACES}
    _libraries.extend(libraries.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in torch._C._dispatch_get_all_op_names():
            namespace, _, rest = name.partition("::")
            if namespace not in libraries or not torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1"):
                continue
            kernel = _kernel_for(namespace, rest)
            if kernel is not None:
                libraries[namespace].impl(rest, kernel, "PrivateUse1", allow_override=True)


def _kernel_for(namespace: str, rest: str) -> Kernel | None:
    """The replacement; None where torch_npu's own kernel stays."""
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    operator = getattr(packet, overload or "default", None)
    if operator is None or (namespace == "aten" and rest in OWN_KERNELS) or base.endswith("_infer_output"):
        return None
    if namespace == "aten":
        return _Wrapped(operator, operator)
    reference = REFERENCES.get(rest)
    return _missing(f"{namespace}::{rest}") if reference is None else _Wrapped(operator, reference)


def _missing(name: str) -> Kernel:
    def kernel(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"the simulated NPU has no reference for {name}")

    return kernel


class _Wrapped:
    """Runs ``compute`` on CPU aliases of the arguments and makes NPU tensors of what is new in its results."""

    def __init__(self, operator: Any, compute: Kernel) -> None:
        schema = operator._schema
        self._operator = operator
        self._compute = compute
        self._name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        self._is_aten = schema.name.startswith("aten::")
        self._arguments = [a.name for a in schema.arguments]
        self._positional = [a.name for a in schema.arguments if not a.kwarg_only]
        self._written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        writes = {s: a.name for a in schema.arguments if a.name in self._written for s in a.alias_info.before_set}
        self._returned = [
            next((writes[s] for s in r.alias_info.before_set if s in writes), None) if r.alias_info else None
            for r in schema.returns
        ]  # per result: the argument that it is, if any
        self._has_meta = torch._C._dispatch_has_kernel_for_dispatch_key(self._name, "Meta") and not self._is_aten

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = dict(zip(self._arguments, args, strict=False)) | kwargs
        on_device = [t for value in bound.values() for t in _tensors(value) if is_npu(t)]
        device = on_device[0].device if on_device else _named_device(bound)
        to_host = any(isinstance(v, torch.device) and v.type == "cpu" for v in bound.values())
        if not self._is_aten:
            calls.append((self._name, _shapes(args), {k: _shapes(v) for k, v in kwargs.items()}))
        if graphs.is_capturing():
            self._check_capture(bound, to_host)
        promise = self._promise(args, kwargs) if self._has_meta else None
        aliases = {k: map_tensors(v, _to_host_value) for k, v in bound.items()}
        given = aliases
        if graphs.is_recording():
            # Nothing runs now. Only the results' shapes are needed: they come from copies, and from zeros in place of
            # what the graph itself will have produced.
            given = {k: map_tensors(v, _zeros_if_unknown) for k, v in aliases.items()}
            result = self._run({k: _copies(v) if k in self._written else v for k, v in given.items()})
        else:
            written = [t for k in self._written for t in _tensors(bound.get(k)) if is_npu(t)]
            ordering.operator(self._name, ordering.addresses(on_device), ordering.addresses(written))
            with self._pinned_source(bound):
                result = self._run(aliases)
            self._order_host(bound, to_host)
        outputs, fresh = self._outputs(result, bound, given, device if not to_host else None)
        if promise is not None and not graphs.state.is_updating:
            _compare(self._name, promise, outputs)
        if graphs.is_recording():
            # By address, as on a device: a graph keeps none of its tensors alive.
            targets = {place: alias(tensor) for place, tensor in fresh.items()}
            touched = ordering.addresses([*on_device, *fresh.values()])
            written = ordering.addresses([t for k in self._written for t in _tensors(bound.get(k)) if is_npu(t)])
            graphs.record(lambda: self._replay(aliases, targets, touched, written))
            if graphs.is_capturing():
                _take_value([*targets.values()])
                graphs.state.unknown |= written | ordering.addresses(fresh.values())
        return None if not self._returned else outputs[0] if len(self._returned) == 1 else tuple(outputs)

    def _run(self, arguments: dict[str, Any]) -> Any:
        positional = list(itertools.takewhile(lambda name: name in arguments, self._positional))
        keywords = {k: v for k, v in arguments.items() if k not in positional}
        if keywords.get("pin_memory"):
            keywords["pin_memory"] = False
        with torch.inference_mode():  # a replay may come from anywhere, on tensors made in this mode
            return self._compute(*(arguments[name] for name in positional), **keywords)

    @torch.inference_mode()
    def _replay(
        self, aliases: dict[str, Any], targets: dict[int, Tensor], touched: set[int], written: set[int]
    ) -> None:
        ordering.operator(self._name, touched, written)
        results = _tensors(self._run(aliases))
        for place, target in targets.items():
            target.copy_(results[place])

    def _outputs(
        self, result: Any, bound: dict[str, Any], aliases: dict[str, Any], device: torch.device | None
    ) -> tuple[list[Any], dict[int, Tensor]]:
        """Results as the caller sees them, and the new tensors among them by their place."""
        inputs = {a.untyped_storage().data_ptr(): t for k, v in aliases.items() for a, t in _pairs(v, bound[k])}
        fresh: dict[int, Tensor] = {}
        places = itertools.count()

        def wrap(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            place = next(places)
            source = inputs.get(value.untyped_storage().data_ptr()) if value.numel() else None
            if device is None:
                return value
            if source is not None and source.dtype == value.dtype:  # a view of an argument
                return source.as_strided(value.shape, value.stride(), value.storage_offset())
            fresh[place] = to_npu(value, device)
            return fresh[place]

        if not self._returned:
            return [], fresh
        outputs: list[Any] = []
        for value, name in zip([result] if len(self._returned) == 1 else result, self._returned, strict=True):
            if name is None:
                outputs.append(map_tensors(value, wrap))
                continue
            next(places)
            target = bound[name]
            if is_npu(target) and target.shape != value.shape:  # out= of another size
                target.resize_(value.shape)
                alias(target).copy_(value)
            outputs.append(target)
        return outputs, fresh

    def _check_capture(self, bound: dict[str, Any], to_host: bool) -> None:
        """A device cannot wait for the host, nor the host for it, while a graph is captured."""
        if self._name == "aten::_local_scalar_dense" or to_host:
            raise RuntimeError(f"{self._name}: the host reads the device while a graph is captured")
        if self._name in ("aten::copy_", "aten::_to_copy"):
            source = bound.get("src", bound.get("self"))
            if isinstance(source, Tensor) and source.device.type == "cpu":
                raise RuntimeError(f"{self._name}: the host writes to the device while a graph is captured")

    def _pinned_source(self, bound: dict[str, Any]) -> AbstractContextManager[None]:
        source = bound.get("src")
        if self._name == "aten::copy_" and isinstance(source, Tensor) and not is_npu(source) and source.is_pinned():
            return ordering.seen_by_device(source)
        return nullcontext()

    def _order_host(self, bound: dict[str, Any], to_host: bool) -> None:
        """Copies between host and device are asynchronous from and to pinned memory if asked; else the host waits."""
        source, target = bound.get("src"), bound.get("self")
        if self._name != "aten::copy_" or not isinstance(source, Tensor) or not isinstance(target, Tensor):
            if to_host or self._name in HOST_READS:
                ordering.host_waits()
        elif bound.get("non_blocking") and source.device.type == "cpu" and source.is_pinned():
            ordering.copied_to_device(source)
        elif bound.get("non_blocking") and target.device.type == "cpu" and target.is_pinned():
            ordering.copied_to_host(target)
        elif target.device.type == "cpu":
            ordering.host_waits()

    def _promise(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[tuple[int, ...], torch.dtype]] | None:
        """Shapes and dtypes of the results by torch_npu's Meta kernel; None where it cannot be called like this."""
        key = (self._name, str(_shapes(args)), str(_shapes(tuple(kwargs.items()))))
        if key not in _promises:
            on_meta = {k: map_tensors(v, _to_meta) for k, v in kwargs.items()}
            try:
                made = self._operator(*map_tensors(args, _to_meta), **on_meta)
            except TypeError:  # some Meta kernels are written in Python without the schema's defaults
                _promises[key] = None
            else:
                _promises[key] = [(tuple(t.shape), t.dtype) for t in _tensors(made)]
        return _promises[key]


def _compare(name: str, promise: list[tuple[tuple[int, ...], torch.dtype]], outputs: list[Any]) -> None:
    made = [(tuple(t.shape), t.dtype) for t in _tensors(outputs)]
    if made != promise:
        raise AssertionError(f"{name}: the reference returned {made}, torch_npu's Meta kernel promises {promise}")


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors(item)]
    return []


def _pairs(aliased: Any, original: Any) -> list[tuple[Tensor, Tensor]]:
    return [(a, t) for a, t in zip(_tensors(aliased), _tensors(original), strict=True) if is_npu(t) and a.numel()]


def _zeros_if_unknown(value: Any) -> Any:
    """Zeros, which any operator takes, in the same layout in place of what has no value while a graph is captured."""
    if not isinstance(value, Tensor) or value.untyped_storage().data_ptr() not in graphs.state.unknown:
        return value
    zeros = torch.zeros(value.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=value.dtype).set_(zeros, value.storage_offset(), value.shape, value.stride())


def _take_value(tensors: Sequence[Tensor]) -> None:
    """Fill them like memory that was never written."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        ctypes.memset(storage.data_ptr(), ordering.POISON, storage.nbytes())


def _copies(value: Any) -> Any:
    return map_tensors(value, lambda v: v.clone() if isinstance(v, Tensor) else v)


def _shapes(value: Any) -> Any:
    return map_tensors(value, lambda v: (tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v)


def _named_device(bound: dict[str, Any]) -> torch.device | None:
    return next((v for v in bound.values() if isinstance(v, torch.device) and v.type == "npu"), None)


def _to_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _to_host_value(value: Any) -> Any:
    """What a CPU kernel gets in place of an argument."""
    if is_npu(value):
        return alias(value)
    if isinstance(value, torch.device) and value.type == "npu":
        return torch.device("cpu")
    if isinstance(value, torch.Generator) and value.device.type == "npu":
        key = (id(value), value.initial_seed())
        return _generators.setdefault(key, torch.Generator().manual_seed(value.initial_seed()))
    return value
