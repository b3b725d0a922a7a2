"""What cannot be simulated is refused before the run, by name."""

from __future__ import annotations

from typing import Any

import pytest

from shoal_cluster.policies.autoscaling_baselines import NEVER_FROM_ZERO, SCALINGS, Scaling
from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.sim.config import ScalingPlan, SimConfig
from shoal_cluster.sim.run import simulate
from shoal_cluster.sim.workload import SimRequest
from shoal_replica.config import CacheConfig
from shoal_replica.errors import ConfigError

CACHE = CacheConfig(num_blocks=100)
FROM_ZERO = ScaleConfig(min_replicas=0, max_replicas=3, downscale_delay_s=0.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_replicas": 0}, "num_replicas: got 0; must be an integer of at least 1"),
        ({"num_gateways": 0}, "num_gateways: got 0; must be an integer of at least 1"),
        ({"feed_delay_s": -1.0}, r"feed_delay_s: got -1\.0; must be finite and at least 0"),
        ({"heartbeat_s": 0.0}, r"heartbeat_s: got 0\.0; must be finite and above 0"),
        ({"transfer_s": 0.0}, r"transfer_s: got 0\.0; must be finite and above 0"),
        ({"transfer_s": float("nan")}, "transfer_s: got nan; must be finite and above 0"),
        ({"prefill_share": 1.0, "transfer_s": 1.0}, r"prefill_share: got 1\.0; must be at least 0 and below 1"),
        ({"prefill_share": 0.5}, r"prefill_share: got 0\.5; must be 0 without transfer_s"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SimConfig(**({"num_replicas": 1, "cache": CACHE} | changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"interval_s": 0.0}, r"interval_s: got 0\.0; must be finite and above 0"),
        ({"requests_per_replica": 0.0}, r"requests_per_replica: got 0\.0; must be finite and above 0"),
        ({"startup_s": float("inf")}, "startup_s: got inf; must be finite and at least 0"),
        ({"drain_timeout_s": -1.0}, r"drain_timeout_s: got -1\.0; must be finite and at least 0"),
        ({"policy": "hpa"}, "min_replicas: got 0; must be an integer of at least 1 under hpa, which never leaves 0"),
        ({"policy": "threshold"}, "min_replicas: got 0; must be .* under threshold, which never leaves 0"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ScalingPlan(config=FROM_ZERO, **changes)


@pytest.mark.parametrize("policy", [name for name in SCALINGS if name not in NEVER_FROM_ZERO])
def test_policies_that_see_what_is_held_start_from_no_replica(policy: Scaling) -> None:
    requests = [SimRequest(f"r{i}", 300.0 * i, ((i, 10),), 5) for i in range(2)]
    plan = ScalingPlan(config=FROM_ZERO, policy=policy, startup_s=1.0)
    config = SimConfig(num_replicas=0, cache=CACHE, scaling=plan, hold=HoldConfig())
    assert simulate(config, requests).num_finished == 2


@pytest.mark.parametrize("policy", NEVER_FROM_ZERO)
def test_policies_that_see_replicas_alone_start_from_one_at_least(policy: Scaling) -> None:
    plan = ScalingPlan(config=ScaleConfig(), policy=policy)
    with pytest.raises(ConfigError, match="num_replicas: got 0; must be an integer of at least 1"):
        SimConfig(num_replicas=0, cache=CACHE, scaling=plan, hold=HoldConfig())


@pytest.mark.parametrize(
    ("runs", "num_output_tokens", "says"),
    [
        ((), 5, "prompt_runs: got 0 tokens in request 'x'; must be at least 1"),
        (((1, 0),), 5, "prompt_runs: got 0 tokens in request 'x'; must be at least 1"),
        (((1, 9),), 0, "num_output_tokens: got 0 tokens in request 'x'; must be at least 1"),
    ],
)
def test_a_request_without_tokens_is_refused(
    runs: tuple[tuple[int, int], ...], num_output_tokens: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        SimRequest("x", 0.0, runs, num_output_tokens)
