"""Structured output on a real engine: answers match, and each token is the likeliest of those that may follow."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import regex
import torch
from fixtures.tiny_tokenizer import write_tiny_tokenizer
from tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, load_oracle, make_checkpoint, make_prompts

from shoal_replica import LLM, SamplingParams
from shoal_replica.build import build_executor, build_scheduler, resolve_config
from shoal_replica.checkpoint import DEMO_MODEL
from shoal_replica.errors import InvalidArgument
from shoal_replica.request import FinishReason, Request
from shoal_replica.structured_output import MAX_SOURCE_LENGTH, StructuredOutput
from shoal_replica.tokenizer import Tokenizer

PROMPTS = make_prompts([3, 17, 40], seed=4)
PATTERNS = ["[ab]{3,5}(cd)?", "(yes|no|no, never)", r"[0-9]{1,4}\.[0-9]{2}", "(a|ab|abc|the)+ end"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", None]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def params(structure: StructuredOutput, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 64, "temperature": 0.0, "structured_output": structure} | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(make_checkpoint("llama", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Any:
    with LLM(str(folder), num_blocks=256, max_num_seqs=16) as llm:
        yield llm


def likeliest_match(model: Any, tokenizer: Tokenizer, prompt: list[int], pattern: str, most: int) -> list[int]:
    """Greedy tokens of transformers, each the likeliest after which the text can still become a match of ``pattern``,
    or the end-of-sequence token where it is one. By another library's partial matches, token by token.
    """
    texts = [tokenizer.token_bytes(i).decode("utf-8", "replace") for i in range(VOCAB_SIZE)]
    generated: list[int] = []
    text = ""
    for _ in range(most):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *generated]])).logits[0, -1]
        for token_id in logits.argsort(descending=True).tolist():
            if token_id == EOS_TOKEN_ID:
                if regex.fullmatch(pattern, text):
                    return [*generated, token_id]
            elif tokenizer.has_text(token_id) and regex.fullmatch(pattern, text + texts[token_id], partial=True):
                break
        generated.append(token_id)
        text += texts[token_id]
    return generated


@pytest.mark.parametrize("pattern", PATTERNS)
def test_each_token_is_the_likeliest_that_may_follow(folder, llm, pattern):
    model, tokenizer = load_oracle(folder), Tokenizer.from_folder(folder)
    outputs = llm.generate(PROMPTS, params(StructuredOutput("regex", pattern), max_tokens=12))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.token_ids == likeliest_match(model, tokenizer, prompt, pattern, 12)
        ended = output.token_ids[-1] == EOS_TOKEN_ID
        assert output.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert not ended or re.fullmatch(pattern, output.text)


def test_answers_beside_others_are_those_alone(llm):
    free = SamplingParams(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)
    asked = [
        params(StructuredOutput("regex", PATTERNS[0])),
        free,
        params(StructuredOutput.json_schema(SCHEMA), temperature=0.8, seed=5, top_p=0.9, repetition_penalty=1.2),
        params(StructuredOutput.choice(["one", "two words", "a+b|c"]), n=3, temperature=1.0, seed=7, logprobs=2),
        free,
    ]
    prompts = [PROMPTS[i % 3] for i in range(len(asked))]
    together = llm.generate(prompts, asked)
    alone = [llm.generate([prompt], one)[0] for prompt, one in zip(prompts, asked, strict=True)]
    for one, other in zip(together, alone, strict=True):
        assert [o.token_ids for o in one.outputs] == [o.token_ids for o in other.outputs]
    assert {o.text for o in together[3].outputs} <= {"one", "two words", "a+b|c"}


def test_answers_go_on_after_preemption(folder):
    asked = [params(StructuredOutput("regex", "[ab]{40}"), max_tokens=50, temperature=1.0, seed=i) for i in range(6)]
    prompts = [PROMPTS[1]] * 6
    with LLM(str(folder), num_blocks=512, block_size=4, max_num_seqs=8) as llm:
        expected = [o.token_ids for o in llm.generate(prompts, asked)]
    with LLM(str(folder), block_size=4, num_blocks=30, max_model_len=100, max_num_seqs=8) as llm:
        outputs = llm.generate(prompts, asked)
        assert llm.stats().num_preemptions > 0
    assert [o.token_ids for o in outputs] == expected
    assert all(re.fullmatch("[ab]{40}", o.text) for o in outputs)


@pytest.mark.parametrize("cut", [1, 3, 6])
def test_a_resumed_answer_goes_on_where_it_was(folder, llm, cut):
    """As on another replica, which is given the tokens that the first has sent."""
    one = params(StructuredOutput("regex", "[ab]{3}[0-9]{5}x"), temperature=1.0, seed=3)
    (whole,) = llm.generate([PROMPTS[2]], one)
    config = resolve_config(str(folder), num_blocks=64)
    scheduler, executor = build_scheduler(config), build_executor(config)
    scheduler.add(Request(
        request_id="r", prompt_token_ids=tuple(PROMPTS[2]), sampling_params=one,
        output_token_ids=tuple(whole.token_ids[:cut]),
    ))  # fmt: skip
    rest: list[int] = []
    while scheduler.has_work:
        step = scheduler.schedule(0.0)
        assert step is not None
        rest += [t for delta in scheduler.update(step, executor.execute(step)) for t in delta.token_ids]
    executor.close()
    assert rest == whole.token_ids[cut:]


def test_a_trained_models_answers_are_valid_by_their_schema():
    messages = [("user", "Invent a person, as JSON with name, age and tags.")]
    with LLM(DEMO_MODEL, num_blocks=256, max_num_seqs=16) as llm:
        prompt = list(llm.tokenizer.encode(llm.tokenizer.apply_chat_template(messages), add_special_tokens=False))
        structure = StructuredOutput.json_schema(SCHEMA)
        asked = [params(structure, max_tokens=200, temperature=1.2, seed=i) for i in range(12)]
        outputs = llm.generate([prompt] * 12, asked)
        anything = llm.generate([prompt] * 4, params(StructuredOutput.json_object(), max_tokens=40))
    for output in outputs:
        if output.finish_reason is FinishReason.STOP:
            jsonschema.validate(json.loads(output.text), SCHEMA)
    assert sum(output.finish_reason is FinishReason.STOP for output in outputs) >= 10
    assert all(output.text.lstrip().startswith("{") for output in anything)


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (("json_schema", "{"), "cannot be used as json_schema: "),
        (("json_schema", '{"type": "objekt"}'), "Invalid type: objekt"),
        (("json_schema", '{"not": {}}'), 'Unimplemented keys: \\["not"\\]'),
        (("regex", "(a"), "unclosed group"),
        (("lark", "start: foo"), "unknown name"),
    ],
    ids=str,
)
def test_what_cannot_be_matched_is_refused(llm, structure, message):
    with pytest.raises(InvalidArgument, match=f"structured_output: got .*{message}"):
        llm.generate(PROMPTS[:1], params(StructuredOutput(*structure)))


def test_structures_and_fields_that_do_not_go_together():
    for wrong, message in (
        (lambda: StructuredOutput("yaml", "a"), "structured_output.kind: got 'yaml'; must be one of json_schema"),
        (lambda: StructuredOutput("regex", ""), "structured_output: got '0 characters'; must be text of 1 to 65536"),
        (lambda: StructuredOutput("regex", "a" * (MAX_SOURCE_LENGTH + 1)), "got '65537 characters'"),
        (lambda: StructuredOutput.choice([]), "must be a list of texts"),
        (lambda: params(StructuredOutput("regex", "a"), ignore_eos=True), "ignore_eos: got True; contradicts"),
        (lambda: params(StructuredOutput("regex", "a"), beam_width=2), "is not supported in a beam search"),
    ):
        with pytest.raises(InvalidArgument, match=re.escape(message)):
            wrong()


def test_a_model_without_an_end_is_refused(tmp_path):
    folder = write_tiny_tokenizer(make_checkpoint("llama", tmp_path))
    for name in ("config.json", "generation_config.json"):
        raw = json.loads((folder / name).read_text()) | {"eos_token_id": None}
        (folder / name).write_text(json.dumps(raw))
    with LLM(str(folder), num_blocks=64) as llm, pytest.raises(InvalidArgument, match="needs a model with an end-of"):
        llm.generate(PROMPTS[:1], params(StructuredOutput("regex", "a")))
