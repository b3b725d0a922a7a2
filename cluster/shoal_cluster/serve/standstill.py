"""Ends a process whose event loop stands still, so that Serve starts another.

Serve finds a hung process by its health check, but then lets it drain: it would keep its port, or its device and the
streams on it, for as long as a drain may take.
"""

from __future__ import annotations

import asyncio
import faulthandler
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

STANDSTILL_S = 30.0
"""As long as Serve takes to call a replica unhealthy: three checks of ten seconds."""


async def end_at_standstill(log: Path) -> None:
    """Until cancelled: if the running event loop does not turn for ``STANDSTILL_S``, end the process, also while native
    code holds the interpreter. Then, and when the process crashes, the stacks of its threads are appended to ``log``:
    standard error is lost where Ray rotates logs, as a thread of the process itself carries it to its file.
    """
    file: TextIO | None = None
    try:
        while True:
            former = file
            with suppress(OSError):  # say there are no free descriptors: then the former one has to do
                file = log.open("a")  # anew each time: it may have been rotated
            faulthandler.enable(file or sys.stderr)
            faulthandler.dump_traceback_later(STANDSTILL_S, exit=True, file=file or sys.stderr)
            if former is not None and former is not file:
                former.close()
            await asyncio.sleep(STANDSTILL_S / 10)
    finally:
        faulthandler.cancel_dump_traceback_later()
        faulthandler.enable()
