from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from shoal_cluster.serve import succession
from shoal_cluster.serve.succession import Succession
from shoal_replica.errors import Unavailable


class FakeServe:
    """Tells what replicas a gateway's deployment has, one answer after the other; the last one again and again."""

    def __init__(self, *answers: dict[str, str] | None, num_wanted: int = 1) -> None:
        self._answers = list(answers)
        self._num_wanted = num_wanted
        self.num_asked = 0

    async def __call__(self) -> Mapping[str, Any]:
        answer = self._answers[min(self.num_asked, len(self._answers) - 1)]
        self.num_asked += 1
        if answer is None:
            raise Unavailable("no controller")
        replicas = [{"replica_id": name, "state": state, "start_time_s": 0.0} for name, state in answer.items()]
        told = {"target_num_replicas": self._num_wanted, "status": "UPDATING", "status_trigger": "", "message": ""}
        deployments = {"Gateway": told | {"replicas": replicas}}
        return {"applications": {"shoal": {"last_deployed_time_s": 0.0, "deployments": deployments}}}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "LOOK_S", 0.0)


def of(serve: FakeServe, application: str = "shoal") -> Succession:
    return Succession(serve, application, "Gateway", "own")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [({"own": "STARTING"}, False), ({"own": "STARTING", "old": "STOPPING"}, True), ({}, False), (None, False)],
)
async def test_peers_are_the_other_gateways_in_whatever_state(answer: dict[str, str] | None, expected: bool) -> None:
    assert await of(FakeServe(answer)).has_peers() is expected


async def test_it_accepts_calls_until_its_successor_runs() -> None:
    serve = FakeServe(
        {"own": "STOPPING"},
        {"own": "STOPPING", "new": "STARTING"},
        {"own": "STOPPING", "new": "STARTING"},
        {"own": "STOPPING", "new": "RUNNING"},
    )
    await of(serve).until_succeeded()
    assert serve.num_asked == 4


@pytest.mark.parametrize("serve", [FakeServe({"own": "STOPPING"}, num_wanted=0), FakeServe(None)])
async def test_it_waits_for_none_where_none_is_to_come_or_serve_is_gone(serve: FakeServe) -> None:
    await of(serve).until_succeeded()
    assert serve.num_asked == 1
    await of(serve, "another").until_succeeded()


async def test_a_successor_that_does_not_start_is_not_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "OVERLAP_S", 0.05)
    async with asyncio.timeout(5):
        await of(FakeServe({"own": "STOPPING", "new": "STARTING"})).until_succeeded()
