"""Ctrl-C waits for the end of a step."""

from __future__ import annotations

import signal
import threading

import pytest

from shoal_replica.interrupts import uninterrupted

pytestmark = pytest.mark.usefixtures("ctrl_c")


def step(num_signals: int, done: list[str], error: Exception | None = None) -> None:
    with uninterrupted():
        for _ in range(num_signals):
            signal.raise_signal(signal.SIGINT)
        if error is not None:
            raise error
        done.append("step")


def test_the_first_waits_for_the_end_and_the_second_does_not() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        step(1, done)
    assert done == ["step"]
    with pytest.raises(KeyboardInterrupt):
        step(2, done)
    assert done == ["step"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_fails_meanwhile_is_raised_too() -> None:
    with pytest.raises(KeyboardInterrupt) as raised:
        step(1, [], ValueError("a step failed"))
    assert isinstance(raised.value.__context__, ValueError)


def test_other_threads_have_no_signals_to_wait_for() -> None:
    done: list[str] = []
    thread = threading.Thread(target=step, args=(0, done))
    thread.start()
    thread.join()
    assert done == ["step"]
