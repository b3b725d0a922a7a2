"""Checks that an event or a wait orders what one stream, or the host, reads of another's work.

The simulated device completes every call before it returns, so it would never show a missing wait. Instead each stream
and the host keep a vector clock (Lamport 1978; Mattern 1989), which events and waits pass on. An access to memory
raises ``Race`` if the previous access is not known to be over.

The host's accesses to pinned memory cannot be watched. So the data of an asynchronous copy to it arrives only when the
host has waited, and reads as 0xff until then; and each asynchronous copy checks whether the host has changed memory
that earlier copies, not known to be over, still read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

EVENT_RECORD, EVENT_WAIT, EVENT_SYNC, STREAM_SYNC, DEVICE_SYNC = range(9, 14)
HOST = -1
FAILED = 507000  # an ACL error: the device failed while it ran a task
POISON = 0xFF

Clock = dict[int, int]


class Race(RuntimeError):
    """An access that nothing orders after the one before it."""


@dataclass(slots=True)
class _Place:
    """The last write to a piece of memory and the reads since, each as a lane and its time."""

    writer: tuple[int, int] | None = None
    readers: Clock = field(default_factory=dict)
    what: str = ""


@dataclass(slots=True)
class _State:
    clocks: dict[int, Clock] = field(default_factory=dict)  # per lane: a stream, or HOST
    events: dict[int, Clock] = field(default_factory=dict)
    places: dict[int, _Place] = field(default_factory=dict)  # by address
    # Asynchronous copies to and from pinned memory, by its address: lane, time, bytes.
    arriving: dict[int, tuple[int, int, bytes]] = field(default_factory=dict)
    departing: dict[int, tuple[int, int, bytes]] = field(default_factory=dict)


_OBSERVER = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.c_uint64, ctypes.c_uint64)
_kept: list[object] = []
_state = _State()


def observe(runtime: ctypes.CDLL, graphs: Callable[[int, int, int], None]) -> None:
    """Handle what the runtime reports; ``graphs`` handles its reports of graphs."""

    def on_call(what: int, a: int, b: int) -> int:
        try:
            (graphs if what < EVENT_RECORD else _on_order)(what, a, b)
        except Exception as error:  # exceptions cannot pass through C: torch_npu raises for the code
            runtime.simulated_npu_set_error(f"{type(error).__name__}: {error}".encode())
            return FAILED
        return 0

    callback = _OBSERVER(on_call)
    _kept.append(callback)
    runtime.simulated_npu_observe(callback)


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Where the tensors' storages begin; a view shares its base's."""
    return {t.untyped_storage().data_ptr() for t in tensors}


def operator(name: str, touched: set[int], written: set[int]) -> None:
    """An operator on the current stream accesses ``touched`` and writes ``written``, a subset of it."""
    lane = _current_lane()
    now = _tick(lane)
    for address in touched:
        _access(address, lane, now, name, writes=address in written)


def host_waits() -> None:
    """The host reads a result of the current stream, so it waits for all that is queued there."""
    lane = _current_lane()
    _tick(lane)
    _host_learns(_clock(lane))


@contextmanager
def seen_by_device(source: Tensor) -> Iterator[None]:
    """While an asynchronous copy reads pinned memory: the device sees what earlier copies, ordered before it, have
    brought there, though the host does not.
    """
    clock, start, end = _clock(_current_lane()), source.data_ptr(), source.data_ptr() + _num_bytes(source)
    arriving = [
        (address, data)
        for address, (_, _, data) in _state.arriving.items()
        if address < end and start < address + len(data)
    ]
    for address, data in arriving:
        lane, time, _ = _state.arriving[address]
        if clock.get(lane, 0) < time:
            raise Race("a copy out of pinned memory is not ordered after the copy into it")
        ctypes.memmove(address, data, len(data))
    yield
    for address, data in arriving:
        ctypes.memset(address, POISON, len(data))


def copied_to_device(source: Tensor) -> None:
    """An asynchronous copy out of pinned memory has been queued. The host must not have changed memory that earlier
    copies, not known to be over, still read."""
    for address, (_, _, data) in _state.departing.items():
        if ctypes.string_at(address, len(data)) != data:
            raise Race("the host has changed pinned memory before the copy out of it was known to be over")
    lane, address = _current_lane(), source.data_ptr()
    data = ctypes.string_at(address, _num_bytes(source))
    _state.departing[address] = (lane, _tick(lane), data)


def copied_to_host(target: Tensor) -> None:
    """An asynchronous copy into pinned memory has been queued: hide its bytes until the host has waited."""
    lane, num_bytes, start = _current_lane(), _num_bytes(target), target.data_ptr()
    now = _tick(lane)
    for address, (other, time, data) in list(_state.departing.items()):
        if address < start + num_bytes and start < address + len(data):
            if _clock(lane).get(other, 0) < time:
                raise Race("a copy into pinned memory is not ordered after the copy out of it")
            del _state.departing[address]
    _state.arriving[target.data_ptr()] = (lane, now, ctypes.string_at(target.data_ptr(), num_bytes))
    ctypes.memset(target.data_ptr(), POISON, num_bytes)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _current_lane() -> int:
    return int(torch.npu.current_stream().npu_stream)


def _clock(lane: int) -> Clock:
    return _state.clocks.setdefault(lane, {lane: 0})


def _tick(lane: int) -> int:
    """Advance the lane's time. A stream's work comes after everything that the host knew when it was queued."""
    clock = _clock(lane)
    clock[lane] += 1
    if lane != HOST:
        _join(clock, _clock(HOST))
    return clock[lane]


def _join(clock: Clock, other: Clock) -> None:
    for lane, time in other.items():
        if time > clock.get(lane, 0):
            clock[lane] = time


def _access(address: int, lane: int, now: int, what: str, *, writes: bool) -> None:
    place = _state.places.setdefault(address, _Place())
    clock = _clock(lane)
    before = [place.writer] if place.writer else []
    if writes:
        before += place.readers.items()
    for other, time in before:
        if clock.get(other, 0) < time:
            raise Race(f"{what} is not ordered after {place.what}: no event or wait between the two streams")
    if writes:
        place.writer, place.readers = (lane, now), {}
    else:
        place.readers[lane] = now
    place.what = what


def _on_order(what: int, a: int, b: int) -> None:
    if what == EVENT_RECORD:
        _tick(b)
        _state.events[a] = dict(_clock(b))
    elif what == EVENT_WAIT:
        _join(_clock(b), _state.events.get(a, {}))
    elif what == EVENT_SYNC:
        _host_learns(_state.events.get(a, {}))
    elif what == STREAM_SYNC:
        _host_learns(_clock(a))
    elif what == DEVICE_SYNC:
        for clock in list(_state.clocks.values()):
            _host_learns(clock)


def _host_learns(clock: Clock) -> None:
    host = _clock(HOST)
    _join(host, clock)
    for address, (lane, time, _) in list(_state.departing.items()):
        if host.get(lane, 0) >= time:
            del _state.departing[address]
    for address, (lane, time, data) in list(_state.arriving.items()):
        if host.get(lane, 0) >= time:
            ctypes.memmove(address, data, len(data))
            del _state.arriving[address]
