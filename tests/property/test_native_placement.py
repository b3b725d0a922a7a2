"""What is native in placement against its twin of numpy, which answers the same."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_cluster.policies import native_library, routing
from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import CAPACITY, LOAD, ROOM, SEQUENCES, SLOWER, Ints, unknown_columns
from shoal_cluster.policies.holder_table import NUM_WAYS, HolderTable, make_table
from shoal_cluster.policies.native_cost import native_least_cost
from shoal_cluster.policies.native_table import NativeTable
from shoal_cluster.policies.routing import RouteQuery, RouteWeights, choose
from shoal_replica.prefix_cache import BlockHash

NUM_SLOTS = 128
RNG = Random(0)
# Those of an even number share their key with the one before: forged.
WHOLE = [RNG.randbytes(16) for _ in range(200)]
HASHES = [BlockHash(h if i % 2 else WHOLE[i - 1][:8] + h[8:]) for i, h in enumerate(WHOLE)]

commands = st.lists(
    st.tuples(
        st.sampled_from(("hold", "hold", "release", "release_all", "use")),
        st.integers(0, NUM_SLOTS - 1),
        st.integers(0, len(HASHES) - 1),
        st.integers(0, 80),
        st.integers(1, 3),
    ),
    max_size=40,
)


def test_it_is_native_that_serves() -> None:
    """Where a compiler is, as where these tests run."""
    assert isinstance(make_table(100), NativeTable)
    assert native_library.library is not None


@settings(max_examples=200, deadline=None)
@given(commands=commands)
def test_both_tables_hold_and_forget_the_same(commands: list[tuple[str, int, int, int, int]]) -> None:
    tables = HolderTable(4 * NUM_WAYS), NativeTable(4 * NUM_WAYS)
    for table in tables:
        table.add_slots()
    for name, slot, start, count, stride in commands:
        some = tuple(HASHES[start::stride][:count])
        for table in tables:
            if name == "release_all":
                table.release_all(slot)
            elif name == "use":
                table.use(some)
            else:
                getattr(table, name)(slot, dict.fromkeys(some))
            table.check_invariants(range(NUM_SLOTS))
        one, other = tables
        also = [RNG.getrandbits(NUM_SLOTS) for _ in some]
        for each in ((), also):
            assert one.lengths(some, each).tolist() == other.lengths(some, each).tolist()
        assert one.is_held(slot, HASHES).tolist() == other.is_held(slot, HASHES).tolist()
        assert [(t.num_entries, t.num_evicted, t.num_slots) for t in tables[:1]] == [
            (t.num_entries, t.num_evicted, t.num_slots) for t in tables[1:]
        ]
        assert [one.num_held(i) for i in range(NUM_SLOTS)] == [other.num_held(i) for i in range(NUM_SLOTS)]


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


@settings(max_examples=400, deadline=None)
@given(
    rows=costs,
    num_tokens=st.integers(1, 300),
    decode_steps=st.integers(1, 128),
    prefill_price=st.floats(0, 20),
    seed=st.integers(0, 2**32),
)
def test_both_choose_the_same(
    rows: list[dict[object, int]], num_tokens: int, decode_steps: int, prefill_price: float, seed: int
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
            num_blocks_needed=num_tokens // 16 + 1,
            block_size=16,
            decode_steps=decode_steps,
        ),
        RouteWeights(prefill_price=prefill_price),
    )
    native = choose(query, candidates, weights, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "library", None)
        numpy = choose(query, candidates, weights, seed)
    assert (native[0], native[1].best, native[1].num_ranked) == (numpy[0], numpy[1].best, numpy[1].num_ranked)
    if rows:
        at_once = native_least_cost(query, candidates, weights.prefill_price, weights.sequence_price(query))
        assert at_once[0] in (-1, native[0])
