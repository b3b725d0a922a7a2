from __future__ import annotations

import subprocess
import sys

import pytest

LOOP = """
import asyncio, ctypes, time
from shoal_cluster.serve import standstill

async def main():
    standstill.STANDSTILL_S = 1.0
    watch = asyncio.create_task(standstill.end_at_standstill())
    await asyncio.sleep(1.5)
    {work}
    watch.cancel()
    await asyncio.wait([watch])
    time.sleep(1.5)
    print("the end")

asyncio.run(main())
"""


def run(work: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", LOOP.format(work=work)], capture_output=True, text=True, timeout=60)


def test_a_loop_that_turns_goes_on_and_so_does_one_that_is_watched_no_more() -> None:
    done = run("pass")
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")


@pytest.mark.parametrize("work", ["time.sleep(30)", "ctypes.PyDLL(None).usleep(30_000_000)"])
def test_one_that_stands_still_ends_with_its_stacks(work: str) -> None:
    """Also where the interpreter is held meanwhile."""
    done = run(work)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "in main" in done.stderr
