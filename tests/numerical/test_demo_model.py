"""Greedy tokens of the demo model against transformers, however the work is batched, cached, chunked or preempted."""

from __future__ import annotations

import pytest
import torch
from fixtures.rounded_products import load_bfloat16_oracle
from tiny_models import oracle_greedy
from transformers import AutoModelForCausalLM, PreTrainedModel

from shoal_replica import LLM, SamplingParams
from shoal_replica.checkpoint import DEMO_MODEL, ensure_checkpoint
from shoal_replica.testing import num_reused_tokens

MAX_TOKENS = 24
MAX_LOGIT_GAP = 0.25

SYSTEM = "You are a helpful assistant who answers in short, plain sentences and never makes things up."
QUESTIONS = (
    "What is the capital of France?",
    "Name three fruits.",
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "What is 17 times 3?",
    "Who wrote Hamlet?",
    "Translate 'good morning' to Spanish.",
    "How do I boil an egg?",
)
COMPLETIONS = (
    "Once upon a time",
    "def fibonacci(n):",
    "The quick brown fox",
    "1, 2, 3, 4,",
    "Dear Sir or Madam,",
    "E",
)
STORY = "The old lighthouse keeper climbed the stairs each evening, counting every step as he went. "


@pytest.fixture(scope="module")
def folder() -> str:
    return str(ensure_checkpoint(DEMO_MODEL))


@pytest.fixture(scope="module")
def prompts(folder) -> list[list[int]]:
    """Short, long and multi-turn prompts; some share a long prefix."""
    from shoal_replica.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(folder)

    def chat(*turns: tuple[str, str]) -> list[int]:
        messages = [{"role": role, "content": content} for role, content in turns]
        return list(tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False))

    listed = [chat(("system", SYSTEM), ("user", question)) for question in QUESTIONS]
    listed += [list(tokenizer.encode(text)) for text in COMPLETIONS]
    listed += [
        chat(("user", "My name is Ada."), ("assistant", "Hello, Ada!"), ("user", "What is my name?")),
        chat(("user", "Pick a colour."), ("assistant", "Blue."), ("user", "And another?"), ("assistant", "Red."),
             ("user", "Which was first?")),
        list(tokenizer.encode(STORY * 8)),
        list(tokenizer.encode(STORY * 20 + "In the end")),
        list(tokenizer.encode(STORY * 20 + "But one night")),
        list(tokenizer.encode((STORY * 4)[:-20])),
    ]  # fmt: skip
    assert len(listed) == 20
    return listed


GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)


def oracle_tokens(model: PreTrainedModel, prompt: list[int], draft: list[int]) -> list[int]:
    return oracle_greedy(model, prompt, MAX_TOKENS, draft, model.generation_config.eos_token_id)


@pytest.fixture(scope="module")
def alone(folder, prompts) -> list[list[int]]:
    with LLM(folder, dtype="float32", num_threads=1, num_blocks=256, enable_prefix_caching=False) as llm:
        return [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]


@pytest.fixture(scope="module")
def expected(folder, prompts, alone) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [oracle_tokens(model, prompt, draft) for prompt, draft in zip(prompts, alone, strict=True)]


def test_alone(alone, expected):
    assert alone == expected


@pytest.mark.parametrize("chunk", [16, 64, 512])
def test_batched_in_chunks_then_again_from_the_prefix_cache(folder, prompts, expected, chunk):
    with LLM(
        folder, dtype="float32", num_threads=1, num_blocks=512, max_num_seqs=16, max_num_batched_tokens=chunk
    ) as llm:
        assert [output.token_ids for output in llm.generate(prompts, GREEDY)] == expected
        again = llm.generate(prompts, GREEDY)
        assert [output.token_ids for output in again] == expected
        for output in again:
            assert output.num_cached_tokens == num_reused_tokens(output.num_prompt_tokens, len(output.token_ids), 16)


def test_a_pool_so_small_that_sequences_are_preempted(folder, prompts, expected):
    longest = max(map(len, prompts)) + MAX_TOKENS
    with LLM(
        folder,
        dtype="float32",
        num_threads=1,
        block_size=4,
        num_blocks=-(-longest // 4) + 8,
        max_model_len=longest,
        max_num_seqs=16,
        enable_prefix_caching=False,
    ) as llm:
        assert [output.token_ids for output in llm.generate(prompts, GREEDY)] == expected
        assert llm.stats().num_preemptions > 0


def test_bfloat16_parts_only_where_transformers_is_undecided(folder, prompts):
    with LLM(folder, dtype="bfloat16", num_threads=1, num_blocks=512) as llm:
        outputs = [output.token_ids for output in llm.generate(prompts, GREEDY)]
    model, exact = load_bfloat16_oracle(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, ours in zip(prompts, outputs, strict=True):
        theirs = oracle_tokens(model, prompt, ours)
        if ours == theirs:
            continue
        parting = next(i for i in range(MAX_TOKENS) if ours[i : i + 1] != theirs[i : i + 1])
        so_far = torch.tensor([prompt + theirs[:parting]])
        with torch.inference_mode():
            logits = model(so_far).logits[0, -1].float()
        best = logits.topk(2).values
        assert best[0] - best[1] <= MAX_LOGIT_GAP
        if logits[ours[parting]] < best[1]:  # of three nearly equal ones, float32 must say which
            with torch.inference_mode():
                assert ours[parting] == exact(so_far).logits[0, -1].argmax()
