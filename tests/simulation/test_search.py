"""Searches whose probes run ahead, against searches that run one probe after the other."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_cluster.sim import search
from shoal_cluster.sim.capacity import MAX_SPEED, _fastest, _fewest
from shoal_cluster.sim.search import points_ahead, search_ahead
from shoal_replica.errors import ConfigError

Tell = Callable[[int], None]


@pytest.fixture(autouse=True, params=[0, 3])
def idle_cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(search, "num_idle_cores", lambda: request.param)
    monkeypatch.setattr(search, "num_cores", lambda: 4)
    yield request.param
    assert not multiprocessing.active_children()


def fewest(is_carried: Callable[[int], bool]) -> int:
    return _fewest(is_carried, 40)


def in_turn(is_good: Callable[[int], bool]) -> tuple[int, list[tuple[int, bool]]]:
    told: list[tuple[int, bool]] = []

    def probe(count: int) -> bool:
        told.append((count, is_good(count)))
        return is_good(count)

    return fewest(probe), told


@pytest.mark.parametrize("good", [{*range(13, 41)}, {*range(1, 41)}, set(), {40}, {3, 9, 20, 21, 40}])
def test_it_finds_and_tells_what_it_does_in_turn(good: set[int]) -> None:
    told: list[tuple[int, bool]] = []
    done: list[int] = []

    def probe(count: int, tell: Tell) -> bool:
        tell(count)
        time.sleep(count % 3 * 0.02)  # probes end in another order than the search asks for them
        return count in good

    found = search_ahead(fewest, probe, lambda count, ok: told.append((count, ok)), done.append)
    assert (found, told) == in_turn(good.__contains__)
    assert {*done} <= {count for count, _ in told}, "nobody hears of those that nobody asks for"


@given(st.dictionaries(st.integers(1, 40), st.booleans()))
def test_what_may_come_next_is_ahead(known: dict[int, bool]) -> None:
    points = points_ahead(fewest, known, 9)
    assert not {*points} & {*known}
    assert all(points_ahead(fewest, known, count) == points[:count] for count in range(1, 9))
    for answer in (False, True):
        after = points_ahead(fewest, known | dict.fromkeys(points[:1], answer), 1)
        assert {*after} <= {*points[:3]}


def test_speeds_come_in_the_order_that_they_may_be_asked_for() -> None:
    speeds = points_ahead(lambda is_carried: _fastest(is_carried, 0.1), {1.0: True, 2.0: False}, 7)
    assert speeds == [1.5, 1.75, 1.25, 1.875, 1.625, 1.375, 1.125]


def test_the_slowest_speed_that_is_tried_counts() -> None:
    slowest = 1 / MAX_SPEED
    assert _fastest(lambda speed: speed <= slowest, 0.02) == pytest.approx(slowest, rel=0.02)
    assert _fastest(lambda speed: False, 0.02) == 0.0


def test_an_error_in_one_that_is_asked_for_is_the_searchs() -> None:
    def probe(count: int, tell: Tell) -> bool:
        if count == 4:
            raise ConfigError("replicas: got 4; must be odd")
        if count > 4:
            raise KeyError("nobody asks for it before")
        return False

    with pytest.raises(ConfigError, match="must be odd") as error:
        search_ahead(fewest, probe, lambda *_: None, lambda *_: None)
    assert "in probe" in error.value.__notes__[0]


def test_an_error_that_cannot_be_sent_is_told() -> None:
    class Local(Exception): ...

    def probe(count: int, tell: Tell) -> bool:
        raise Local("nobody else knows it")

    with pytest.raises(RuntimeError, match="nobody else knows it"):
        search_ahead(fewest, probe, lambda *_: None, lambda *_: None)


def test_one_that_is_killed_runs_again_if_it_was_ahead(idle_cores: int, tmp_path: str) -> None:
    def probe(count: int, tell: Tell) -> bool:
        mark = os.path.join(tmp_path, str(count))
        if count == 2 and not os.path.exists(mark):
            os.close(os.open(mark, os.O_CREAT))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.3 if count == 1 else 0.0)
        return count >= 3

    if idle_cores:
        assert search_ahead(fewest, probe, lambda *_: None, lambda *_: None) == 3
    else:
        with pytest.raises(RuntimeError, match="the process of the run for 2 has gone"):
            search_ahead(fewest, probe, lambda *_: None, lambda *_: None)


def test_who_breaks_off_leaves_nobody_behind() -> None:
    def probe(count: int, tell: Tell) -> bool:
        tell(count)
        time.sleep(60.0)
        return True

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search_ahead(fewest, probe, lambda *_: None, interrupt)


def test_as_many_run_as_cores_are_idle(idle_cores: int) -> None:
    most: list[int] = []

    def probe(count: int, tell: Tell) -> bool:
        time.sleep(0.1)
        return count >= 30

    search_ahead(fewest, probe, lambda *_: most.append(len(multiprocessing.active_children())), lambda *_: None)
    assert max(most) <= idle_cores * 2 + 1
    assert (max(most) > 0) == (idle_cores > 0)
