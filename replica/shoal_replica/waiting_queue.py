"""The sequences that wait to be scheduled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shoal_replica.request import Sequence, SequenceStatus
from shoal_replica.scheduling_policy import order_waiting


class WaitingQueue:
    """Sequences in the policy's order, sorted again only after an arrival. Some may be held: they have no place in it
    until they are released.
    """

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._sequences: list[Sequence] = []
        self._held: dict[int, Sequence] = {}  # by seq_id
        self._is_sorted = True
        self._num_to_compute: dict[int, int] = {}  # by seq_id
        self._preempted: set[int] = set()  # their seq_ids
        self.num_tokens = 0  # to compute for all of them, minus what they are expected to find cached

    def __len__(self) -> int:
        """How many may start, apart from room."""
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """In order, next to run first; without those that are held."""
        if not self._is_sorted:
            self._sequences = order_waiting(self._sequences, self._policy)
            self._is_sorted = True
        return iter(self._sequences)

    @property
    def unordered(self) -> Iterable[Sequence]:
        """The same without the time that it takes to bring newcomers into order."""
        return self._sequences

    @property
    def num_all(self) -> int:
        """How many wait, those that are held included."""
        return len(self._sequences) + len(self._held)

    @property
    def held(self) -> Iterable[Sequence]:
        return self._held.values()

    @property
    def preempted(self) -> Sequence | None:
        """The first in order that has run before and was preempted, if any was."""
        return next((s for s in self if s.seq_id in self._preempted), None) if self._preempted else None

    def push(self, sequence: Sequence, num_cached_tokens: int = 0, is_held: bool = False) -> None:
        """Add a sequence that is expected to find ``num_cached_tokens`` tokens cached when its turn comes."""
        if is_held:
            self._held[sequence.seq_id] = sequence
        else:
            self._sequences.append(sequence)
            self._is_sorted = False
            if sequence.status is SequenceStatus.PREEMPTED:
                self._preempted.add(sequence.seq_id)
        self._num_to_compute[sequence.seq_id] = max(1, sequence.num_tokens - num_cached_tokens)
        self.num_tokens += self._num_to_compute[sequence.seq_id]

    def take(self, sequences: list[Sequence]) -> None:
        """Remove ``sequences``, none of them held; the others keep their order."""
        taken = {s.seq_id for s in sequences}
        self._sequences = [s for s in self._sequences if s.seq_id not in taken]
        self._preempted -= taken
        self.num_tokens -= sum(self._num_to_compute.pop(seq_id) for seq_id in taken)

    def remove(self, sequence: Sequence) -> None:
        if self._held.pop(sequence.seq_id, None) is None:
            self._sequences.remove(sequence)
            self._preempted.discard(sequence.seq_id)
        self.num_tokens -= self._num_to_compute.pop(sequence.seq_id)

    def check_invariants(self) -> None:
        """The token counts are those of the queued sequences."""
        assert self._num_to_compute.keys() == {s.seq_id for s in (*self._sequences, *self._held.values())}
        assert len(self._num_to_compute) == self.num_all
        assert self.num_tokens == sum(self._num_to_compute.values())
        assert self._preempted == {s.seq_id for s in self._sequences if s.status is SequenceStatus.PREEMPTED}
