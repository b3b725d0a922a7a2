"""What ends a command besides Ctrl-C."""

from __future__ import annotations

import signal
import sys

ENDING = (signal.SIGTERM, signal.SIGHUP)


def exit_on_signals() -> None:
    """Let SIGTERM and SIGHUP end the process as an exit does, so that cleanup runs and ends what was started."""
    for number in ENDING:
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
