"""Rows of host memory: what they keep, what they evict first, and the moves that each step carries out."""

from __future__ import annotations

from shoal_replica.host_blocks import HostBlocks
from shoal_replica.prefix_cache import BlockHash
from shoal_replica.testing import expected_tokens, make_request, make_scheduler

A, B, C, D = (BlockHash(name) for name in (b"a", b"b", b"c", b"d"))


def make(num_rows: int) -> tuple[HostBlocks, list[BlockHash]]:
    forgotten: list[BlockHash] = []
    return HostBlocks(num_rows, forgotten.append), forgotten


def test_the_least_recently_used_row_is_given_up() -> None:
    host, forgotten = make(2)
    assert host.keep(A, 7)
    assert host.keep(B, 8)
    assert host.take_moves() == (((7, 0), (8, 1)), ())
    host.hold([A])
    host.bring(A, 3)
    assert host.take_moves() == ((), ((0, 3),))
    assert host.keep(C, 9)
    assert forgotten == [B]
    assert host.take_moves() == (((9, 1),), ())
    assert (host.num_out, host.num_in) == (3, 1)
    host.check_invariants()


def test_what_a_row_has_is_not_moved_again() -> None:
    host, _ = make(2)
    host.keep(A, 7)
    host.take_moves()
    assert host.keep(A, 5)
    assert host.take_moves() == ((), ())


def test_a_row_is_busy_until_a_step_has_taken_its_move() -> None:
    host, forgotten = make(1)
    assert host.keep(A, 7)
    assert not host.keep(B, 8)
    host.take_moves()
    host.hold([A])
    assert not host.keep(B, 8)
    host.bring(A, 4)
    host.take_moves()
    assert host.keep(B, 8)
    assert forgotten == [A]


def test_no_rows_keep_nothing() -> None:
    host, _ = make(0)
    assert not host.keep(A, 7)
    assert host.take_moves() == ((), ())


def test_moves_of_a_step_planned_ahead_are_made_once_whether_it_runs_or_not() -> None:
    host, _ = make(4)
    host.keep(A, 1)
    assert host.moves_ahead() == ((1, 0),)
    host.keep(B, 2)
    assert host.moves_ahead() == ((2, 1),)
    host.note_moved(1)  # the first step has run, the second is dropped
    host.keep(C, 3)
    assert host.take_moves() == (((2, 1), (3, 2)), ())
    assert host.take_moves() == ((), ())
    host.check_invariants()


def test_a_preempted_sequence_comes_back_from_host_memory() -> None:
    """Four sequences grow in a pool for one and a half. With host rows less is computed twice. The tokens are right."""
    num_computed = []
    for num_host_blocks in (0, 32):
        scheduler, executor = make_scheduler(num_blocks=14, max_num_seqs=4, num_host_blocks=num_host_blocks)
        prompts = [[seed] * 20 for seed in (1, 2, 3, 4)]
        for number, prompt in enumerate(prompts):
            scheduler.add(make_request(f"{number}", prompt, max_tokens=20, arrival_s=float(number)))
        tokens: dict[str, list[int]] = {request_id: [] for request_id in scheduler.request_ids()}
        computed = 0
        while (output := scheduler.schedule(0.0)) is not None:
            computed += output.num_tokens
            for delta in scheduler.update(output, executor.execute(output)):
                tokens[delta.request_id].extend(delta.token_ids)
            scheduler.check_invariants()
        for number, prompt in enumerate(prompts):
            assert tokens[f"{number}"] == expected_tokens(prompt, 20)
        stats = scheduler.stats(0.0)
        assert stats.num_preemptions > 0
        assert (stats.num_blocks_in > 0) == (num_host_blocks > 0)
        num_computed.append(computed)
    assert num_computed[1] < num_computed[0]


def test_what_only_the_host_has_is_told_as_cached_and_counted_when_found() -> None:
    scheduler, executor = make_scheduler(num_blocks=6, num_host_blocks=4, max_model_len=24)

    def serve(request_id: str, prompt: list[int]) -> int:
        scheduler.add(make_request(request_id, prompt, max_tokens=1))
        num_cached = 0
        while (output := scheduler.schedule(0.0)) is not None:
            for delta in scheduler.update(output, executor.execute(output)):
                num_cached = delta.num_cached_tokens
        return num_cached

    first = [1] * 13
    serve("first", first)
    stored, removed = scheduler.take_block_events()
    assert len(stored) == 3
    serve("second", [2] * 22)  # takes every block of the pool
    stored_then, removed = scheduler.take_block_events()
    assert len(stored_then) == 5
    assert not removed
    assert {*stored, *stored_then} == {*scheduler.kv.cached_hashes()}
    assert serve("third", first) == 12
    stats = scheduler.stats(0.0)
    assert stats.num_host_cached_tokens > 0
    assert stats.num_blocks_in * 4 == stats.num_host_cached_tokens
    assert stats.num_host_cached_blocks == stats.num_host_blocks == 4
