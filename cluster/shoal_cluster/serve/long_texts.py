"""Threads for what takes long by a text's length. However much of it there is, short work in asyncio's own threads goes
on: a gateway's reports to the autoscaler, what it asks Serve, requests with short prompts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_threads = ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="shoal-long-text")


async def in_turn(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of ``work`` in one of as many threads as there are cores; it waits while all of them are busy."""
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(work, *args, **kwargs))
