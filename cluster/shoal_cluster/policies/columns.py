"""What is known of the replicas, in arrays: what each has told, and what decisions go by, promises counted in."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from shoal_replica.stats import DUE_WITHIN_S, ReplicaStats

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Phase = Literal["", "prefill", "decode"]
"""Of a request's life: its prompt is computed, or what follows; "" for both."""
PHASES: tuple[Phase, ...] = get_args(Phase)

COUNTS = (  # of ReplicaStats, under the same names in ``Candidates.told``
    "block_size",
    "num_total_blocks",
    "num_free_blocks",
    "num_cached_blocks",
    "num_running",
    "num_waiting",
    "num_waiting_tokens",
    "max_num_seqs",
    "max_num_batched_tokens",
    "step_s",
    "token_s",
    "draining",
    "by_due",
)
DERIVED = ("num_open_blocks", "num_open_slots")  # free ones, less what the replica's own queue will take
DUE = tuple(f"num_due_tokens_{place}" for place in range(len(DUE_WITHIN_S)))
"""Tokens to compute before a newcomer that is due within each of ``DUE_WITHIN_S``."""
TOLD = np.dtype(
    [
        ("connected", "?"),
        ("known", "?"),
        ("stalled", "?"),
        ("slower", "i8"),
        *(
            (name, {"step_s": "f8", "token_s": "f8", "draining": "?", "by_due": "?"}.get(name, "i8"))
            for name in (*COUNTS, *DERIVED, *DUE)
        ),
    ]
)
"""What is known of one replica: the gateway's own ``ReplicaState``, then what the replica has told of itself."""
_DRAINING, _OPEN_BLOCKS, _OPEN_SLOTS, _DUE_AT_ONCE = map(list(TOLD.names or ()).index, ("draining", *DERIVED, DUE[0]))
PROMISED = ("num_reserved", "num_reserved_blocks", "num_reserved_tokens")
RESERVED, RESERVED_BLOCKS, RESERVED_TOKENS = range(len(PROMISED))
STANDING = ("capacity", "load", "sequences", "room", "open_blocks", "open_slots", "urgent", "slower")
"""What a decision goes by, what was told and promised taken together. In this order: blocks of the largest request that
the replica accepts, -1 if it accepts none; prompt tokens to compute before a newcomer; sequences that decode there or
soon will; free blocks for a newcomer, -1 without a free slot; the same whether or not there is a slot; free slots;
tokens to compute before a newcomer that is due at once; by how many per cent the replica's compute takes longer than
the fastest's.
"""
CAPACITY, LOAD, SEQUENCES, ROOM, OPEN_BLOCKS, OPEN_SLOTS, URGENT, SLOWER = range(
    len(PROMISED), len(PROMISED) + len(STANDING)
)
PER_CENT = 0.01
_counts_of = attrgetter(*COUNTS)


def due_column(due_in_s: float) -> str:
    """The column of ``DUE`` for a newcomer that is due in ``due_in_s`` seconds."""
    return DUE[bisect_left(DUE_WITHIN_S, due_in_s)]


class ReplicaState(NamedTuple):
    """What the gateway itself finds out about a replica, as in ``ReplicaView``."""

    connected: bool = False
    stalled: bool = False
    slowness: float = 1.0
    role: Phase = ""


UNKNOWN = ReplicaState()


def told_row(stats: ReplicaStats | None, state: ReplicaState) -> tuple[Any, ...]:
    """One element of ``Candidates.told``, as of ``TOLD``."""
    connected, stalled, slowness, _ = state
    slower = round((slowness - 1.0) / PER_CENT)
    if stats is None:  # all 0, but 1 for what others divide by
        return (
            connected,
            False,
            stalled,
            slower,
            *(int(name in ("block_size", "max_num_batched_tokens")) for name in (*COUNTS, *DERIVED, *DUE)),
        )
    # A queued prompt's blocks still count as free: they are taken, all at once, when its first step is scheduled.
    num_queued_blocks = -(-stats.num_waiting_tokens // stats.block_size) if stats.num_waiting else 0
    num_open_blocks = stats.num_free_blocks - num_queued_blocks
    num_open_slots = stats.max_num_seqs - stats.num_running - stats.num_waiting
    due = stats.due_tokens if len(stats.due_tokens) == len(DUE) else (stats.num_waiting_tokens,) * len(DUE)
    return (connected, True, stalled, slower, *_counts_of(stats), num_open_blocks, num_open_slots, *due)


def column(row: Sequence[Any], promised: Iterable[int]) -> tuple[int, ...]:
    """One of ``Candidates.columns``, for a ``told_row`` and the requests, blocks and tokens promised there."""
    num_reserved, num_blocks, num_tokens = promised
    connected, known, stalled, slower, _, num_total_blocks, _, _, num_running, num_waiting, num_waiting_tokens, *_ = row
    open_blocks, open_slots = row[_OPEN_BLOCKS] - num_blocks, row[_OPEN_SLOTS] - num_reserved
    return (
        num_reserved,
        num_blocks,
        num_tokens,
        num_total_blocks if connected and known and not (stalled or row[_DRAINING]) else -1,
        num_waiting_tokens + num_tokens,
        num_running + num_waiting + num_reserved,
        open_blocks if open_slots > 0 else -1,
        open_blocks,
        open_slots,
        row[_DUE_AT_ONCE] + num_tokens,
        slower,
    )


def promise(columns: Ints, place: int, num_requests: int, num_blocks: int, num_tokens: int) -> None:
    """Count that many more requests, blocks and tokens as promised to the replica at ``place``; fewer if negative."""
    reserved, blocks, tokens, capacity, load, sequences, _, open_blocks, open_slots, urgent, slower = columns[
        :, place
    ].tolist()
    open_blocks, open_slots = open_blocks - num_blocks, open_slots - num_requests
    columns[:, place] = (
        reserved + num_requests,
        blocks + num_blocks,
        tokens + num_tokens,
        capacity,
        load + num_tokens,
        sequences + num_requests,
        open_blocks if open_slots > 0 else -1,
        open_blocks,
        open_slots,
        urgent + num_tokens,
        slower,
    )


def unknown_columns(count: int) -> Ints:
    """``columns`` of ``count`` replicas that have told nothing, with nothing promised."""
    columns: Ints = np.empty((len(PROMISED) + len(STANDING), count), np.int64)
    columns[:] = np.array([column(told_row(None, UNKNOWN), (0, 0, 0))]).T
    return columns
