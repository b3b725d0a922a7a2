"""Biases, minimum lengths, allowed and bad tokens on a real engine: the tokens are those of transformers with the same
settings.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.tiny_tokenizer import write_tiny_tokenizer
from tiny_models import EOS_TOKEN_ID, load_oracle, make_checkpoint, make_prompts

from shoal_replica import LLM, SamplingParams
from shoal_replica.errors import InvalidArgument
from shoal_replica.request import FinishReason

PROMPTS = make_prompts([1, 17, 40, 63], seed=4)
ENDS = list(range(3, 320, 12))  # with random weights any token may come, so a twelfth of the vocabulary ends an answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(make_checkpoint("llama", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module", params=[16, 8])  # native kernels, torch's operators
def llm(folder: Path, request: pytest.FixtureRequest) -> Any:
    with LLM(str(folder), num_blocks=256, block_size=request.param) as llm:
        yield llm


def expected(folder: Path, prompt: list[int], **settings: Any) -> list[int]:
    output = load_oracle(folder).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        pad_token_id=0,
        **settings,
    )
    token_ids: list[int] = output[0, len(prompt) :].tolist()
    return token_ids


@pytest.mark.parametrize("least", [1, 7, 12])
def test_no_end_before_min_tokens(folder, llm, least):
    params = SamplingParams(max_tokens=12, min_tokens=least, temperature=0.0, stop_token_ids=ENDS)
    outputs = llm.generate(PROMPTS, params)
    eos = [EOS_TOKEN_ID, *ENDS]
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        # transformers counts an end among the new tokens that there must be at least
        tokens = expected(folder, prompt, max_new_tokens=12, min_new_tokens=least, eos_token_id=eos)
        assert output.token_ids == tokens
        assert len(tokens) > least or output.finish_reason is FinishReason.LENGTH
    assert any(o.finish_reason is FinishReason.STOP for o in outputs) == (least < 12)


def test_biases_are_added_to_logits(folder, llm):
    (likeliest,) = llm.generate([PROMPTS[1]], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    biases = {likeliest.token_ids[0]: -100.0, 50: 2.5, 51: 2.5, 319: -1.0}
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logit_bias=biases)
    outputs = llm.generate(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        sequence_bias = {(token_id,): bias for token_id, bias in biases.items()}
        settings = {"max_new_tokens": 12, "eos_token_id": None, "sequence_bias": sequence_bias}
        assert output.token_ids == expected(folder, prompt, **settings)
    assert outputs[1].token_ids[0] != likeliest.token_ids[0]
    only = SamplingParams(max_tokens=3, seed=1, ignore_eos=True, logit_bias=((7, 100.0),))
    assert llm.generate([PROMPTS[2]], only)[0].token_ids == [7, 7, 7]


def test_only_allowed_tokens_are_generated(folder, llm):
    allowed = (9, 5, 200, 201, 77)
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, allowed_token_ids=allowed)
    settings = {"max_new_tokens": 12, "eos_token_id": None, "prefix_allowed_tokens_fn": lambda *_: list(allowed)}
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, greedy), strict=True):
        assert output.token_ids == expected(folder, prompt, **settings)
    drawn = SamplingParams(max_tokens=40, seed=2, temperature=5.0, allowed_token_ids=(*allowed, EOS_TOKEN_ID))
    outputs = llm.generate(PROMPTS, replace(drawn, n=4))
    generated = {token_id for output in outputs for each in output.outputs for token_id in each.token_ids}
    assert generated == {*allowed, EOS_TOKEN_ID}
    assert all(each.finish_reason is FinishReason.STOP for output in outputs for each in output.outputs)


def test_bad_sequences_of_tokens_are_not_completed(folder, llm):
    """The likeliest tokens are bad, one after the other, alone and after others."""
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompt, bad = PROMPTS[2], list[list[int]]()
    for length in (1, 2, 3, 5):
        (output,) = llm.generate([prompt], replace(greedy, bad_token_ids=tuple(map(tuple, bad))))
        bad.append(output.token_ids[4 : 4 + length])
    settings = {"max_new_tokens": 12, "eos_token_id": None, "bad_words_ids": bad}
    (output,) = llm.generate([prompt], replace(greedy, bad_token_ids=tuple(map(tuple, bad))))
    assert output.token_ids == expected(folder, prompt, **settings)


def test_bad_sequences_begin_in_the_answer(llm):
    """What the prompt ends with does not count."""
    greedy = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    (plain,) = llm.generate([PROMPTS[2]], greedy)
    bad = ((PROMPTS[2][-1], plain.token_ids[0]), (*PROMPTS[2][-2:], plain.token_ids[0]))
    (output,) = llm.generate([PROMPTS[2]], replace(greedy, bad_token_ids=bad))
    assert output.token_ids == plain.token_ids


def test_bad_words_are_not_generated(llm):
    allowed = tuple(llm.tokenizer.encode("a b c", add_special_tokens=False))
    asked = SamplingParams(max_tokens=40, seed=2, temperature=9.0, ignore_eos=True, allowed_token_ids=allowed)
    (free,) = llm.generate([PROMPTS[1]], asked)
    assert {"a", "b"} < set(free.text)
    (output,) = llm.generate([PROMPTS[1]], replace(asked, bad_words=("b", " ac")))
    assert "b" not in output.text
    assert "a" in output.text
    assert "ac" not in output.text


def test_where_every_token_is_forbidden_the_answer_is_cut(llm):
    asked = SamplingParams(max_tokens=9, temperature=0.0, allowed_token_ids=(7,), bad_token_ids=((7, 7, 7),))
    plain = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    cut, other = llm.generate(PROMPTS[1:3], [asked, plain])
    assert cut.token_ids[:2] == [7, 7]
    assert (len(cut.token_ids), cut.finish_reason) == (3, FinishReason.LENGTH)
    assert other.token_ids == llm.generate(PROMPTS[2:3], plain)[0].token_ids
    never = replace(asked, bad_token_ids=(), allowed_token_ids=(EOS_TOKEN_ID,), min_tokens=4)
    assert llm.generate(PROMPTS[1:2], never)[0].finish_reason is FinishReason.LENGTH


def test_others_in_the_batch_do_not_notice(llm):
    plain = SamplingParams(max_tokens=10, temperature=0.7, seed=3, ignore_eos=True)
    greedy = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    changed = SamplingParams(max_tokens=10, min_tokens=4, seed=5, logit_bias={9: 3.0}, repetition_penalty=1.3)
    asked = [plain, changed, greedy, changed]
    together = [o.token_ids for o in llm.generate(PROMPTS, asked)]
    assert together == [llm.generate([p], one)[0].token_ids for p, one in zip(PROMPTS, asked, strict=True)]


def test_stop_strings_count_after_min_tokens(llm):
    letters = dict.fromkeys(llm.tokenizer.encode("abc", add_special_tokens=False), 100.0)
    asked = {"max_tokens": 12, "seed": 3, "ignore_eos": True, "logit_bias": letters}
    (whole,) = llm.generate([PROMPTS[2]], SamplingParams(**asked))
    assert set(whole.text) == {"a", "b", "c"}
    stop = whole.text[0]
    assert llm.generate([PROMPTS[2]], SamplingParams(**asked, stop=(stop,)))[0].text == ""
    for least in (5, 12):
        output = llm.generate([PROMPTS[2]], SamplingParams(**asked, stop=(stop,), min_tokens=least))[0]
        assert output.text == whole.text[: whole.text.find(stop, least) if stop in whole.text[least:] else None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_tokens": -1}, "min_tokens: got -1; must be an integer of at least 0"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens: got 5; must be at most max_tokens, 4"),
        ({"logit_bias": {3: 101.0}}, r"logit_bias: got 101.0; must be in \[-100, 100\]"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias: got nan"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: got -1"),
        ({"logit_bias": {320: 1.0}}, r"logit_bias: got 320; token ids must be in \[0, 320\)"),
        ({"logit_bias": [3]}, "logit_bias: got 3; must be pairs"),
        ({"logit_bias": ((3, 1.0), (3, 2.0))}, "logit_bias: got 3; must not be given twice"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias: got '1025 tokens'; must have at most 1024"),
        ({"logit_bias": {3: 1.0}, "beam_width": 2}, "logit_bias: got .* is not supported in a beam search"),
        ({"min_tokens": 3, "beam_width": 2}, "min_tokens: got 3; is not supported in a beam search"),
        ({"allowed_token_ids": (320,)}, r"allowed_token_ids: got 320; token ids must be in \[0, 320\)"),
        ({"allowed_token_ids": (3, "x")}, "allowed_token_ids: got 'x'; must be an integer"),
        ({"allowed_token_ids": tuple(range(8193))}, "allowed_token_ids: got '8193 ids'; must be at most 8192"),
        ({"allowed_token_ids": (3,), "beam_width": 2}, "allowed_token_ids: got .* is not supported in a beam search"),
        ({"bad_words": ("",)}, "bad_words: got ''; must be non-empty strings that are not only whitespace"),
        ({"bad_words": "x" * 4097}, "bad_words: got '4097 characters'; must have at most 4096 together"),
        ({"bad_words": ["a"] * 257}, "bad_words: got '257 words'; must be at most 256"),
        ({"bad_token_ids": ((),)}, r"bad_token_ids: got \(\); must be non-empty tuples"),
        ({"bad_token_ids": ((1, 320),)}, r"bad_token_ids: got 320; token ids must be in \[0, 320\)"),
    ],
    ids=str,
)
def test_what_is_refused(llm, changes, message):
    with pytest.raises(InvalidArgument, match=message):
        llm.generate(PROMPTS[:1], SamplingParams(**{"max_tokens": 8} | changes))
