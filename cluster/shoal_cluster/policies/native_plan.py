"""Plans natively: what ``plan`` otherwise does request by request with numpy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import addressof, byref, c_char, c_double, c_int, c_int64, c_void_p
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import DUE, TOLD, Ints
from shoal_cluster.policies.considered import Assignment, Considered
from shoal_cluster.policies.native_library import check_structs, library
from shoal_cluster.policies.outlook import Outlook
from shoal_cluster.policies.ranking import is_allowed
from shoal_cluster.policies.route_query import PRICED_STEPS
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.policies.wishes import PlacedWish
from shoal_replica.stats import DUE_WITHIN_S

NOTHING = np.zeros(0, np.int64)
Array = TypeVar("Array", Ints, NDArray[np.bool_], NDArray[np.void])


class CTold(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("row_bytes", "known", "num_running", "step_s")),
        *((name, c_int64) for name in ("step_tokens", "by_due", "dues", "num_dues")),
        ("due_within_s", c_void_p),
    )


class CCluster(ctypes.Structure):
    _fields_ = (
        ("num_replicas", c_int64),
        ("priced_steps", c_int64),
        *((name, c_double) for name in ("now", "prefill_price", "decode_price", "max_steps_ahead", "patience")),
        ("told", c_void_p),
        ("layout", c_void_p),
    )


class COutlook(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("num_startable", "num_idle", "least_capacity", "most_room")),
        ("wait_s", c_double),
    )


class CWish(ctypes.Structure):
    _fields_ = tuple(
        (name, c_int64) for name in ("place", "num_blocks", "num_tokens", "num_cached_blocks", "decode_steps")
    )


class CHeld(ctypes.Structure):
    _fields_ = (
        *((name, c_double) for name in ("due_s", "objective_s", "spared")),
        *(
            (name, c_int64)
            for name in (
                "num_tokens",
                "num_blocks_needed",
                "num_known_blocks",
                "block_size",
                "decode_steps",
                "num_replicas",
                "num_before",
            )
        ),
        *((name, c_void_p) for name in ("matched", "passed", "excluded", "before")),
    )


check_structs(CTold, CCluster, COutlook, CWish, CHeld)


def _offset(name: str) -> int:
    assert TOLD.fields is not None
    return TOLD.fields[name][1]


_dues_s = (c_double * len(DUE))(*DUE_WITHIN_S)
_layout = CTold(
    TOLD.itemsize,
    *map(_offset, ("known", "num_running", "step_s", "max_num_batched_tokens", "by_due", DUE[0])),
    len(DUE),
    addressof(_dues_s),
)
_may_start, _outlook, _numbers = c_int(), COutlook(), (c_int64 * 64)()
_last_told: tuple[NDArray[np.void], int] = np.zeros(0, TOLD), 0


class NativePlan:
    """The part of a plan that is native, for one snapshot. For one thread at a time."""

    def __init__(self, snapshot: Candidates, weights: RouteWeights, max_steps_ahead: float) -> None:
        self._snapshot, self._told = snapshot, snapshot.told
        self._passed: tuple[tuple[tuple[str, int], ...], Ints] = (), NOTHING
        self._cluster = CCluster(
            len(snapshot),
            PRICED_STEPS,
            snapshot.now,
            weights.prefill_price,
            weights.decode_price,
            max_steps_ahead,
            0.0,  # the patience, which each call of ``until_startable`` sets
            _address_of_told(self._told),
            addressof(_layout),
        )

    def outlook(self, columns: Ints, token_s: float) -> Outlook:
        """See ``Plan.outlook``."""
        assert library is not None
        library.shoal_outlook(byref(self._cluster), _address(columns), token_s, byref(_outlook))
        num_startable, num_idle = _outlook.num_startable, _outlook.num_idle
        return Outlook(num_startable, num_idle, _outlook.least_capacity, _outlook.most_room, _outlook.wait_s)

    def until_startable(
        self, columns: Ints, considered: Sequence[Considered], patience: float, plans_all: bool
    ) -> tuple[list[Assignment], bool]:
        """See ``Plan.until_startable``. What is given away is counted into ``columns``."""
        assert library is not None
        count = len(considered)
        held = b"".join([one.packed or self._pack(one) for one in considered])
        decided = _decisions(count)
        self._cluster.patience = patience
        num_planned = library.shoal_plan(
            byref(self._cluster), _address(columns), held, count, plans_all, decided, byref(_may_start)
        )
        if num_planned == -1:
            raise MemoryError("no memory to plan held requests")
        if num_planned < 0:
            raise ValueError(f"matched: must be of {len(self._snapshot)} replicas")
        numbers = decided[: 2 * num_planned]
        return list(zip(numbers[::2], numbers[1::2], strict=True)), bool(_may_start.value)

    def _pack(self, one: Considered) -> bytes:
        """``one`` as a ``ShoalHeld``. It keeps that, and the arrays that it refers to, for the next look."""
        query = one.query
        matched = np.ascontiguousarray(one.matched, np.int64)
        passed, excluded, before = None, None, None
        if query.passed:
            passed = self._passed_by(query.passed)
        if query.is_restricted:
            excluded = ~is_allowed(query, self._snapshot)
        if one.before:
            before = (CWish * len(one.before))(*map(_wish, one.before))
        one.packed = bytes(
            CHeld(
                one.due_s,
                one.objective_s,
                query.spared,
                query.num_prompt_tokens,
                query.num_blocks_needed,
                query.num_known_blocks,
                query.block_size,
                query.decode_steps,
                matched.size,
                len(one.before),
                _address(matched),
                None if passed is None else _address(passed),
                None if excluded is None else _address(excluded),
                None if before is None else addressof(before),
            )
        )
        one.referred = matched, passed, excluded, before
        return one.packed

    def _passed_by(self, passed: tuple[tuple[str, int], ...]) -> Ints:
        """``RouteQuery.passed`` of each replica [n]; requests share it."""
        if passed is not self._passed[0]:
            by_id = dict(passed)
            self._passed = passed, np.array([by_id.get(name, 0) for name in self._snapshot.replica_ids], np.int64)
        return self._passed[1]


def _wish(placed: PlacedWish) -> CWish:
    wish = placed.wish
    return CWish(placed.place, wish.num_blocks, wish.num_tokens, wish.num_cached_blocks, wish.decode_steps)


def _decisions(count: int) -> ctypes.Array[c_int64]:
    """Memory for so many decisions. It is used again."""
    global _numbers
    if len(_numbers) < 2 * count:
        _numbers = (c_int64 * (2 * count))()
    return _numbers


def _address_of_told(told: NDArray[np.void]) -> int:
    """``_address``, which takes microseconds for an array of records. A view keeps one array until members change."""
    global _last_told
    if told is not _last_told[0]:
        _last_told = told, _address(told)
    return _last_told[1]


def _address(array: Array) -> int:
    return addressof(c_char.from_buffer(array.data)) if array.size else 0
