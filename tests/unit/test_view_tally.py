"""Predicted cache hits compared with those found, with real engines and feeds."""

from __future__ import annotations

import asyncio

from fixtures.fake_serve import ask, serving
from fixtures.waiting import until


async def test_predicted_hits_are_those_found_when_prompts_follow_each_other() -> None:
    async with serving("a", "b") as serve:
        for turn in range(1, 7):
            for conversation in range(3):
                prompt = range(1000 * conversation, 1000 * conversation + 9 * turn)
                await ask(serve, f"call-{turn}-{conversation}", prompt_token_ids=prompt)
        quality = serve.ledger.view_tally.quality()
        assert quality.num_requests == 18
        assert quality.num_prompt_tokens == 3 * sum(9 * turn for turn in range(1, 7))
        assert quality.num_predicted_tokens == quality.num_cached_tokens > quality.num_prompt_tokens / 2


async def test_a_prefix_on_its_way_counts_for_those_behind_it() -> None:
    """The prefix is long: computing it again costs more than sharing steps with three requests that have it."""
    prefix, own = range(800), 4
    async with serving("a", "b", num_blocks=400, max_model_len=1000) as serve:
        for made in serve.replicas.values():
            made.executor.gate.clear()
        first = asyncio.create_task(ask(serve, "first", prompt_token_ids=[*prefix, *range(900, 900 + own)]))
        await until(lambda: any(made.executor.is_held for made in serve.replicas.values()))
        behind = [
            asyncio.create_task(ask(serve, f"behind{i}", prompt_token_ids=[*prefix, *range(1000 * i, 1000 * i + own)]))
            for i in range(1, 4)
        ]
        await until(lambda: len(serve.ledger.routes) == 4)
        owner = serve.taken_by("first")
        assert all(serve.taken_by(f"behind{i}") == owner for i in range(1, 4)), "they follow what is being computed"
        for made in serve.replicas.values():
            made.executor.gate.set()
        await asyncio.gather(first, *behind)
        quality = serve.ledger.view_tally.quality()
        assert quality.num_predicted_tokens == quality.num_cached_tokens == 3 * len(prefix)
        assert quality.age_p99_s < 1.0
