"""Long texts are worked on in threads of their own."""

from __future__ import annotations

import asyncio
import os
import threading

from fixtures.waiting import DEADLINE_S

from shoal_cluster.serve.long_texts import in_turn


async def test_however_many_there_are_other_work_finds_a_thread() -> None:
    may_end = threading.Event()
    texts = [
        asyncio.create_task(in_turn(may_end.wait, timeout=DEADLINE_S)) for _ in range(4 * (os.cpu_count() or 1) + 9)
    ]
    async with asyncio.timeout(DEADLINE_S / 2):
        assert await asyncio.to_thread(sum, (1, 2)) == 3
    may_end.set()
    assert all(await asyncio.gather(*texts))
