"""Sets of replicas, each stored once and shared by many entries of the prefix index."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence


class HolderSets:
    """Number → a set of slots as bits; 0 is the empty set.

    Blocks that come together are held together, so there are far fewer sets than blocks: an entry has a four-byte
    number instead of one bit for each replica. A set without entries is forgotten and its number is used again.

    Attributes:
        bits: the set of each number, bit i for slot i; 0 for numbers that are free.
    """

    def __init__(self) -> None:
        self.bits = [0]
        self._number_of = {0: 0}
        self._uses = [0]  # entries that have each set; of no meaning for the empty one
        self._free: list[int] = []

    def __len__(self) -> int:
        """Number of sets that some entry has."""
        return len(self._number_of) - 1

    @property
    def num_bytes(self) -> int:
        sets = sum(map(sys.getsizeof, self._number_of))
        return sets + sum(map(sys.getsizeof, (self.bits, self._number_of, self._uses, self._free)))

    def of_slot(self, slot: int, count: int) -> int:
        """The number of the set of ``slot`` alone, which ``count`` entries get."""
        number = self._number(1 << slot)
        self._uses[number] += count
        return number

    def add(self, slot: int, numbers: Sequence[int]) -> list[int]:
        """Entries with these ``numbers``, one each, are now held by ``slot``, too. Returns their new numbers."""
        bit = 1 << slot
        return self._change(numbers, {number: self.bits[number] | bit for number in set(numbers)})

    def take(self, slot: int, numbers: Sequence[int]) -> list[int]:
        """Such entries are no longer held by ``slot``. Returns their new numbers."""
        bit = 1 << slot
        return self._change(numbers, {number: self.bits[number] & ~bit for number in set(numbers)})

    def drop(self, numbers: Iterable[int]) -> list[tuple[int, int]]:
        """Such entries are gone. Returns (bits, how many) for each distinct number."""
        dropped = []
        for number, count in Counter(numbers).items():
            dropped.append((self.bits[number], count))
            self._uses[number] -= count
            self._forget_unused(number)
        return dropped

    def with_slot(self, slot: int) -> list[bool]:
        """Whether the set of each number contains ``slot``."""
        return [bool(bits >> slot & 1) for bits in self.bits]

    def check_invariants(self, numbers: Iterable[int]) -> None:
        """Uses, numbers and free numbers are right; ``numbers`` are those of all entries."""
        uses = Counter(numbers)
        assert uses == Counter({n: count for n, count in enumerate(self._uses) if n and count})
        assert self._number_of == {self.bits[n]: n for n in (0, *uses)}
        assert sorted((*self._free, *uses)) == list(range(1, len(self.bits)))
        assert not any(self.bits[n] or self._uses[n] for n in self._free)

    def _change(self, numbers: Sequence[int], bits_of: dict[int, int]) -> list[int]:
        new_of = {number: self._number(bits) for number, bits in bits_of.items()}
        uses = self._uses
        for number in numbers:
            uses[number] -= 1
            uses[new_of[number]] += 1
        for number in new_of:
            self._forget_unused(number)
        return [new_of[number] for number in numbers]

    def _number(self, bits: int) -> int:
        """The number of a set that an entry is about to get; a new one if need be."""
        number = self._number_of.get(bits)
        if number is None:
            number = self._free.pop() if self._free else len(self.bits)
            if number == len(self.bits):
                self.bits.append(bits)
                self._uses.append(0)
            self.bits[number] = bits
            self._number_of[bits] = number
        return number

    def _forget_unused(self, number: int) -> None:
        if number and not self._uses[number]:
            del self._number_of[self.bits[number]]
            self.bits[number] = 0
            self._free.append(number)
