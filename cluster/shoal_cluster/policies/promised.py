"""A snapshot's columns with what a plan has given away since: what the next request sees."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import CAPACITY, URGENT, Ints, promise, promise_many
from shoal_cluster.policies.given import Given
from shoal_cluster.policies.steps_ahead import StepsAhead

Bools = NDArray[np.bool_]
NOBODY = np.zeros(0, np.bool_)
FEW = 4  # fewer promises are counted in one by one, which is faster
FEW_PLACES = 16  # fewer replicas are looked at one by one, likewise


class Promised:
    """Promises beyond those of a snapshot. Owned by a plan.

    A replica is open if it may start something by the snapshot, startable if it still may with all promises.

    Args:
        steps_ahead: decides whether a replica may start something.

    Attributes:
        is_untouched: nothing is promised beyond the snapshot.
    """

    def __init__(self, snapshot: Candidates, steps_ahead: StepsAhead) -> None:
        self.snapshot = snapshot
        self.is_untouched = True
        self._steps_ahead = steps_ahead
        self._columns = snapshot.columns
        self._owed: dict[int, Given] = {}  # by place: promises still to be counted in
        self._open: Bools | None = None  # computed on first use, then kept up to date
        self._startable: Bools = NOBODY  # likewise
        self._num_open = self._num_startable = 0

    @property
    def columns(self) -> Ints:
        """``Candidates.columns`` with all promises counted in."""
        if self._owed:
            self._count_owed()
        return self._columns

    @property
    def num_open(self) -> int:
        """How many replicas may start something, by the snapshot."""
        self._count_open()
        return self._num_open

    @property
    def num_startable(self) -> int:
        """How many replicas may still start something, if it is urgent."""
        if self._owed:
            self._count_owed()
        self._count_open()
        return self._num_startable

    @property
    def has_startable(self) -> bool:
        """Whether any replica is startable."""
        self._count_open()
        return self._num_startable > len(self._owed) or self.num_startable > 0  # each one owed takes away one at most

    def is_open(self, place: int) -> bool:
        """Whether the replica at ``place`` may start something, by the snapshot."""
        return self._is_open(self.snapshot.columns, place)

    def may_start(self) -> Bools:
        """Which replicas may start something, by the snapshot [n]."""
        return self._may_all_start(self.snapshot.columns)

    def add(self, place: int, num_blocks: int, num_tokens: int) -> None:
        """Promise room at ``place`` to one more request."""
        if self._owed:
            self._count_owed()
        self._own()
        promise(self._columns, place, 1, num_blocks, num_tokens)
        if self._open is not None:
            is_startable = self._is_open(self._columns, place)
            self._num_startable += is_startable - self._startable.item(place)
            self._startable[place] = is_startable

    def add_later(self, given: Given) -> None:
        """Promise its room to ``given``. It is counted in when next needed: together with others that is faster."""
        if given.place in self._owed:
            self._count_owed()
        self._own()
        self._owed[given.place] = given

    def renew(self, snapshot: Candidates) -> None:
        """Go on from another snapshot; the caller has to ``reset`` the replicas that differ."""
        self.snapshot = snapshot
        if self.is_untouched:
            self._columns, self._open = snapshot.columns, None

    def clear(self) -> None:
        """Take all promises back."""
        self._owed.clear()
        self.is_untouched, self._columns = True, self.snapshot.columns
        if self._open is not None:
            self._startable, self._num_startable = self._open.copy(), self._num_open

    def reset(self, places: Collection[int], given: Iterable[Given]) -> None:
        """Rebuild the columns at ``places``: the snapshot's, and the promises of what is ``given`` there."""
        if not places:
            return
        columns, by_snapshot = self.columns, self.snapshot.columns
        if not self.is_untouched:
            if len(places) < FEW_PLACES:
                for place in places:
                    columns[:, place] = by_snapshot[:, place]
            else:
                at = list(places)
                columns[:, at] = by_snapshot[:, at]
            for one in given:
                if one.place in places:
                    promise(columns, one.place, 1, one.num_blocks, one.num_tokens)
        if self._open is not None:
            self._num_open += _note(self._open, places, self._may_start(by_snapshot, places))
            self._num_startable += _note(self._startable, places, self._may_start(columns, places))

    def columns_at(self, places: Collection[int]) -> Ints:
        """The columns of the replicas at ``places`` [11, places]."""
        there: Ints = self.columns[:, list(places)]
        return there

    def restore(self, places: Collection[int], columns: Ints) -> None:
        """Set the columns at ``places`` back to what they were before a ``reset``; nothing may be owed."""
        assert not self._owed
        self._own()
        self._columns[:, list(places)] = columns
        if self._open is not None:
            self._num_startable += _note(self._startable, places, self._may_start(self._columns, places))

    def _own(self) -> None:
        if self.is_untouched:
            self.is_untouched, self._columns = False, self._columns.copy()  # before, they are the snapshot's

    def _count_owed(self) -> None:
        owed, self._owed = self._owed, {}
        if len(owed) < FEW:
            for place, given in owed.items():
                promise(self._columns, place, 1, given.num_blocks, given.num_tokens)
        else:
            promise_many(self._columns, [(place, given.num_blocks, given.num_tokens) for place, given in owed.items()])
        if self._open is not None:
            self._num_startable += _note(self._startable, owed, self._may_start(self._columns, owed))

    def _count_open(self) -> None:
        if self._open is None:
            columns = self.columns  # counts in what is owed while there are no flags yet to keep up to date
            self._open = self.may_start()
            self._startable = self._open.copy() if self.is_untouched else self._may_all_start(columns)
            self._num_open, self._num_startable = map(int, map(np.count_nonzero, (self._open, self._startable)))

    def _may_all_start(self, columns: Ints) -> Bools:
        """Which replicas may start something, by ``columns`` [n]."""
        may_start: Bools = columns[URGENT] <= self._steps_ahead.most(self.snapshot.told)
        may_start &= columns[CAPACITY] >= 0
        return may_start

    def _may_start(self, columns: Ints, places: Collection[int]) -> list[bool]:
        """The same for the replicas at ``places``, in that order."""
        if len(places) < FEW_PLACES:
            return [self._is_open(columns, place) for place in places]
        at = list(places)
        may_start = columns[URGENT, at] <= self._steps_ahead.most(self.snapshot.told, at)
        flags: list[bool] = (may_start & (columns[CAPACITY, at] >= 0)).tolist()
        return flags

    def _is_open(self, columns: Ints, place: int) -> bool:
        is_free: bool = columns.item(URGENT, place) <= self._steps_ahead.most_at(self.snapshot, place)
        return is_free and columns.item(CAPACITY, place) >= 0


def _note(flags: Bools, places: Collection[int], values: list[bool]) -> int:
    """Set the ``flags`` at ``places``. Returns how many more are true now."""
    added = 0
    for place, value in zip(places, values, strict=True):
        added += value - flags.item(place)
        flags[place] = value
    return added
