"""Settings that may change while replicas run: limits, schedules, tuning."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from shoal_cluster.config import ClusterConfig
from shoal_cluster.policies.autoscaling import desired_replicas
from shoal_cluster.policies.autoscaling_config import LIMITS, ScaleConfig, Schedule, tunable
from shoal_cluster.policies.autoscaling_state import ScaleState
from shoal_cluster.policies.autoscaling_view import ScaleView
from shoal_replica.errors import ConfigError, InvalidArgument

OFFICE = Schedule(cron="30 7 * * 1-5", duration_s=3600, min_replicas=4, timezone="Europe/Berlin")


def berlin(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo("Europe/Berlin")).timestamp()


@pytest.mark.parametrize(
    ("when", "holds"),
    [
        ("2026-03-02T07:29:59", False),  # a Monday
        ("2026-03-02T07:30:00", True),
        ("2026-03-02T08:29:59", True),
        ("2026-03-02T08:30:00", False),
        ("2026-03-01T07:45:00", False),  # a Sunday
        ("2026-07-06T07:45:00", True),  # summer time
    ],
)
def test_a_schedule_holds_for_its_duration(when: str, holds: bool) -> None:
    assert OFFICE.holds_at(berlin(when)) is holds


def test_replicas_are_asked_for_a_start_up_time_before() -> None:
    config = ScaleConfig(max_replicas=8, schedules=(OFFICE,))
    assert config.scheduled_replicas(berlin("2026-03-02T07:29:00"), ahead_s=30.0) == 0
    assert config.scheduled_replicas(berlin("2026-03-02T07:29:40"), ahead_s=30.0) == 4


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cron": "x"}, "got cron 'x'"),
        ({"cron": "0 0 31 2 *"}, "a date that comes"),
        ({"timezone": "Mars/Olympus"}, "got timezone 'Mars/Olympus'"),
        ({"timezone": "../etc/passwd"}, "got timezone"),
        ({"timezone": "America"}, "got timezone 'America'; must be a name such as UTC"),
        ({"duration_s": 5}, "must be from 60 to 31622400"),
        ({"duration_s": float("nan")}, "must be from 60 to 31622400"),
        ({"duration_s": float("inf")}, "must be from 60 to 31622400"),
        ({"min_replicas": 1.5}, "must be a whole number from 1 to 1000"),
        ({"min_replicas": 0}, "must be a whole number from 1 to 1000"),
    ],
)
def test_a_schedule_that_cannot_hold_is_refused(fields: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Schedule(**({"cron": "0 0 * * *", "duration_s": 60, "min_replicas": 1} | fields))


@pytest.mark.parametrize("name", LIMITS)
def test_each_limit_is_kept(name: str) -> None:
    for value in (-1.0, 1e9, float("nan"), float("inf")):
        with pytest.raises(InvalidArgument, match=rf"{name}: got .*; must be from"):
            ScaleConfig(max_replicas=4).tuned({name: value})


def test_tuning_changes_what_it_names() -> None:
    config = ScaleConfig(min_replicas=1, max_replicas=4)
    tuned = config.tuned({"max_replicas": 6.0, "downscale_delay_s": 5})
    assert tunable(tuned) == tunable(config) | {"max_replicas": 6, "downscale_delay_s": 5}
    assert isinstance(tuned.max_replicas, int)
    for changes, words in (
        ({"max_replicas": 0.5}, "must be from 1"),
        ({"max_replicas": 2.5}, "must be a whole number"),
        ({"min_replicas": 5}, "min_replicas: got 5; must be at most max_replicas"),
        ({"max_age": 1}, "setting: got 'max_age'"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            config.tuned(changes)


def test_scaling_in_the_yaml() -> None:
    schedule = {"cron": "0 8 * * *", "duration_s": 60, "min_replicas": 2}
    config = ClusterConfig.from_args(
        {
            "model": "m",
            "scaling": {"min_replicas": 0, "max_replicas": 2, "schedules": [schedule]},
            "objective": {"ttft_s": 1.5},
        }
    )
    assert config.scale_config().schedules == (Schedule(**schedule),)  # type: ignore[arg-type]
    assert config.scale_config().ttft_objective_s == 1.5
    changed = config.with_scaling({"max_replicas": 3})
    assert (changed.scale_config().max_replicas, changed.scale_config().schedules) == (
        3,
        config.scale_config().schedules,
    )
    with pytest.raises(ConfigError, match=r"scaling\.mx: unknown key"):
        config.with_scaling({"mx": 3})


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"objective": {"ttft_s": 5000}}, r"objective\.ttft_s: got 5000; .*less than or equal to 3600"),
        ({"objective": {"ttft_s": 0.001}}, r"objective\.ttft_s: got 0\.001; .*greater than or equal to 0\.01"),
        (
            {"scaling": {"max_replicas": 3, "schedules": [{"cron": "0 8 * * *", "duration_s": 60, "min_replicas": 5}]}},
            r"scaling\.schedules: got min_replicas 5; must be at most max_replicas \(3\)",
        ),
    ],
)
def test_an_error_names_the_key_of_the_yaml(args: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ClusterConfig.from_args({"model": "m"} | args)


def test_a_maximum_tuned_below_a_schedule_caps_it() -> None:
    config = ScaleConfig(max_replicas=8, schedules=(OFFICE,)).tuned({"max_replicas": 2})
    decision = desired_replicas(ScaleView(replicas=(), num_target=1), ScaleState(), config, berlin("2026-03-02T08:00"))
    assert decision.num_replicas == 2
    assert decision.reason.startswith("up: from 2, by schedule to 2 replicas are allowed")
