"""The autoscalers that Shoal's is compared with behave as their projects document."""

from __future__ import annotations

from collections.abc import Callable

from fixtures.cluster_views import make_row, make_stats

from shoal_cluster.policies.autoscaling_baselines import Past, hpa, kpa, num_ongoing, serve_default, threshold
from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.autoscaling_view import Demand, ScaleView

CONFIG = ScaleConfig(max_replicas=40, target_utilization=0.5)
Policy = Callable[[ScaleView, Past, ScaleConfig, float], tuple[int, Past]]


def view(count: int, running: int = 0, waiting: int = 0, used: int = 0, held: int = 0) -> ScaleView:
    """``count`` replicas of 100 blocks, each with the given sequences and used blocks."""
    stats = make_stats(num_running=running, num_waiting=waiting, num_free_blocks=100 - used)
    rows = tuple(make_row(f"r{i}", stats=stats, num_reserved=1) for i in range(count))
    return ScaleView(replicas=rows, num_target=count, demand=Demand(num_held=held))


def story(policy: Policy, *phases: tuple[ScaleView, int]) -> list[tuple[int, int]]:
    """(second, count) of each change that ``policy`` wants. Each view is shown once a second for its duration."""
    past, changes, now = Past(), [], 0
    for seen, seconds in phases:
        for _ in range(seconds):
            count, past = policy(seen, past, CONFIG, float(now))
            if count != seen.num_target:
                changes.append((now, count))
            now += 1
    return changes


def test_ongoing_requests_are_all_that_have_not_ended() -> None:
    assert num_ongoing(view(2, running=3, waiting=4, held=5)) == 2 * (3 + 4 + 1) + 5


def test_serve_waits_half_a_minute_to_grow_and_ten_to_shrink() -> None:
    assert story(serve_default, (view(1, running=9), 45))[0] == (30, 5)
    changes = story(serve_default, (view(8), 650))
    assert changes[0] == (600, 4)  # each has one request on its way
    assert story(serve_default, (view(8, running=1), 900)) == []


def test_hpa_follows_the_ratio_outside_its_tolerance() -> None:
    assert story(hpa, (view(4, used=54), 60)) == []
    assert story(hpa, (view(4, used=75), 1)) == [(0, 6)]
    assert story(hpa, (view(10, used=100), 1)) == [(0, 20)]
    changes = story(hpa, (view(4, used=50), 15), (view(4, used=10), 400))
    assert changes[0] == (315, 1)  # at second 15 the mean still asked for 4, and that counts for 300 s


def test_kpa_panics_on_a_burst_and_then_only_grows() -> None:
    def policy(seen: ScaleView, past: Past, config: ScaleConfig, now: float) -> tuple[int, Past]:
        return kpa(seen, past, config, now, 10.0)

    calm = story(policy, (view(2, running=9), 120))
    assert calm == []
    changes = story(policy, (view(2, running=9), 120), (view(2, running=99), 10), (view(20), 50))
    assert changes[0][0] <= 126
    assert all(count >= 4 for _, count in changes)


def test_the_threshold_rule_needs_both_a_full_cluster_and_a_long_queue() -> None:
    assert story(threshold, (view(2, used=90, waiting=50), 30)) == []
    assert story(threshold, (view(2, used=90, waiting=51), 11)) == [(0, 3), (10, 3)]
    assert story(threshold, (view(2, used=70, waiting=90), 30)) == []
    assert story(threshold, (view(2, used=39), 11)) == [(0, 1), (10, 1)]
