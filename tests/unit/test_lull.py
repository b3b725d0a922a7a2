import asyncio

import pytest

from shoal_cluster.serve import lull
from shoal_cluster.serve.lull import Lull


@pytest.fixture(autouse=True)
def _slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lull, "BEHIND_S", 0.05)
    monkeypatch.setattr(lull, "BURST_S", 0.5)


async def waited_s(held: Lull, *arrivals_s: float) -> list[float]:
    """How long each waits that comes so many seconds from now."""
    loop = asyncio.get_running_loop()

    async def come(arrival_s: float) -> float:
        await asyncio.sleep(arrival_s)
        begin_s = loop.time()
        await held.after_this()
        return loop.time() - begin_s

    return await asyncio.gather(*map(come, arrivals_s))


async def test_who_comes_alone_waits_for_a_moment_only() -> None:
    held = Lull()
    assert 0.05 <= (await waited_s(held, 0.0))[0] < 0.5
    assert 0.05 <= (await waited_s(held, 0.6))[0] < 0.5


async def test_a_burst_waits_until_it_has_been_read_the_first_of_it_too() -> None:
    assert min(await waited_s(Lull(), 0.0, 0.0, 0.01, 0.1)) >= 0.5


async def test_who_has_gone_on_when_the_next_one_comes_was_alone() -> None:
    first, second = await waited_s(Lull(), 0.0, 0.3)
    assert first < 0.5 <= second
