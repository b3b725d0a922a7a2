"""The prefix index by example."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from shoal_cluster.policies.holder_table import HolderTable, Table
from shoal_cluster.policies.native_table import NativeTable
from shoal_cluster.policies.prefix_index import PrefixIndex
from shoal_replica.prefix_cache import DIGEST_BYTES, BlockHash, hash_blocks

A, B, C, D = hash_blocks(range(16), 4)


def test_matches_the_longest_unbroken_prefix_of_each_replica() -> None:
    index = PrefixIndex()
    index.store("long", [A, B, C])
    index.store("short", [A])
    index.store("hole", [A, C, D])
    index.store("tail", [B, C])
    assert index.match([A, B, C, D]) == {"long": 3, "short": 1, "hole": 1}


def test_nothing_matches_nothing() -> None:
    index = PrefixIndex()
    assert index.match([A]) == {}
    index.store("one", [A])
    assert index.match([]) == {}


def test_storing_and_removing_twice_is_once() -> None:
    index = PrefixIndex()
    index.store("one", [A, A])
    index.store("one", [A])
    assert index.num_held("one") == 1
    index.remove("one", [A])
    index.remove("one", [A])
    index.remove("stranger", [A])
    assert (index.num_held("one"), len(index)) == (0, 0)
    index.check_invariants()


def test_removing_from_one_leaves_the_other() -> None:
    index = PrefixIndex()
    index.store("one", [A, B])
    index.store("two", [A, B])
    index.remove("one", [B])
    assert index.match([A, B]) == {"one": 1, "two": 2}


def test_drop_frees_the_slot_for_another_without_its_blocks() -> None:
    index = PrefixIndex()
    index.store("one", [A, B])
    index.store("two", [A])
    index.drop("one")
    index.store("three", [C])
    assert index.match([A, B]) == {"two": 1}
    assert index.match([C]) == {"three": 1}
    assert index.replica_ids() == {"two", "three"}
    index.check_invariants()


def test_replace_keeps_only_the_snapshot() -> None:
    index = PrefixIndex()
    index.store("one", [A, B])
    index.replace("one", [A, C])
    assert index.match([A, B]) == {"one": 1}
    assert index.num_held("one") == 2
    index.check_invariants()


def fresh(count: int, start: int = 1000) -> list[BlockHash]:
    """``count`` hashes of a prefix that has no block in common with A to D, nor with one of another ``start``."""
    return hash_blocks(range(start, start + 4 * count), 4)


def test_the_cap_evicts_the_least_recently_used() -> None:
    index = PrefixIndex(max_entries=32)
    index.store("one", [A, B])
    index.store("one", fresh(30))
    index.store("two", [A])
    assert index.num_evicted == 0
    index.store("one", [C])
    assert index.match([A]) == {"one": 1, "two": 1}
    assert index.match([B]) == {}
    assert (len(index), index.num_held("one"), index.num_evicted) == (32, 32, 1)
    index.check_invariants()


@pytest.mark.parametrize("make_table", [HolderTable, NativeTable])
def test_touch_keeps_a_used_prefix_and_loses_its_tail_first(make_table: Callable[[int], Table]) -> None:
    index = PrefixIndex(max_entries=32)
    index._table = make_table(32)
    index.store("one", [A, B, C, D])
    index.store("one", fresh(28))
    index.touch([A, B])
    index.store("one", fresh(2, start=9000))
    assert index.match([A, B]) == {"one": 2}
    assert index.match([C]) == index.match([D]) == {}
    index.store("one", fresh(29, start=20_000))
    assert index.match([A, B]) == {"one": 1}


def test_match_changes_nothing() -> None:
    index = PrefixIndex(max_entries=32)
    index.store("one", [A])
    index.store("one", fresh(31))
    index.match([A])
    index.store("one", [C])
    assert index.match([A]) == {}


def test_a_prompt_longer_than_one_look_matches_to_its_last_common_block() -> None:
    index = PrefixIndex()
    prompt = fresh(700)
    for name, length in {"whole": 700, "most": 699, "edge": 32, "over": 33, "next": 160, "none": 0}.items():
        index.store(name, prompt[:length])
    index.store("hole", prompt[:100] + prompt[101:])
    expected = {"whole": 700, "most": 699, "edge": 32, "over": 33, "next": 160, "hole": 100}
    assert index.match(prompt) == expected
    assert index.match(prompt[:32]) == dict.fromkeys(expected, 32)
    index.check_invariants()


def test_half_full_forgets_next_to_nothing() -> None:
    index = PrefixIndex(max_entries=2**16)
    for start in range(0, 2**15, 2**10):
        index.store("one", fresh(2**10, start=10_000_000 + 4 * start))
    assert index.num_held("one") + index.num_evicted == 2**15
    assert index.num_evicted < 10
    assert index.num_bytes < 21 * 2**16
    index.check_invariants()


def test_many_replicas() -> None:
    index = PrefixIndex()
    names = [f"replica-{i}" for i in range(130)]
    for i, name in enumerate(names):
        index.store(name, [A, B, C, D][: i % 5])
    assert index.match([A, B, C, D]) == {name: i % 5 for i, name in enumerate(names) if i % 5}


def test_refuses_a_cap_of_none() -> None:
    with pytest.raises(ValueError, match="max_entries"):
        PrefixIndex(0)


@pytest.mark.parametrize("column", ["keys", "used", "holders"])
def test_invariants_catch_what_is_half_there(column: str) -> None:
    index = PrefixIndex()
    index._table = table = HolderTable(index.max_entries)
    index.store("one", [A])
    index.check_invariants()
    getattr(table, f"_{column}").reshape(-1)[5] = 1
    with pytest.raises(AssertionError):
        index.check_invariants()


@pytest.mark.parametrize("is_asked_before", [False, True])
def test_expecting_a_prompt_uses_what_is_held_of_it(is_asked_before: bool) -> None:
    """On a small index, which fills up and evicts; right after a ``match`` of the same prompt, or of another."""
    rng = Random(5)
    one, two = PrefixIndex(256), PrefixIndex(256)
    prompts = [tuple(BlockHash(rng.randbytes(DIGEST_BYTES)) for _ in range(40)) for _ in range(30)]
    for turn in range(200):
        prompt, replica_id = rng.choice(prompts), rng.choice(("a", "b", "c"))
        num_held = one.match(prompt).get(replica_id, 0)
        if not is_asked_before:
            one.match(rng.choice(prompts)[::-1])
        rest = one.expect(replica_id, prompt, num_held)
        assert one.match(prompt)[replica_id] == len(prompt), turn
        one.expected.remove(one.slot(replica_id), rest)
        two.touch(prompt[:num_held])
        for index in (one, two):
            index.store(replica_id, rest)
            index.check_invariants()
        assert len(one) == len(two), turn
        assert all(one.match(p) == two.match(p) for p in prompts), turn
    assert one.num_evicted == two.num_evicted > 0


@pytest.mark.parametrize("num_replicas", [3, 130])
def test_what_is_expected_goes_on_from_what_is_held(num_replicas: int) -> None:
    index = PrefixIndex()
    for number in range(num_replicas):
        index.store(f"replica-{number}", [A] if number else [A, C])
    index.expect("replica-0", (A, B, C, D), 1)
    index.expect("replica-2", (A, B), 1)
    expected = {f"replica-{number}": 1 for number in range(num_replicas)} | {"replica-0": 4, "replica-2": 2}
    assert index.match([A, B, C, D]) == expected
    index.expected.remove(index.slot("replica-0"), (B, C, D))
    assert index.match([A, B, C, D]) == expected | {"replica-0": 1}
    index.drop("replica-2")
    assert index.match([B]) == {}


def test_what_three_prompts_bring_is_expected_until_the_last_has_come() -> None:
    index = PrefixIndex()
    for _ in range(3):
        index.expect("one", [A, B], 0)
    for expected in ({"one": 2}, {"one": 2}, {}):
        index.expected.remove(index.slot("one"), [A, B])
        assert index.match([A, B]) == expected


def test_a_hole_in_the_middle_ends_a_prefix_though_another_fills_it() -> None:
    index = PrefixIndex()
    index.store("one", [A, C, D])
    index.store("two", [A, B, C, D])
    assert index.match([A, B, C, D]) == {"one": 1, "two": 4}


@pytest.mark.parametrize("num_hashes", [2, 40])
def test_hashes_forged_to_share_a_key_corrupt_nothing(num_hashes: int) -> None:
    """The first half of a hash is its key."""
    forged = [BlockHash(A[:8] + bytes([i] * 8)) for i in range(num_hashes)]
    others = fresh(40, start=77_000_000)
    index = PrefixIndex()
    for replica_id in ("one", "two"):
        index.store(replica_id, forged)
        index.check_invariants()
        index.change(replica_id, [*others, forged[0]], forged[1:])
        index.check_invariants()
    index.remove("one", [*forged, *others])
    index.check_invariants()
    assert index.num_held("one") == 0
    assert index.match(others) == {"two": 40}
