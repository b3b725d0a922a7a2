"""What goes to Ray's metrics agent. Ray's gauges are stood in for by ones that take what Ray's take: ASCII."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest

from shoal_cluster.serve.metrics import definitions as d
from shoal_cluster.serve.metrics import ray_export
from shoal_cluster.serve.metrics.ray_export import RayExport
from shoal_cluster.serve.metrics.tally import Point


class AsciiGauge:
    """Keeps what was set last, by name and labels."""

    values: dict[tuple[str, ...], float] = {}  # noqa: RUF012 - of all gauges, as Ray's agent has them

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self._name = name

    def set(self, value: float, tags: Mapping[str, str]) -> None:
        for text in tags.values():
            text.encode("ascii")
        if value < 0:
            raise RuntimeError("the agent is gone")
        self.values[self._name, *tags.values()] = value


@pytest.fixture(autouse=True)
def _gauges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_export, "Gauge", AsciiGauge)
    monkeypatch.setattr(AsciiGauge, "values", {})


def test_a_model_may_have_any_name() -> None:
    RayExport().publish([Point(d.REPLICA_MEMORY, ("caf\u00e9", "resident"), 5.0)])
    assert AsciiGauge.values == {(d.REPLICA_MEMORY.name, "caf\\xe9", "resident"): 5.0}


def test_what_ray_does_not_take_is_logged_once_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    export = RayExport()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            export.publish([Point(d.REPLICA_MEMORY, ("r", "resident"), -1.0)])
    assert [record.message for record in caplog.records] == ["metrics cannot be given to Ray"]
    export.publish([Point(d.REPLICA_MEMORY, ("r", "resident"), 7.0)])
    assert AsciiGauge.values == {(d.REPLICA_MEMORY.name, "r", "resident"): 7.0}
