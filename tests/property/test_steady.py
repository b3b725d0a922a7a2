"""Decodes simulated together leave the same state as a scheduler that takes each of them step by step."""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import fields

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_cluster.sim.steady import FIRST_OUTPUT_TOKEN_ID, CompactRequest, SteadyScheduler
from shoal_replica.config import CacheConfig, SchedulerConfig
from shoal_replica.executor import SampledToken, StepResult
from shoal_replica.request import Request
from shoal_replica.scheduler import Scheduler
from shoal_replica.testing import make_request

MAX_MODEL_LEN = 60
STEP_S = 1.0

prompts = st.tuples(st.integers(0, 2), st.integers(1, 30))  # kind and number of tokens
events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), prompts, st.integers(1, 40), st.integers(0, 9), st.booleans(), st.integers(0, 6)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("steps"), st.integers(1, 12)),
        st.tuples(st.just("cut")),
    ),
    max_size=30,
)


def state(scheduler: Scheduler):
    """Everything that a step may change."""
    kv = scheduler.kv
    return {
        "running": [(s.seq_id, s.num_computed_tokens, [*s.token_ids], s.block_hashes) for s in scheduler._running],
        "waiting": [(s.seq_id, s.status, s.num_tokens) for s in scheduler._waiting],
        "tables": kv._tables,
        "free": kv.pool._free.in_order(),
        "refs": kv.pool._num_refs,
        "cached": kv.prefix_cache._block_of,
        "events": scheduler.take_block_events(),
        "now": scheduler.now,
        "stats": scheduler.stats(0.0),
        "lives": scheduler.request_ids(),
    }


def compact(request: Request) -> CompactRequest:
    its = {f.name: getattr(request, f.name) for f in fields(request)}
    return CompactRequest(**(its | {"prompt_token_ids": array("I", request.prompt_token_ids)}))


@settings(max_examples=150)
@given(
    events=events,
    num_blocks=st.integers(16, 50),
    block_size=st.sampled_from([1, 4, 8]),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(6, 40),
    policy=st.sampled_from(["fcfs", "deadline"]),
)
def test_decodes_taken_together_are_decodes_taken_one_by_one(
    events, num_blocks, block_size, max_num_seqs, max_num_batched_tokens, policy
):
    cache = CacheConfig(num_blocks=max(num_blocks, -(-MAX_MODEL_LEN // block_size)), block_size=block_size)
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, policy=policy)
    plain = Scheduler(config, cache, MAX_MODEL_LEN, ())
    steady = SteadyScheduler(config, cache, MAX_MODEL_LEN)
    drawn, told = defaultdict(int), defaultdict(int)  # number of tokens by request
    firsts, ends = [], []  # by the plain scheduler: the steps of the requests' first and last tokens
    now = 0.0

    def step_plainly(coming: Request | None) -> None:
        nonlocal now
        now += STEP_S
        output = plain.schedule(now)
        if coming is not None:
            plain.add(coming)
        sampled = (SampledToken(s.seq_id, FIRST_OUTPUT_TOKEN_ID + s.seq_id) for s in output.scheduled if s.samples)
        for delta in plain.update(output, StepResult(tuple(sampled))):
            drawn[delta.request_id] += len(delta.token_ids)
            if delta.start is not None:
                firsts.append((delta.request_id, plain.totals.num_steps))
            if delta.finish_reason is not None:
                ends.append((delta.request_id, plain.totals.num_steps, delta.finish_reason))

    def take(deltas) -> None:
        for delta in deltas:
            assert delta.position == told[delta.request_id] + num_before[delta.request_id]
            told[delta.request_id] += len(delta.token_ids)
            if delta.start is not None:
                assert firsts.pop(0) == (delta.request_id, steady.totals.num_steps)
            if delta.finish_reason is not None:
                assert ends.pop(0) == (delta.request_id, steady.totals.num_steps, delta.finish_reason)
                assert told[delta.request_id] == drawn[delta.request_id]

    def step(limit: int, coming: Request | None = None) -> int:
        """Take at most ``limit`` steps; ``coming`` arrives while the last of them runs. Returns how many were taken."""
        output = steady.schedule(now + STEP_S)
        if output is None:
            assert plain.schedule(now + STEP_S) is None
            if coming is not None:
                plain.add(coming)
                steady.add(compact(coming))
            return 0
        num_steps = steady.num_steady_steps(output, limit)
        for number in range(num_steps):
            step_plainly(coming if number == num_steps - 1 else None)
        if coming is not None:
            steady.add(compact(coming))
        if num_steps > 1:
            steady.finish_steps(num_steps, now)
        else:
            take(steady.finish_step(output))
        assert not firsts
        assert not ends
        steady.check_invariants()
        assert state(steady) == state(plain)
        return num_steps

    num_before = {}
    for number, event in enumerate(events):
        if event[0] == "add":
            _, (kind, num_tokens), max_tokens, num_drawn, yields, num_steps_before = event
            request = make_request(
                f"r{number}",
                [kind] * num_tokens,
                max_tokens=max_tokens,
                output_token_ids=[7] * min(num_drawn, max_tokens - 1),
                arrival_s=float(number),
                due_s=now + number % 9,
                yields=yields,
            )
            num_before[request.request_id] = len(request.output_token_ids)
            if num_steps_before:
                step(num_steps_before, request)
            else:
                plain.add(request)
                steady.add(compact(request))
        elif event[0] == "abort" and plain.may_leave(f"r{event[1]}"):
            plain.abort(f"r{event[1]}")
            steady.abort(f"r{event[1]}")
        elif event[0] == "cut":
            for request_id in plain.request_ids():
                plain.abort(request_id)
            take(steady.abort_all())
            assert {r: n for r, n in told.items() if n} == {r: n for r, n in drawn.items() if n}
            assert state(steady) == state(plain)
        elif event[0] == "steps":
            left = event[1]
            while left > 0 and (num_steps := step(left)):
                left -= num_steps
    while step(50):
        pass
    assert not steady.has_work
    assert told == drawn
    assert not steady._started
    assert not steady._alike_until
