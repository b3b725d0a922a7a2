"""Structured output on a real engine: answers match, and each token is the likeliest of those that may follow."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import regex
import torch
from fixtures.tiny_tokenizer import write_tiny_tokenizer
from tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, load_oracle, make_checkpoint, make_prompts

from shoal_replica import LLM, SamplingParams, grammars, json_schemas
from shoal_replica.build import build_executor, build_scheduler, resolve_config
from shoal_replica.checkpoint import DEMO_MODEL
from shoal_replica.errors import InvalidArgument
from shoal_replica.grammars import Grammars
from shoal_replica.model_config import ModelConfig
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
    messages = [{"role": "user", "content": "Invent a person, as JSON with name, age and tags."}]
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


def test_text_that_spells_a_special_token_is_written_out():
    """The tokenizer would turn it into the token itself, which has no text."""
    for structure, text in (
        (StructuredOutput.json_schema({"const": "x<|im_end|>y"}), '"x<|im_end|>y"'),
        (StructuredOutput.json_schema({"const": "a<|im_start|>"}), '"a<|im_start|>"'),
        (StructuredOutput("regex", r"ab<\|im_start\|>c/d"), "ab<|im_start|>c/d"),
        (StructuredOutput("lark", 'start: "<|im_end|>" /[0-9]/'), None),
    ):
        with LLM(DEMO_MODEL, num_blocks=64) as llm:
            (output,) = llm.generate(["Say it:"], params(structure))
        assert output.finish_reason is FinishReason.STOP
        assert output.text == text if text else re.fullmatch(r"<\|im_end\|>[0-9]", output.text)


def test_white_space_in_json_is_bounded(llm):
    """A model with random weights would go on with it for ever."""
    (output,) = llm.generate([PROMPTS[0]], params(StructuredOutput.json_object(), max_tokens=200))
    assert max(map(len, re.findall(r"\s+", output.text)), default=0) <= 20


def test_an_answer_that_becomes_too_complex_is_cut_and_says_so(folder, caplog):
    """Not as one that is complete; and others go on. By a limit of llguidance that no check can foresee."""
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(499)}}
    free = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with LLM(str(folder), num_blocks=256) as llm:
        cut, other = llm.generate(PROMPTS[:2], [params(StructuredOutput.json_schema(schema)), free])
        (alone,) = llm.generate(PROMPTS[1:2], free)
        assert llm.stats().num_allocated_blocks == 0
    assert cut.finish_reason is FinishReason.LENGTH
    assert len(cut.token_ids) < 64
    assert other.token_ids == alone.token_ids
    assert "a structured answer is cut: it has become too complex" in caplog.text


def test_an_ambiguous_grammar_is_cut_before_it_holds_up_steps(folder, monkeypatch):
    """The readings of an answer, and so the work for a token, grow with each token."""
    monkeypatch.setattr(grammars, "MAX_STEP_ITEMS", 200)
    matcher = Grammars(ModelConfig.from_folder(folder)).begin(StructuredOutput("lark", 'start: e\ne: e e | "a" | "b"'))
    letters = Tokenizer.from_folder(folder).encode("a", add_special_tokens=False) * 99
    masks = [matcher.allowed(letters[:count]) for count in range(99)]
    assert masks[5] is not None
    assert masks[-1] is None


def test_an_end_that_is_also_text_does_not_end_an_answer_early(tmp_path):
    folder = write_tiny_tokenizer(make_checkpoint("llama", tmp_path))
    a = Tokenizer.from_folder(folder).encode("a", add_special_tokens=False)[0]
    raw = json.loads((folder / "generation_config.json").read_text()) | {"eos_token_id": [a, EOS_TOKEN_ID]}
    (folder / "generation_config.json").write_text(json.dumps(raw))
    with LLM(str(folder), num_blocks=64) as llm:
        asked = [params(StructuredOutput("regex", "[abc]{6}"), temperature=1.0, seed=i) for i in range(8)]
        outputs = llm.generate([PROMPTS[0]] * 8, asked)
    assert all(re.fullmatch("[bc]{6}", output.text) for output in outputs)
    assert {output.token_ids[-1] for output in outputs} <= {a, EOS_TOKEN_ID}


def test_a_form_that_only_the_gateway_can_serve_ends_its_own_answer_alone(folder, caplog):
    """As where replicas have another version of the library."""
    free = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with LLM(str(folder), num_blocks=64) as llm:
        llm._grammars.check = lambda form: None
        cut, other = llm.generate(PROMPTS[:2], [params(StructuredOutput("regex", "(a")), free])
        assert other.token_ids == llm.generate(PROMPTS[1:2], free)[0].token_ids
    assert (cut.token_ids, cut.finish_reason) == ([EOS_TOKEN_ID], FinishReason.LENGTH)
    assert "a structured answer cannot be begun: its regex is refused here" in caplog.text
    assert "(a" not in caplog.text


def test_many_answers_of_one_form_compile_it_once(folder, monkeypatch):
    calls = []
    monkeypatch.setattr(grammars, "_grammar", lambda form, made=grammars._grammar: calls.append(form) or made(form))
    forms = [StructuredOutput("regex", f"[ab]{{{i + 1}}}") for i in range(grammars.MAX_COMPILED + 5)]
    held = Grammars(ModelConfig.from_folder(folder))
    for form in [*forms, forms[-1], *forms[: grammars.MAX_COMPILED - 1]]:
        held.check(form)
        assert held.begin(form).allowed([]).sum() == 2
    assert len(held._compiled) == grammars.MAX_COMPILED
    assert calls == [*forms, *forms[: grammars.MAX_COMPILED - 1]]


def test_what_is_known_of_an_answer_is_forgotten_with_it(llm):
    llm.generate(PROMPTS, params(StructuredOutput("regex", "[ab]{40}"), n=2, temperature=1.0, seed=1))
    llm.generate(PROMPTS, params(StructuredOutput("regex", "[ab]{2}")))  # the executor hears of ends with the next step
    assert len(llm._executor._sampler._matchers) <= len(PROMPTS)


def test_a_tokenizer_that_cannot_be_used_is_refused_once_and_for_all(folder, tmp_path, caplog):
    model = ModelConfig.from_folder(folder)
    held = Grammars(replace(model, folder=str(tmp_path)))
    held.load()  # there is none
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Nonsense"}}')
    held.load()
    assert "structured output is refused" in caplog.text
    with pytest.raises(InvalidArgument, match="is not served with this model's tokenizer: "):
        held.check(StructuredOutput("regex", "a"))


def test_ranks_sample_structured_answers(folder, llm):
    asked = params(StructuredOutput.json_schema(SCHEMA), max_tokens=24)
    expected = [output.token_ids for output in llm.generate(PROMPTS, asked)]
    for ranks in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        with LLM(str(folder), num_blocks=64, **ranks) as other:
            assert [output.token_ids for output in other.generate(PROMPTS, asked)] == expected


def test_stops_end_structured_answers_too(llm):
    form = StructuredOutput("regex", "[ab]{30}")
    (whole,) = llm.generate([PROMPTS[1]], params(form))
    first = whole.token_ids[0]
    (stopped,) = llm.generate([PROMPTS[1]], params(form, stop_token_ids=(first,)))
    assert (stopped.token_ids, stopped.text, stopped.finish_reason) == ([first], "", FinishReason.STOP)
    (stopped,) = llm.generate([PROMPTS[1]], params(form, stop=(whole.text[3:6],)))
    assert stopped.text == whole.text[: whole.text.index(whole.text[3:6])]
    extreme = params(form, repetition_penalty=1e300, temperature=1e-300, seed=1, top_k=1)
    assert re.fullmatch("[ab]{30}", llm.generate([PROMPTS[1]], extreme)[0].text)


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (("regex", r"[^\s\S]"), "cannot be used as regex"),
        (("lark", "start: T\nT: /[0-9]+/ & /[a-z]+/"), "cannot be used as lark"),
        (("json_schema", '{"type": "integer", "minimum": 0, "multipleOf": 4999999}'), "multipleOf is 4999999; must be"),
        (("lark", 'start: %json {"multipleOf": 99991}'), "the product of all multipleOf is 99991; must be at most"),
        (
            ("lark", 'start: a b\na: %json {"multipleOf": 997}\nb: %json\n{"items": {"multipleOf": 0.0997}}'),
            "the product of all multipleOf is 994009",
        ),
        (("lark", 'start: %json {"multipleOf": 99991, "multipleOf": 1}'), "has a key twice"),
        (("json_schema", '{"multipleOf": true}'), "cannot be used"),
        (("lark", 'start: %json/**/{"multipleOf": 99991}'), "a schema in it is not JSON"),
        (("lark", 'start: "a" // %json'), "a schema in it is not JSON"),
        (("json_schema", '{"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}'), "multipleOf is 988027; must be at"),
        (("json_schema", '{"a":' * 3000 + "1" + "}" * 3000), "recursion limit|too deeply"),
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


def chain_of_rules(count: int, rule: str) -> StructuredOutput:
    rules = "".join(f"a{i}: {rule.format(f'a{i + 1}')}\n" for i in range(count))
    return StructuredOutput("lark", f'start: a0\n{rules}a{count}: "x"')


def chain_of_schemas(count: int, link: Callable[[dict[str, str]], dict[str, Any]]) -> StructuredOutput:
    chain = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(count)} | {f"a{count}": {"type": "string"}}
    return StructuredOutput.json_schema({"$ref": "#/$defs/a0", "$defs": chain})


@pytest.mark.parametrize(
    "deepest",
    [
        lambda n: chain_of_rules(1490 + n, '{} "x"'),
        lambda n: chain_of_rules(240 + 10 * n, '((((({} "x")? "x")? "x")? "x")? "x")?'),
        lambda n: chain_of_schemas(490 + 10 * n, lambda to: {"properties": {"a": to}}),
        lambda n: chain_of_schemas(740 + 10 * n, lambda to: {"type": "array", "items": to}),
        lambda n: StructuredOutput(
            "lark", f"start: %json {chain_of_schemas(490 + 10 * n, lambda to: {'properties': {'a': to}}).source}"
        ),
    ],
)
def test_what_is_too_deep_is_refused_before_the_library_sees_it(folder, deepest):
    """It follows rules and references by recursion, at the end of whose stack the process would end."""
    held = Grammars(ModelConfig.from_folder(folder))
    held.check(deepest(0))
    with pytest.raises(InvalidArgument, match=r"its rules, groups and levels are \d+ together; must be at most 1500"):
        held.check(deepest(20))


def test_brackets_within_texts_are_no_groups(folder):
    choices = "\n | ".join(f'"((([[{i}" /[(][(]{i}/' for i in range(700))
    Grammars(ModelConfig.from_folder(folder)).check(StructuredOutput("lark", f"start: {choices} // ((((("))


def test_formats_that_are_not_enforced_are_annotations(folder):
    held = Grammars(ModelConfig.from_folder(folder))
    properties = {"format": {"type": "string", "format": "password"}, "n": {"type": "integer", "format": "int64"}}
    held.check(StructuredOutput.json_schema({"type": "object", "properties": properties, "format": "x"}))
    for name in json_schemas.FORMATS:
        schema = {"type": "string", "format": name}
        assert json_schemas.without_unknown_formats(schema) == schema
        held.check(StructuredOutput.json_schema(schema))
    first = [held.begin(StructuredOutput.json_schema({"type": "string", "format": name})) for name in ("uuid", "iri")]
    quoted = Tokenizer.from_folder(folder).encode('"z', add_special_tokens=False)
    assert [matcher.allowed(quoted[:1])[quoted[1]] for matcher in first] == [False, True]


def test_structures_and_fields_that_do_not_go_together():
    for wrong, message in (
        (lambda: StructuredOutput("yaml", "a"), "structured_output.kind: got 'yaml'; must be one of json_schema"),
        (lambda: StructuredOutput("regex", ""), "structured_output: got '0 characters'; must be text of 1 to 65536"),
        (lambda: StructuredOutput("regex", "a" * (MAX_SOURCE_LENGTH + 1)), "got '65537 characters'"),
        (lambda: StructuredOutput.choice([]), "must be a list of texts"),
        (lambda: StructuredOutput("regex", "\ud800"), "must be valid Unicode, without lone surrogates"),
        (lambda: StructuredOutput.json_schema({"a": math.nan}), "got 'dict'; cannot be written as JSON"),
        (lambda: StructuredOutput.json_schema({1, 2}), "got 'set'; cannot be written as JSON"),
        (
            lambda: StructuredOutput.json_schema(functools.reduce(lambda x, _: [x], range(5000), 1)),
            "got 'list'; cannot",
        ),
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
