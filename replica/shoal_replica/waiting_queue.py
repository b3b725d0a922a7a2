"""The sequences that wait for a place in a step."""

from __future__ import annotations

from collections.abc import Iterator

from shoal_replica.request import Sequence
from shoal_replica.scheduling_policy import order_waiting


class WaitingQueue:
    """Sequences in the policy's order, sorted again only after an arrival."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._sequences: list[Sequence] = []
        self._is_sorted = True
        self.num_tokens = 0  # tokens to compute for all of them, prefix hits not yet known

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """In order, next to run first."""
        if not self._is_sorted:
            self._sequences = order_waiting(self._sequences, self._policy)
            self._is_sorted = True
        return iter(self._sequences)

    def push(self, sequence: Sequence) -> None:
        self._sequences.append(sequence)
        self._is_sorted = False
        self.num_tokens += sequence.num_tokens

    def take(self, sequences: list[Sequence]) -> None:
        """Remove ``sequences``, which keep their order here."""
        taken = {s.seq_id for s in sequences}
        self._sequences = [s for s in self._sequences if s.seq_id not in taken]
        self.num_tokens -= sum(s.num_tokens for s in sequences)

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)
        self.num_tokens -= sequence.num_tokens
