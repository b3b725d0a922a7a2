"""Graph capture, replay and update, as lists of recorded calls.

As on a device, nothing runs while a graph is captured: the results of its calls have no value until the graph is
replayed. A replay repeats the calls on the captured addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field

Thunk = Callable[[], None]

CAPTURE_BEGIN, CAPTURE_END, REPLAY, GRAPH_DESTROY, GROUP_BEGIN, GROUP_END, UPDATE_BEGIN, UPDATE_END = range(1, 9)


@dataclass(slots=True)
class _State:
    """A graph is a list of groups; a call outside any task group is a group of its own that cannot be updated."""

    graphs: dict[int, list[list[Thunk]]] = field(default_factory=dict)
    groups: dict[int, list[Thunk]] = field(default_factory=dict)
    capturing: list[list[Thunk]] | None = None
    open_group: list[Thunk] | None = None  # of a capture or of an update
    is_updating: bool = False
    unknown: set[int] = field(default_factory=set)  # addresses that calls of the graph being captured write
    num_replays: int = 0


class _Collective(ctypes.Structure):
    """``call_t`` of collectives.c."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "dtype", "op")),
        ("root", ctypes.c_uint32),
        ("send", ctypes.c_void_p),
        ("receive", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("communicator", ctypes.c_void_p),
    )


state = _State()
_kept: list[object] = []


def is_capturing() -> bool:
    return state.capturing is not None


def is_recording() -> bool:
    """Whether calls are noted down for later and have no effect now."""
    return state.capturing is not None or state.is_updating


def record(thunk: Thunk) -> None:
    if state.open_group is not None:
        state.open_group.append(thunk)
    elif state.capturing is not None:
        state.capturing.append([thunk])


def observe(what: int, a: int, b: int) -> None:
    """Handle what the runtime reports of graphs; see ``runtime.c`` for a and b."""
    if what == CAPTURE_BEGIN:
        state.capturing = state.graphs[b] = []
        state.unknown.clear()
    elif what == CAPTURE_END:
        state.capturing = state.open_group = None
    elif what == REPLAY:
        state.num_replays += 1
        for group in state.graphs[a]:
            for thunk in group:
                thunk()
    elif what == GRAPH_DESTROY:
        gone = state.graphs.pop(a, [])
        state.groups = {k: group for k, group in state.groups.items() if not any(group is g for g in gone)}
    elif what == GROUP_BEGIN and state.capturing is not None:
        state.open_group = state.groups[b] = []
        state.capturing.append(state.open_group)
    elif what == UPDATE_BEGIN:
        state.is_updating = True
        state.open_group = state.groups[b]
        state.open_group.clear()
    elif what in (GROUP_END, UPDATE_END):
        state.open_group = None
        state.is_updating = False


def record_collectives(hccl: ctypes.CDLL) -> None:
    """From now on, a collective called while a graph is captured becomes part of the graph."""

    def on_capture(address: int) -> None:
        call = _Collective.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(_Collective)))

        def run() -> None:
            status = hccl.simulated_hccl_run(ctypes.byref(call))
            if status:
                raise RuntimeError(f"a collective of a graph failed with {status}")

        record(run)

    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(on_capture)
    _kept.append(callback)
    hccl.simulated_hccl_on_capture(callback)
