"""Ends a process whose event loop stands still, so that Serve starts another.

Serve finds a hung process by its health check, but then lets it drain: it would keep its port, or its device and the
streams on it, for as long as a drain may take.
"""

from __future__ import annotations

import asyncio
import faulthandler

STANDSTILL_S = 30.0
"""As long as Serve takes to call a replica unhealthy: three checks of ten seconds."""


async def end_at_standstill() -> None:
    """Until cancelled: if the running event loop does not turn for ``STANDSTILL_S``, write the stacks of all threads to
    stderr and end the process. Works while another thread, or native code, holds the interpreter.
    """
    try:
        while True:
            faulthandler.dump_traceback_later(STANDSTILL_S, exit=True)
            await asyncio.sleep(STANDSTILL_S / 10)
    finally:
        faulthandler.cancel_dump_traceback_later()
