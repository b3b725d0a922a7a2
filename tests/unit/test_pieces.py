"""Prompts in pieces while tenants share a replica: newcomers wait for short steps, and decodes get no slower."""

from __future__ import annotations

from itertools import pairwise

from shoal_replica.executor import SchedulerOutput
from shoal_replica.request import Request
from shoal_replica.testing import make_request, make_scheduler

WHOLE, PIECE, PIECE_WITH_DECODES = 1024, 128, 64


def steps(*requests: Request, late: tuple[int, Request] | None = None) -> list[SchedulerOutput]:
    """All steps that the requests take. ``late``: after how many steps another request arrives, and that request."""
    scheduler, executor = make_scheduler(
        num_blocks=4000, max_num_batched_tokens=WHOLE, max_model_len=8000, policy="deadline"
    )
    for request in requests:
        scheduler.add(request)
    outputs: list[SchedulerOutput] = []
    while scheduler.has_work:
        output = scheduler.schedule(0.0)
        assert output is not None
        assert len(outputs) < 1000
        outputs.append(output)
        scheduler.update(output, executor.execute(output))
        scheduler.check_invariants()
        if late is not None and len(outputs) == late[0]:
            scheduler.add(late[1])
    return outputs


def prompt(request_id: str, num_tokens: int, *, yields: bool, max_tokens: int = 1, due_s: float = 9.0) -> Request:
    first = 10_000 * sum(map(ord, request_id))
    return make_request(request_id, range(first, first + num_tokens), max_tokens=max_tokens, yields=yields, due_s=due_s)


def test_a_prompt_that_yields_is_computed_in_pieces() -> None:
    assert [output.num_tokens for output in steps(prompt("a", 1000, yields=False))] == [1000]
    assert [output.num_tokens for output in steps(prompt("a", 1000, yields=True))] == [*[PIECE] * 7, 1000 - 7 * PIECE]


def test_who_does_not_yield_has_the_whole_of_the_next_step() -> None:
    late = prompt("b", 900, yields=False, due_s=1.0)
    outputs = steps(prompt("a", 1000, yields=True), late=(2, late))
    assert [output.num_tokens for output in outputs[:4]] == [PIECE, PIECE, 900, PIECE]


def test_who_does_not_yield_passes_all_that_wait_and_do() -> None:
    heavy = [prompt(name, 1000, yields=True) for name in ("a", "c", "d")]
    outputs = steps(*heavy, late=(2, prompt("b", 300, yields=False, due_s=99.0)))
    assert outputs[2].num_tokens == PIECE + 300


def test_a_prompt_that_yields_goes_on_though_others_come_in_every_step() -> None:
    scheduler, executor = make_scheduler(
        num_blocks=4000, max_num_batched_tokens=WHOLE, max_model_len=8000, policy="priority"
    )
    scheduler.add(prompt("a", 1000, yields=True))
    for number in range(3 * WHOLE // PIECE * 1000 // PIECE):
        first = 1000 * number  # nothing of it is cached
        scheduler.add(make_request(str(number), range(first, first + PIECE), max_tokens=1, priority=-1))
        output = scheduler.schedule(0.0)
        assert output is not None
        if any(delta.request_id == "a" for delta in scheduler.update(output, executor.execute(output))):
            return
    raise AssertionError("it starves")


def test_decodes_run_along_where_there_is_no_place_for_those_who_wait() -> None:
    """Otherwise each successor of a sequence that ends would be prefilled alone, with one more read of the weights."""

    def num_steps(yields: bool) -> int:
        scheduler, executor = make_scheduler(num_blocks=4000, max_num_batched_tokens=WHOLE, max_num_seqs=16)
        for number in range(100):
            first = 100 * number
            scheduler.add(
                make_request(str(number), range(first, first + 20), max_tokens=32 + number % 13, yields=yields)
            )
        for count in range(1000):
            output = scheduler.schedule(0.0)
            if output is None:
                return count
            scheduler.update(output, executor.execute(output))
        raise AssertionError("it does not end")

    assert num_steps(yields=True) <= 1.05 * num_steps(yields=False)


def test_decodes_run_along_once_for_a_whole_step_of_pieces() -> None:
    """As often as with whole steps, so that decodes cost no more reads of the weights."""
    outputs = steps(prompt("a", 100, yields=True, max_tokens=50), late=(2, prompt("b", 4 * WHOLE, yields=True)))
    mixed = [o for o in outputs[2:] if any(s.num_new_tokens > 1 for s in o.scheduled)]
    with_decodes = [number for number, o in enumerate(mixed) if len(o.scheduled) == 2]
    assert with_decodes[0] == WHOLE // PIECE
    apart = {after - before for before, after in pairwise(with_decodes)}
    assert max(apart) == 1 + (WHOLE - PIECE_WITH_DECODES) // PIECE + 1
    assert all(o.num_tokens <= PIECE_WITH_DECODES + 1 for o in mixed if len(o.scheduled) == 2)
    assert 4 <= len(with_decodes) <= 6


def test_decodes_go_on_where_no_prompt_has_room() -> None:
    scheduler, executor = make_scheduler(num_blocks=40, block_size=4, max_num_batched_tokens=64, max_model_len=160)
    scheduler.add(prompt("a", 60, yields=True, max_tokens=60))
    scheduler.add(prompt("b", 110, yields=True))
    num_tokens = 0
    for _ in range(200):
        output = scheduler.schedule(0.0)
        if output is None:
            break
        num_tokens += len(scheduler.update(output, executor.execute(output)))
    assert num_tokens == 61


def test_nothing_changes_while_nobody_yields() -> None:
    outputs = steps(prompt("a", 100, yields=False, max_tokens=20), late=(1, prompt("b", 2 * WHOLE, yields=False)))
    assert [output.num_tokens for output in outputs[1:3]] == [WHOLE, WHOLE]
    assert len(outputs[1].scheduled) == 2
