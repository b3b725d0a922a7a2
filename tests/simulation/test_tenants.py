"""Tenants of very different weight on one cluster."""

from __future__ import annotations

import pytest
from benchmarks.tenants_sim import alike, felt


def test_a_light_tenant_hardly_feels_a_heavy_one() -> None:
    """The heavy one asks for more than the cluster can do, and has all that the light one leaves."""
    result = felt(duration_s=40.0, seed=0)
    assert result.p99_ratio <= 1.25
    assert result.light.p50 <= 1.15 * result.alone.p50
    assert result.duration_s <= 46.0, "572 prompts take 40.8 s of four replicas that never rest, in whole steps"


@pytest.mark.parametrize("num_tenants", [5, 20, 300])
def test_fairness_among_tenants_that_ask_alike_costs_next_to_nothing(num_tenants: int) -> None:
    """Somewhat more is asked than can be in time: 20 such tenants had 0.74 in the objective where one has 0.96, when
    each debt put a request behind all that were due.
    """
    one, many = alike(num_tenants, 16.0, 400, seed=3)
    assert many >= one - 0.03
