"""Blocks that one engine has computed serve another: native kernels, torch's operators, several ranks."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

import pytest
from fixtures.tiny_tokenizer import write_tiny_tokenizer
from tiny_models import load_oracle, make_checkpoint, make_prompts, oracle_greedy

from shoal_replica import AsyncLLM, SamplingParams
from shoal_replica.build import resolve_config
from shoal_replica.config import ParallelConfig
from shoal_replica.errors import ConfigError
from shoal_replica.prefix_cache import hash_blocks

NUM_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
SETUPS = {  # family, tensor-parallel ranks, stages
    "native": ("llama-9-heads", 1, 1),
    "torch": ("llama-heads-of-24", 1, 1),
    "tp2": ("llama-9-heads", 2, 1),
    "pp2": ("llama-9-heads", 1, 2),
    "pp2-by-torch": ("llama-heads-of-24", 1, 2),
}


async def started(folder: Path, tensor_size: int = 1, num_stages: int = 1, dtype: str = "auto") -> AsyncLLM:
    parallel = ParallelConfig(tensor_parallel_size=tensor_size, pipeline_parallel_size=num_stages)
    return await AsyncLLM.start(resolve_config(str(folder), dtype=dtype, num_blocks=64, parallel=parallel))


async def answer(llm: AsyncLLM, prompt: list[int]) -> tuple[list[int], int]:
    """The tokens, and how many of the prompt's were cached."""
    deltas = [delta async for delta in llm.generate(tuple(prompt), GREEDY)]
    return [token for delta in deltas for token in delta.token_ids], deltas[0].num_cached_tokens


async def transfer(one: AsyncLLM, other: AsyncLLM, prompt: list[int], num_at_once: int = 2) -> None:
    hashes = hash_blocks(prompt, one.engine.blocks.block_size)
    with other.engine.blocks.taking(hashes) as taking:
        async with aclosing(one.engine.blocks.give(hashes, taking.num_blocks, num_at_once)) as pieces:
            async for num_blocks, parts in pieces:
                await taking.take(num_blocks, parts)
        assert taking.num_blocks == len(hashes)


@pytest.mark.parametrize("setup", list(SETUPS))
async def test_a_prompt_goes_on_from_the_blocks_of_another_engine(setup: str, tmp_path: Path) -> None:
    family, *sizes = SETUPS[setup]
    folder = write_tiny_tokenizer(make_checkpoint(family, tmp_path))
    oracle, (other_prompt, prompt) = load_oracle(folder), make_prompts([33, 100])
    one, other = await started(folder, *sizes), await started(folder, *sizes)
    try:
        assert (await answer(one, prompt))[1] == 0
        await answer(other, other_prompt)  # so that blocks have other ids there
        await transfer(one, other, prompt)
        tokens, num_cached = await answer(other, prompt)
        assert (tokens, num_cached) == (oracle_greedy(oracle, prompt, NUM_TOKENS, tokens), 96)
        tokens, _ = await answer(other, other_prompt)
        assert tokens == oracle_greedy(oracle, other_prompt, NUM_TOKENS, tokens)
        for llm in (one, other):
            llm.engine.check_invariants()
            assert llm.engine.stats().num_allocated_blocks == 0
    finally:
        await one.stop()
        await other.stop()


async def test_engines_of_other_kinds_keep_their_blocks_to_themselves(tmp_path: Path) -> None:
    folder = write_tiny_tokenizer(make_checkpoint("llama-9-heads", tmp_path))
    prompt = make_prompts([100])[0]
    engines = [await started(folder), await started(folder, 2), await started(folder, dtype="bfloat16")]
    try:
        for giver in engines:
            await answer(giver, prompt)
            for taker in engines:
                if taker is not giver:
                    with pytest.raises(ConfigError, match=r"blocks: are of .*; must be of"):
                        await transfer(giver, taker, prompt)
                    assert taker.engine.stats().num_allocated_blocks == 0
            prompt = [7, *prompt]  # which none of them has
        for llm in engines:
            llm.engine.check_invariants()
    finally:
        for llm in engines:
            await llm.stop()
