from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LOOP = """
import asyncio, ctypes, os, pathlib, time
from shoal_cluster.serve import standstill

async def main():
    standstill.STANDSTILL_S = 1.0
    log = pathlib.Path({log!r})
    watch = asyncio.create_task(standstill.end_at_standstill(log))
    await asyncio.sleep(0.5)
    log.rename(log.with_suffix(".1"))
    await asyncio.sleep(1.0)
    {work}
    watch.cancel()
    await asyncio.wait([watch])
    time.sleep(1.5)
    print("the end")

asyncio.run(main())
"""


def run(log: Path, work: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LOOP.format(log=str(log), work=work)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_loop_that_turns_goes_on_and_so_does_one_that_is_watched_no_more(tmp_path: Path) -> None:
    done = run(tmp_path / "log", "pass")
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")
    assert (tmp_path / "log").read_text() == ""


def test_a_moment_without_file_descriptors_does_not_end_the_watch(tmp_path: Path) -> None:
    work = (
        "import resource; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard)); await asyncio.sleep(1.0); assert not watch.done()"
    )
    done = run(tmp_path / "log", work)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")


@pytest.mark.parametrize("work", ["time.sleep(30)", "ctypes.PyDLL(None).usleep(30_000_000)"])
def test_one_that_stands_still_ends_with_its_stacks_in_the_log(tmp_path: Path, work: str) -> None:
    """Also where the interpreter is held meanwhile, and where the log has been rotated."""
    done = run(tmp_path / "log", work)
    assert done.returncode == 1
    told = (tmp_path / "log").read_text()
    assert "Timeout" in told
    assert "in main" in told


def test_a_crash_has_its_stacks_there_too(tmp_path: Path) -> None:
    done = run(tmp_path / "log", "os.kill(os.getpid(), 11)")
    assert done.returncode == -11
    assert "in main" in (tmp_path / "log").read_text()
