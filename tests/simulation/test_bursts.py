"""More prompts at once than a step takes: no step may miss a prompt because it is still held at the gateway."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.policies.objective import LatencyObjective, PrefillTime
from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.config import SimConfig
from shoal_cluster.sim.latency import StepTime
from shoal_cluster.sim.replica import SimReplica
from shoal_cluster.sim.run import run
from shoal_cluster.sim.workload import SimRequest
from shoal_replica.config import CacheConfig, SchedulerConfig
from shoal_replica.executor import SchedulerOutput

HELD = SimConfig(
    num_replicas=1,
    cache=CacheConfig(num_blocks=2000, block_size=16),
    scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512, policy="deadline"),
    step_time=StepTime(
        prefill=PrefillTime(tokens_per_s=830, pair_s=0.0), step_s=0.0065, decode_s=0.004, decode_sequence_s=0.0015
    ),
    hold=HoldConfig(),
)
SENT_AT_ONCE = replace(HELD, hold=None)


@dataclass(frozen=True)
class Ran:
    """A run: by replica, the prompt tokens of each step that had any; and when the run was over."""

    prompt_tokens: dict[str, list[int]]
    duration_s: float

    @property
    def num_steps(self) -> int:
        return sum(map(len, self.prompt_tokens.values()))


def ran(monkeypatch: pytest.MonkeyPatch, config: SimConfig, num_prompts: int, num_tokens: int) -> Ran:
    """Run ``num_prompts`` different prompts, a millisecond apart, with 32 output tokens each."""
    taken: dict[str, list[int]] = {}
    end_step = SimReplica._end_step

    def noted(self: SimReplica, output: SchedulerOutput, step_s: float) -> None:
        num_taken = sum(s.num_new_tokens for s in output.scheduled if s.num_new_tokens > 1 or not s.samples)
        if num_taken:
            taken.setdefault(self.replica_id, []).append(num_taken)
        end_step(self, output, step_s)

    requests = [SimRequest(f"r{i}", i / 1000, ((2**30 + i, num_tokens),), 32) for i in range(num_prompts)]
    with monkeypatch.context() as patch:
        patch.setattr(SimReplica, "_end_step", noted)
        cluster = run(SimCluster(config), requests)
    return Ran(taken, cluster.loop.now)


@pytest.mark.parametrize("ttft_s", [2.0, 20.0])
@pytest.mark.parametrize(("num_prompts", "num_tokens"), [(64, 64), (64, 40)])
def test_steps_of_one_replica_take_as_much_as_if_all_prompts_were_there(
    monkeypatch: pytest.MonkeyPatch, num_prompts: int, num_tokens: int, ttft_s: float
) -> None:
    """Up to part of a prompt: it is sent once the next step can complete it, so a step may miss its beginning. This
    holds whether all prompts can be in time or some are put off.
    """
    bare = ran(monkeypatch, SENT_AT_ONCE, num_prompts, num_tokens)
    objective = LatencyObjective(ttft_s=ttft_s)
    held = ran(monkeypatch, replace(HELD, hold=HoldConfig(objective=objective)), num_prompts, num_tokens)
    assert (held.num_steps, held.duration_s) == (bare.num_steps, bare.duration_s)
    ((its, others),) = zip(held.prompt_tokens.values(), bare.prompt_tokens.values(), strict=True)
    assert sum(max(0, other - own) for own, other in zip(its, others, strict=True)) < num_tokens


def test_short_prompts_fill_the_steps_of_several_replicas_too(monkeypatch: pytest.MonkeyPatch) -> None:
    several = {"num_replicas": 3}
    bare = ran(monkeypatch, replace(SENT_AT_ONCE, **several), 192, 64)  # type: ignore[arg-type]
    held = ran(monkeypatch, replace(HELD, **several), 192, 64)  # type: ignore[arg-type]
    assert held.num_steps <= bare.num_steps + 1
    for steps in held.prompt_tokens.values():  # apart from the first and last: full, but for the decodes beside
        assert min(steps[1:-2]) >= 512 - 64 - 64
