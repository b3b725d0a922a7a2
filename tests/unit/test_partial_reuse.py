"""Partial reuse of cached blocks: which block is found, and which are forgotten."""

from __future__ import annotations

from random import Random

from shoal_replica.partial_reuse import WORTH_A_COPY, PartialBlock, PartialReuse, Tokens
from shoal_replica.prefix_cache import root_hash
from shoal_replica.testing import make_request, make_scheduler

ROOT, OTHER = root_hash(""), root_hash("somebody's")


def words(*token_ids: int) -> bytes:
    return Tokens(token_ids, "").words(0, len(token_ids))


def test_the_block_with_most_in_common_is_found_behind_the_same_prefix_only() -> None:
    blocks = PartialReuse(4)
    blocks.insert(3, ROOT, words(1, 2, 9, 9))
    blocks.insert(4, ROOT, words(1, 2, 3, 9))
    blocks.insert(5, OTHER, words(1, 2, 3, 4))
    assert blocks.find(ROOT, words(1, 2, 3, 4)) == PartialBlock(4, 3)
    assert blocks.find(ROOT, words(1)) == PartialBlock(4, 1)
    assert blocks.find(OTHER, words(1, 2, 3, 4)) == PartialBlock(5, 4)
    assert blocks.find(ROOT, words(7, 2)) is None
    assert blocks.find(ROOT, b"") is None


def test_it_is_found_among_many_with_any_token() -> None:
    rng, blocks = Random(0), PartialReuse(WORTH_A_COPY)
    held = {tuple(rng.choice((0, 1, 255, 256, 2**31, 2**32 - 1)) for _ in range(WORTH_A_COPY)) for _ in range(300)}
    for block_id, token_ids in enumerate(held):
        blocks.insert(block_id, ROOT, words(*token_ids))
    by_id = dict(enumerate(held))
    for _ in range(300):
        wanted = tuple(rng.choice((0, 1, 7, 255, 256, 2**31, 2**32 - 1)) for _ in range(rng.randint(1, WORTH_A_COPY)))
        most = max(num_common(token_ids, wanted) for token_ids in held)
        found = blocks.find(ROOT, words(*wanted))
        assert (found.num_tokens if found else 0) == most
        assert found is None or num_common(by_id[found.block_id], wanted) == most
    for block_id in by_id:
        blocks.evict(block_id)
        blocks.check_invariants()
    assert blocks.find(ROOT, words(0)) is None


def num_common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def test_what_is_less_than_a_quarter_of_a_block_is_computed() -> None:
    blocks = PartialReuse(4 * WORTH_A_COPY)
    blocks.insert(3, ROOT, words(*range(4 * WORTH_A_COPY)))
    assert blocks.find(ROOT, words(0, 1, 2)) is None
    assert blocks.find(ROOT, words(0, 1, 2, 3)) == PartialBlock(3, 4)


def test_what_was_evicted_is_not_found() -> None:
    blocks = PartialReuse(4)
    blocks.insert(3, ROOT, words(1, 2))
    blocks.evict(3)
    blocks.evict(3)
    assert blocks.find(ROOT, words(1, 2)) is None
    assert len(blocks) == 0
    blocks.check_invariants()


def run(request_id: str, prompt: tuple[int, ...], scheduler, executor, salt: str = "") -> int:  # type: ignore[no-untyped-def]
    """Run a prompt; returns how many of its tokens were found cached."""
    scheduler.add(make_request(request_id, prompt, max_tokens=1, cache_salt=salt))
    deltas = []
    while (output := scheduler.schedule(0.0)) is not None:
        deltas += scheduler.update(output, executor.execute(output))
    scheduler.check_invariants()
    return int(deltas[-1].num_cached_tokens)


def test_what_one_tenant_left_is_not_taken_over_by_another() -> None:
    world = make_scheduler()
    prompt = (1, 2, 3, 4)
    assert [run(salt + str(i), prompt, *world, salt) for i, salt in enumerate(("one", "other", "one"))] == [0, 0, 3]


def test_a_block_of_which_others_use_a_part_outlives_those_that_nobody_uses() -> None:
    """Short prompts use two tokens of one block and never all of it: by age alone it would soon be evicted."""
    scheduler, executor = make_scheduler(num_blocks=8)
    hot = (7, 7, 1, 2)
    assert run("first", (*hot, 3), scheduler, executor) == 0
    for i in range(30):
        assert run(f"short{i}", (7, 7, 100 + i), scheduler, executor) == 2
        run(f"passing{i}", (1000 + i, 2, 3, 4, 5), scheduler, executor)
    assert run("again", (*hot, 4), scheduler, executor) == 4
