"""The native part of placement against its numpy twin: both must give the same answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_cluster.policies import native_library, native_plan, routing
from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import CAPACITY, LOAD, ROOM, SEQUENCES, SLOWER, Ints, unknown_columns
from shoal_cluster.policies.holder_table import NUM_WAYS, HolderTable, Table, make_table
from shoal_cluster.policies.native_cost import native_least_cost
from shoal_cluster.policies.native_table import NativeTable
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.policies.routing import RouteWeights, choose, cost
from shoal_replica.prefix_cache import BlockHash

NUM_SLOTS = 128
RNG = Random(0)
# Hashes at even places share their key with the one before, as forged hashes would.
WHOLE = [RNG.randbytes(16) for _ in range(200)]
HASHES = [BlockHash(h if i % 2 else WHOLE[i - 1][:8] + h[8:]) for i, h in enumerate(WHOLE)]

commands = st.lists(
    st.tuples(
        st.sampled_from(("hold", "hold", "release", "release_all", "use")),
        st.integers(0, NUM_SLOTS - 1),
        st.integers(0, len(HASHES) - 1),
        st.integers(0, NUM_WAYS),  # with more new hashes in one call the tables may differ: see ``NativeTable``
        st.integers(1, 3),
    ),
    max_size=40,
)


def held(table: Table, slot: int, block_hashes: Sequence[BlockHash]) -> list[bool]:
    """Which of these blocks the slot holds."""
    return [bool(table.lengths((block_hash,))[slot]) for block_hash in block_hashes]


def test_it_is_native_that_serves() -> None:
    """Wherever there is a compiler, as there is where these tests run."""
    assert isinstance(make_table(100), NativeTable)
    assert native_library.library is not None


@settings(max_examples=200)
@given(commands=commands)
def test_both_tables_hold_and_forget_the_same(commands: list[tuple[str, int, int, int, int]]) -> None:
    tables = HolderTable(NUM_WAYS), NativeTable(NUM_WAYS)
    for table in tables:
        table.add_slots()
        table.hold(0, HASHES[1 : 2 * NUM_WAYS : 2])
    for name, slot, start, count, stride in commands:
        some = tuple(HASHES[start::stride][:count])
        for table in tables:
            if name == "release_all":
                table.release_all(slot)
            elif name == "use":
                table.use(some, None if stride == 1 else slot)  # all, or the first ones
            else:
                getattr(table, name)(slot, dict.fromkeys(some))
            table.check_invariants(range(NUM_SLOTS))
        one, other = tables
        also = [RNG.getrandbits(NUM_SLOTS) for _ in some]
        for each in ((), also):
            assert one.lengths(some, each).tolist() == other.lengths(some, each).tolist()
        sample = HASHES[start % 16 :: 16]
        assert held(one, slot, sample) == held(other, slot, sample)
        told, told_other = [(t.num_entries, t.num_evicted, t.num_slots) for t in tables]
        assert told == told_other
        assert [one.num_held(i) for i in range(NUM_SLOTS)] == [other.num_held(i) for i in range(NUM_SLOTS)]


@pytest.mark.parametrize("make", [HolderTable, NativeTable])
def test_who_was_used_longest_ago_goes_first(make: Callable[[int], Table]) -> None:
    """A prompt's last hashes go before its first, and none that has been used again."""
    table, hashes = make(NUM_WAYS), HASHES[1::2]
    table.hold(1, hashes[:NUM_WAYS])
    table.use(hashes[NUM_WAYS - 2 : NUM_WAYS])
    table.hold(2, hashes[NUM_WAYS : NUM_WAYS + 2])
    gone = [not is_held for is_held in held(table, 1, hashes[:NUM_WAYS])]
    assert [number for number, is_gone in enumerate(gone) if is_gone] == [NUM_WAYS - 4, NUM_WAYS - 3]
    assert table.num_evicted == 2
    table.check_invariants((1, 2))


@pytest.mark.parametrize("make", [HolderTable, NativeTable])
def test_a_set_of_holders_that_has_gone_is_not_given_to_a_newcomer(make: Callable[[int], Table]) -> None:
    """The only entry of slot 2 is evicted to make room for a new one of slot 2."""
    table, hashes = make(NUM_WAYS), HASHES[1::2]
    table.hold(1, hashes[: NUM_WAYS - 1])
    table.hold(2, hashes[NUM_WAYS - 1 : NUM_WAYS])
    table.use(hashes[: NUM_WAYS - 1])
    table.hold(2, hashes[NUM_WAYS : NUM_WAYS + 1])
    table.check_invariants((1, 2))
    assert held(table, 2, hashes[NUM_WAYS - 1 : NUM_WAYS + 1]) == [False, True]


def test_the_native_check_finds_what_is_miscounted() -> None:
    table = NativeTable(NUM_WAYS)
    table.hold(1, HASHES[1::2][:3])
    table._now.num_entries += 1
    with pytest.raises(AssertionError, match="entries are miscounted"):
        table.check_invariants((1,))


@pytest.mark.parametrize("length", [0, 8, 15, 17, 64])
def test_a_hash_of_another_length_is_refused(length: int) -> None:
    table, wrong = NativeTable(NUM_WAYS), [HASHES[0], BlockHash(bytes(length))]
    for call in (lambda: table.hold(0, wrong), lambda: table.lengths(wrong)):
        with pytest.raises(ValueError, match="must be of 16 each"):
            call()
    assert table.num_entries == 0


