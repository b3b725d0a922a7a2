"""How many replicas an application that is deployed anew starts with."""

from __future__ import annotations

from typing import Any

import pytest
from fixtures.fake_gateway import example_scale_record

from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.serve.redeployment import application_built_from, first_count, is_there, kept_count

pytestmark = pytest.mark.integration  # needs Ray's types, but no cluster
ARGS = {"model": "demo", "gateway": {"cors_origins": ["*"]}}
BASE = ScaleConfig(min_replicas=2, max_replicas=8)


def application(status: str, args: dict[str, Any] | None) -> dict[str, Any]:
    return {"status": status, "deployed_app_config": None if args is None else {"args": args}}


def details(**applications: dict[str, Any]) -> dict[str, Any]:
    return {"applications": applications}


def test_the_application_is_the_one_that_is_deployed_from_these_arguments():
    serving = application("RUNNING", ARGS)
    other = application("DEPLOYING", ARGS | {"model": "other"})
    bare = application("DEPLOYING", None)
    own = application("DEPLOYING", {"gateway": {"cors_origins": ["*"]}, "model": "demo"})
    assert application_built_from(ARGS, details(a=serving, b=other, c=bare, d=own)) == "d"
    assert application_built_from(ARGS, details(a=serving, b=other, c=bare)) is None
    assert application_built_from(ARGS, details(d=own, e=own)) is None, "which of both, nobody knows"
    assert application_built_from({}, details(c=bare)) == "c"


@pytest.mark.parametrize(("num_before", "num_after"), [(0, 2), (1, 2), (5, 5), (9, 9)])
def test_as_many_as_before_but_no_fewer_than_the_fewest(num_before: int, num_after: int):
    assert kept_count(example_scale_record(num_after=num_before), BASE) == num_after


def test_a_first_deployment_starts_with_the_fewest():
    assert first_count(ARGS, BASE) == 2, "there is no cluster to ask"
    assert kept_count(None, BASE) == 2


def test_what_is_left_of_another_application_does_not_count():
    assert is_there("shoal", ["SERVE_CONTROLLER_ACTOR", "SERVE_REPLICA::shoal#Gateway#k2m9x4qz"])
    assert not is_there("shoal", ["SERVE_CONTROLLER_ACTOR", "SERVE_REPLICA::shoal-2#Gateway#k2m9x4qz"])
