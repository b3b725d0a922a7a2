"""Sets shared by entries, checked against a plain list of sets."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_cluster.policies.holder_sets import HolderSets

slots = st.integers(0, 200)


@given(
    st.lists(
        st.tuples(st.sampled_from(("new", "add", "take", "drop")), slots, st.integers(0, 99)),
        max_size=40,
    )
)
def test_entries_have_the_sets_that_they_were_given(commands: list[tuple[str, int, int]]) -> None:
    sets, numbers, dumb = HolderSets(), [], []  # one per entry
    for name, slot, count in commands:
        some = range(count % (len(numbers) + 1))
        if name == "new":
            numbers += [sets.of_slot(slot, 1 + count % 4)] * (1 + count % 4)
            dumb += [{slot} for _ in range(1 + count % 4)]
        elif name == "drop":
            dropped = Counter(sum(1 << each for each in dumb[i]) for i in some)
            assert Counter(dict(sets.drop([numbers[i] for i in some]))) == dropped
            del numbers[: len(some)], dumb[: len(some)]
        else:
            numbers[: len(some)] = getattr(sets, name)(slot, [numbers[i] for i in some])
        for i in some if name != "drop" and name != "new" else ():
            dumb[i] = dumb[i] | {slot} if name == "add" else dumb[i] - {slot}
        kept = [i for i, number in enumerate(numbers) if number]  # an entry that nobody holds is gone
        numbers, dumb = [numbers[i] for i in kept], [dumb[i] for i in kept if dumb[i]]
        assert len(numbers) == len(dumb)
        assert [sets.bits[number] for number in numbers] == [sum(1 << slot for slot in held) for held in dumb]
        assert [sets.with_slot(slot)[number] for number in numbers] == [slot in held for held in dumb]
        sets.check_invariants(numbers)
        assert len(sets) == len(set(numbers))


def test_numbers_are_used_again() -> None:
    sets = HolderSets()
    number = sets.of_slot(3, 2)
    assert sets.take(3, [number, number]) == [0, 0]
    assert sets.of_slot(900, 1) == number
    assert len(sets.bits) == 2


@pytest.mark.parametrize("wrong", ["_uses", "bits"])
def test_the_invariants_notice_a_wrong_number(wrong: str) -> None:
    sets = HolderSets()
    number = sets.of_slot(3, 2)
    sets.check_invariants([number, number])
    getattr(sets, wrong)[number] += 4
    with pytest.raises(AssertionError):
        sets.check_invariants([number, number])