def test_a_table_grows_with_what_it_holds() -> None:
    table, prompt = NativeTable(1024), HASHES[1::2]
    for slot in range(300):
        while slot >= table.num_slots:
            table.add_slots()
        table.hold(slot, prompt[: 1 + slot % len(prompt)])
    table.check_invariants(range(300))
    assert table.lengths(prompt).tolist() == [1 + slot % len(prompt) for slot in range(300)] + [0] * 212
    assert table.num_bytes < HolderTable(1024).num_bytes + 100 * 512


amounts = st.integers(0, 300)
costs = st.lists(
    st.fixed_dictionaries(
        {
            "matched": st.integers(0, 12),
            CAPACITY: st.sampled_from((-1, 10, 1000)),
            LOAD: amounts,
            SEQUENCES: st.integers(0, 9),
            ROOM: st.integers(-1, 40),
            SLOWER: st.sampled_from((0, 0, 41, 207)),
        }
    ),
    max_size=12,
)


@settings(max_examples=400)
@given(
    rows=costs,
    num_tokens=st.integers(1, 300),
    decode_steps=st.integers(1, 128),
    prefill_price=st.floats(0, 20),
    seed=st.integers(0, 2**32),
    num_more=st.sampled_from((0, 1, 20)),
    known=st.just((0, 1, 0)) | st.tuples(st.integers(1, 20), st.integers(2, 64), st.integers(1, 9)),
)
def test_both_choose_the_same(
    rows: list[dict[object, int]],
    num_tokens: int,
    decode_steps: int,
    prefill_price: float,
    seed: int,
    num_more: int,
    known: tuple[int, int, int],
) -> None:
    columns: Ints = unknown_columns(len(rows))
    for place, row in enumerate(rows):
        for name, value in row.items():
            if isinstance(name, int):
                columns[name, place] = value
    ids = tuple(f"replica-{place:02d}" for place in range(len(rows)))
    matched = np.array([row["matched"] for row in rows], np.int64)
    candidates = Candidates(ids, ids, [None] * len(ids), [], columns, 0.0, np.zeros(len(ids)), matched)
    query, weights = (
        RouteQuery(
            request_id="one",
            block_hashes=(),
            num_prompt_tokens=num_tokens,
            num_blocks_needed=num_tokens // 16 + 1 + num_more,  # that come with it
            block_size=16,
            decode_steps=decode_steps,
            num_known_blocks=known[0],
            num_alike=known[1],
            num_holders=known[2],
        ),
        RouteWeights(prefill_price=prefill_price),
    )
    native = choose(query, candidates, weights, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "library", None)
        numpy = choose(query, candidates, weights, seed)
    assert (native[0], native[1].best, native[1].num_ranked) == (numpy[0], numpy[1].best, numpy[1].num_ranked)
    if not rows:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "library", None)
        by_numpy = routing._least_cost(query, candidates, weights)
    at_once = native_least_cost(query, candidates, weights.prefill_price, weights.sequence_price(query.decode_steps))
    assert at_once == by_numpy if by_numpy[0] >= 0 else at_once[0] == -1


def test_costs_are_the_same_to_the_last_bit() -> None:
    """Of two replicas whose costs differ only by rounding, the one that is cheaper by numpy's sums is chosen."""
    rng, num_near = Random(1), 0
    for _ in range(4000):
        columns: Ints = unknown_columns(2)
        columns[CAPACITY], columns[ROOM] = 1000, 1000
        for place in range(2):
            columns[(LOAD, SEQUENCES, SLOWER), place] = rng.randrange(300), rng.randrange(9), rng.choice((0, 41, 207))
        matched = np.array([rng.randrange(10), 10 + rng.randrange(10)], np.int64)
        query = RouteQuery(
            request_id="one",
            block_hashes=(),
            num_prompt_tokens=rng.randrange(20, 300),
            num_blocks_needed=20,
            block_size=1,
            decode_steps=rng.randrange(1, 128),
        )
        candidates = Candidates(("a", "b"), ("a", "b"), [None] * 2, [], columns, 0.0, np.zeros(2), matched)
        free, one = (cost(query, candidates, RouteWeights(prefill_price=price)) for price in (0.0, 1.0))
        price = (free[1] - free[0]) / (matched[1] - matched[0])  # per uncached token, at which both cost the same
        if not 0 <= price <= 1000:
            continue
        weights = RouteWeights(prefill_price=float(price))
        costs = cost(query, candidates, weights)
        assert one[0] - free[0] == pytest.approx(query.num_prompt_tokens - matched[0])
        assert costs[0] == pytest.approx(costs[1])
        num_near += costs[0] != costs[1]
        place, _ = native_least_cost(
            query, candidates, weights.prefill_price, weights.sequence_price(query.decode_steps)
        )
        assert place == (-1 if costs[0] == costs[1] else int(costs.argmin()))
    assert num_near > 100


def test_a_library_with_other_structs_is_refused() -> None:
    with pytest.raises(
        RuntimeError, match=r"built from other sources \(structs of .* bytes, not .*build_ext --inplace"
    ):
        native_library.check_structs(native_plan.CHeld, native_plan.CCluster)
