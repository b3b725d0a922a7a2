"""How long prompts take, as replicas measure it."""

from __future__ import annotations

import pytest
from fixtures.cluster_views import make_stats

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.objective import PrefillTime
from shoal_cluster.policies.pace import PACE_AGE_S, Pace
from shoal_cluster.policies.replica_view import ReplicaView

CONFIGURED = PrefillTime(tokens_per_s=1000.0, pair_s=1e-6)


def replicas(*token_s: float, connected: bool = True) -> Candidates:
    rows = [ReplicaView(replica_id=f"r{i}", stats=make_stats(token_s=s), connected=True) for i, s in enumerate(token_s)]
    rows.append(ReplicaView(replica_id="z", stats=make_stats(token_s=9.0, draining=connected), connected=connected))
    return Candidates.of(rows)


def test_it_is_as_configured_until_a_replica_has_measured() -> None:
    pace = Pace(CONFIGURED)
    assert not pace.look(replicas(0.0, 0.0), 0.0)
    assert pace.alone is CONFIGURED
    assert pace.seconds(50, 100) == (CONFIGURED.seconds(50, 100),) * 2


@pytest.mark.parametrize("connected", [True, False])
def test_it_is_the_mean_of_those_that_measured_and_alone_the_least_there_was(connected: bool) -> None:
    """A replica that has measured nothing yet, is not connected or drains does not count."""
    pace = Pace(CONFIGURED)
    assert pace.look(replicas(0.002, 0.004, 0.0, connected=connected), 0.0)
    assert pace.token_s == pytest.approx(0.003)
    alone_s = 0.2 + CONFIGURED.pair_s * (100 * 10 + 100 * 101 / 2)
    assert pace.seconds(10, 100) == pytest.approx((alone_s, 0.3))
    assert not pace.look(replicas(0.1), PACE_AGE_S / 2)
    assert pace.look(replicas(0.1), PACE_AGE_S)
    assert pace.token_s == pytest.approx(0.1)
    assert pace.alone.tokens_per_s == pytest.approx(500.0)


def test_the_pace_of_who_has_left_counts_no_more() -> None:
    pace = Pace(CONFIGURED)
    pace.look(replicas(0.01, 0.001), 0.0)
    assert pace.alone.tokens_per_s == pytest.approx(1000.0)
    assert pace.look(replicas(0.02), PACE_AGE_S)
    assert pace.alone.tokens_per_s == pytest.approx(100.0), "as the one that is left has measured before"


def test_a_little_faster_or_slower_is_no_other_pace_until_it_adds_up() -> None:
    pace = Pace(CONFIGURED)
    assert pace.look(replicas(0.1), 0.0)
    for look, token_s in enumerate((0.101, 0.1002, 0.1019), 1):
        assert not pace.look(replicas(token_s), look * PACE_AGE_S * 1.01)
        assert pace.token_s == 0.1
    assert pace.look(replicas(0.1021), 1.0)
    assert pace.token_s == 0.1021


def test_a_very_long_prompt_takes_no_less_than_alone() -> None:
    """The mean includes usual attention, 30 ms for 10 tokens; attending to 10 000 tokens before them takes 0.1 s."""
    pace = Pace(CONFIGURED)
    pace.look(replicas(0.002, 0.004), 0.0)
    alone_s, takes_s = pace.seconds(10_000, 10)
    assert takes_s == alone_s > 0.1
