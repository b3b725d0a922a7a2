"""Tenants of very different weight on one cluster."""

from __future__ import annotations

from benchmarks.tenants_sim import felt


def test_a_light_tenant_hardly_feels_a_heavy_one() -> None:
    """The heavy one asks for more than the cluster can do, and has all that the light one leaves."""
    result = felt(duration_s=40.0, seed=0)
    assert result.p99_ratio <= 1.25
    assert result.light.p50 <= 1.15 * result.alone.p50
    assert result.duration_s <= 46.0, "572 prompts take 40.8 s of four replicas that never rest, in whole steps"
