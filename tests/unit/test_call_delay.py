import asyncio

import pytest

from shoal_cluster.serve import call_delay
from shoal_cluster.serve.call_delay import CallDelay


@pytest.fixture(autouse=True)
def _slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_delay, "BEHIND_S", 0.05)
    monkeypatch.setattr(call_delay, "BURST_S", 0.5)


async def waited_s(delay: CallDelay, *arrivals_s: float) -> list[float]:
    """How long each call waits, of calls that arrive ``arrivals_s`` seconds from now."""
    loop = asyncio.get_running_loop()

    async def come(arrival_s: float) -> float:
        await asyncio.sleep(arrival_s)
        begin_s = loop.time()
        await delay.wait()
        return loop.time() - begin_s

    return await asyncio.gather(*map(come, arrivals_s))


async def test_who_comes_alone_waits_for_a_moment_only() -> None:
    delay = CallDelay()
    assert 0.05 <= (await waited_s(delay, 0.0))[0] < 0.5
    assert 0.05 <= (await waited_s(delay, 0.6))[0] < 0.5


async def test_who_comes_with_others_waits_for_longer_the_first_of_them_too() -> None:
    assert min(await waited_s(CallDelay(), 0.0, 0.0, 0.01, 0.1)) >= 0.5


async def test_who_has_gone_on_when_the_next_one_comes_was_alone() -> None:
    first, second = await waited_s(CallDelay(), 0.0, 0.3)
    assert first < 0.5 <= second
