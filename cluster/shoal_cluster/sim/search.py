"""Searches that probe one point after another, with the probes that may come next running ahead on idle cores."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar

import psutil

from shoal_cluster.sim.channel import num_cores

Point = TypeVar("Point", bound=float)
Found = TypeVar("Found", bound=float)

Tell = Callable[[int], None]
"""Called with the number of requests of a probe that have ended."""

Probe = Callable[[Point, Tell], bool]
Find = Callable[[Callable[[Point], bool]], Found]
"""A search: asks whether points are good and depends on nothing but the answers, so it can be run again."""

IDLE_LOOK_S = 0.1


def search_ahead(
    find: Find[Point, Found], probe: Probe[Point], on_probe: Callable[[Point, bool], None], tell: Tell
) -> Found:
    """Run ``find`` with probes in processes of their own: the one it asks for, and those it may ask for next. The
    result and the calls of ``on_probe`` are the same as if the probes had run one after the other.

    Raises:
        RuntimeError: the process of a probe that was asked for has died.
        Exception: whatever such a probe raised.
    """
    known: dict[Point, bool] = {}
    num_told = 0
    with _Runs(probe, tell) as runs:
        while points := points_ahead(find, known, num_cores()):
            known |= runs.more(points)
            asked, _ = _follow(find, known)
            for point in asked[num_told:]:
                on_probe(point, known[point])
            num_told = len(asked)
    return find(known.__getitem__)


class _Unknown(Exception):
    def __init__(self, point: float) -> None:
        super().__init__(point)
        self.point = point


def points_ahead(find: Find[Point, Found], known: Mapping[Point, bool], count: int) -> list[Point]:
    """Up to ``count`` points: the one that ``find`` asks for next given what is ``known``, then those that it may ask
    for afterwards, soonest first. Empty if ``find`` needs no more answers.
    """
    points: list[Point] = []
    cases: deque[dict[Point, bool]] = deque([dict(known)])
    while cases and len(points) < count:
        case = cases.popleft()
        _, point = _follow(find, case)
        if point is None:
            continue
        if point not in points:
            points.append(point)
        cases += {**case, point: True}, {**case, point: False}
    return points


def _follow(find: Find[Point, Found], known: Mapping[Point, bool]) -> tuple[list[Point], Point | None]:
    """The points that ``find`` has asked for so far, in order, and the next one: None if it needs no more."""
    asked: list[Point] = []

    def look_up(point: Point) -> bool:
        if point not in known:
            raise _Unknown(point)
        asked.append(point)
        return known[point]

    try:
        find(look_up)
    except _Unknown as unknown:
        point: Point = unknown.point  # type: ignore[assignment]
        return asked, point
    return asked, None


class _Run(NamedTuple):
    process: BaseProcess
    side: Connection


class _Ended(NamedTuple):
    outcome: bool | Exception


class _Runs(Generic[Point]):
    """The running probes, each in a forked process of its own. Leaving the context ends them."""

    def __init__(self, probe: Probe[Point], tell: Tell) -> None:
        self._probe = probe
        self._tell = tell
        self._running: dict[Point, _Run] = {}

    def __enter__(self) -> _Runs[Point]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for point in [*self._running]:
            self._end(point)

    def more(self, points: Sequence[Point]) -> dict[Point, bool]:
        """Wait for results of some of ``points``. Always runs the first point, the others as far as cores are idle, and
        ends the probes of all other points.
        """
        for point in self._running.keys() - set(points):
            self._end(point)
        first, *later = points
        if first not in self._running:
            self._begin(first)
        missing = [point for point in later if point not in self._running]
        for point in missing[: num_idle_cores() if missing else 0]:
            self._begin(point)
        results: dict[Point, bool] = {}
        while not results:
            for side in wait([run.side for run in self._running.values()]):
                point = next(point for point, run in self._running.items() if run.side is side)
                outcome = self._hear(point, is_wanted=point == first)
                if outcome is not None:
                    results[point] = outcome
        return results

    def _hear(self, point: Point, is_wanted: bool) -> bool | None:
        """Read a message of a probe: its result, or None if it has none (yet)."""
        try:
            message: int | _Ended = self._running[point].side.recv()
        except (EOFError, ConnectionError):
            self._end(point)
            if is_wanted:
                raise RuntimeError(
                    f"the process of the run for {point} has gone; there may have been no memory left for it"
                ) from None
            return None  # it is started again if it is asked for, with fewer probes beside it
        if isinstance(message, int):
            if is_wanted:
                self._tell(message)
            return None
        self._end(point)
        if isinstance(message.outcome, bool):
            return message.outcome
        if is_wanted:
            raise message.outcome
        return None

    def _begin(self, point: Point) -> None:
        here, there = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_run, args=(self._probe, point, there), daemon=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))  # a Ctrl-C must not interrupt the fork
        try:
            process.start()
            self._running[point] = _Run(process, here)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            there.close()

    def _end(self, point: Point) -> None:
        process, side = self._running.pop(point)
        side.close()
        process.kill()
        process.join()


def num_idle_cores() -> int:
    """How many cores are idle now, measured over ``IDLE_LOOK_S``."""
    return round(num_cores() * (1 - psutil.cpu_percent(IDLE_LOOK_S) / 100))


# In the other process


def _run(probe: Probe[Point], point: Point, side: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    try:
        outcome: bool | Exception = probe(point, side.send)
    except BrokenPipeError:
        return  # the result is not wanted any more
    except Exception as error:
        outcome = _portable(error)
    side.send(_Ended(outcome))


def _portable(error: Exception) -> Exception:
    """The error itself with its traceback as a note, or a RuntimeError of the traceback if it cannot be pickled."""
    told = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(told)
    error.add_note(told)
    return error
