"""Chats with tools: prompts as transformers renders them, and answers of a real engine that must call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from fixtures.tiny_tokenizer import BOS, EOS, raw_tiny_tokenizer, write_tiny_tokenizer
from fixtures.tool_formats import CLOCK, HERMES_TEMPLATE, TOOLS, WEATHER, spell
from tiny_models import EOS_TOKEN_ID, make_checkpoint, make_prompts
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from shoal_cluster.chat.answer_grammar import answer_grammar
from shoal_cluster.chat.answer_reader import AnswerReader
from shoal_cluster.chat.chat_format import HERMES, LLAMA, MINIMAX, MISTRAL, QWEN_CODER, CallFormat, ChatFormat
from shoal_cluster.chat.chats import Chats
from shoal_cluster.chat.message import Message
from shoal_cluster.chat.tool import AUTO, MAX_TOOLS, NONE, REQUIRED, Tool, ToolCall, ToolUse
from shoal_cluster.serve.call import Chunk, GenerateCall
from shoal_cluster.serve.request_maker import RequestMaker
from shoal_replica import LLM, SamplingParams
from shoal_replica.errors import InvalidArgument
from shoal_replica.grammars import Grammars
from shoal_replica.model_config import ModelConfig
from shoal_replica.request import FinishReason
from shoal_replica.structured_output import REGEX, StructuredOutput
from shoal_replica.text_stream import TextStream
from shoal_replica.tokenizer import Tokenizer

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
STRICT = (Tool(WEATHER.name, WEATHER.description, WEATHER.parameters, strict=True), CLOCK)
CITY = (WEATHER.name, {"city": "Ulm"})
CHAT = (
    Message("system", "Be brief."),
    Message("user", "Köln?"),
    Message("assistant", "", (ToolCall("a", WEATHER.name, '{"city": "Köln"}'),), reasoning="Hm."),
    Message("tool", "rain", tool_call_id="a"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(make_checkpoint("llama", tmp_path_factory.mktemp("model")), HERMES_TEMPLATE)


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with markers that are tokens of their own, of which one alone is special, as in real models."""
    folder = write_tiny_tokenizer(make_checkpoint("llama", tmp_path_factory.mktemp("marked")), HERMES_TEMPLATE)
    raw = raw_tiny_tokenizer()
    raw.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    special = ("[TOOL_CALLS]", "<|python_tag|>")
    raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    raw.save(str(folder / "tokenizer.json"))
    return folder


class Forms:
    """Accepts text and calls, token by token."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_folder(folder)
        self.grammars = Grammars(ModelConfig.from_folder(str(folder)))
        self.chats = Chats(self.tokenizer, self.grammars)

    def special_id(self, text: str) -> int | None:
        token_id = self.tokenizer.token_id(text)
        return token_id if token_id is not None and self.grammars.is_special(token_id, text) else None

    def accepts(self, structure: StructuredOutput, text: str) -> bool:
        matcher = self.grammars.begin(structure)
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        for count, token_id in enumerate(token_ids):
            allowed = matcher.allowed(token_ids[:count])
            if allowed is None or not allowed[token_id]:
                return False
        allowed = matcher.allowed(token_ids)
        return allowed is not None and bool(allowed[EOS_TOKEN_ID])


@pytest.mark.parametrize("use", [None, ToolUse(TOOLS), ToolUse(TOOLS, NONE)])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
def test_prompts_are_those_of_transformers(folder: Path, use: ToolUse | None, options: dict[str, Any]) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=raw_tiny_tokenizer(), bos_token=BOS, eos_token=EOS)
    turns: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Köln?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"type": "function", "function": {"name": WEATHER.name, "arguments": {"city": "Köln"}}, "id": "a"}
            ],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "a"},
    ]
    definitions: list[Any] = [] if use is None or use.mode == NONE else [tool.definition() for tool in TOOLS]
    expected = theirs.apply_chat_template(
        turns,
        definitions or None,
        chat_template=HERMES_TEMPLATE,
        tokenize=False,
        add_generation_prompt=True,
        **options,
    )
    assert Forms(folder).chats.prompt(CHAT, use, options) == expected


def test_a_template_without_tools_gets_them_as_text(tmp_path: Path) -> None:
    plain = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    chats = Forms(write_tiny_tokenizer(make_checkpoint("llama", tmp_path), plain)).chats
    results = (Message("tool", "dry"), Message("user", "So?"))
    system, asked, called, answered = chats.prompt((*CHAT, *results), ToolUse(TOOLS)).split("\n[")
    assert system.startswith("[system] Be brief.\n\nYou can call functions.")
    assert f"\n{json.dumps(WEATHER.definition())}\n" in system
    assert asked == "user] Köln?"
    assert called == f"assistant] {spell(HERMES, [(WEATHER.name, {'city': 'Köln'})])}"
    both = "<tool_response>\nrain\n</tool_response>\n<tool_response>\ndry\n</tool_response>"
    assert answered == f"user] {both}\nSo?\n"
    assert chats.prompt((Message("user", "Hi"),), ToolUse(TOOLS, NONE)) == "[user] Hi\n"


def test_a_template_of_two_roles_that_alternate_gets_tools_in_the_users_turn(tmp_path: Path) -> None:
    plain = (
        "{% for m in messages %}{% if m.role != ('assistant' if loop.index0 % 2 else 'user') %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "[{{ m.role }}] {{ m.content }}{{ m.name }}\n{% endfor %}"
    )
    chats = Forms(write_tiny_tokenizer(make_checkpoint("llama", tmp_path), plain)).chats
    turns = (Message("user", "Köln?", name="Ada"), *CHAT[2:], Message("user", "So?"))
    asked, called, answered = chats.prompt(turns, ToolUse(TOOLS)).split("\n[")
    assert asked.startswith("[user] You can call functions.")
    assert asked.endswith("</tool_call>\n\nKöln?Ada")
    assert called.startswith("assistant] <tool_call>")
    assert answered == "user] <tool_response>\nrain\n</tool_response>\nSo?\n"


FORMS = [HERMES, LLAMA, MISTRAL]


@pytest.mark.parametrize("marks", ["folder", "marked"])
@pytest.mark.parametrize("call_format", FORMS)
def test_an_answer_that_must_call_only_calls(marks: str, call_format: CallFormat, request: Any) -> None:
    forms = Forms(request.getfixturevalue(marks))
    called, both = spell(call_format, [CITY]), spell(call_format, [CITY, (CLOCK.name, {})])
    for parallel in (True, False):
        use = ToolUse(TOOLS, REQUIRED, parallel=parallel)
        structure = answer_grammar(ChatFormat(call_format, True, False), use, forms.special_id)
        assert structure is not None
        assert forms.accepts(structure, called)
        assert forms.accepts(structure, both) == parallel
        wrong = (called.replace("Ulm", 'Ulm", "x": "'), called.replace(WEATHER.name, "get"), called[:-1], "No.", "")
        assert not any(forms.accepts(structure, text) for text in wrong)
    named = ToolUse(TOOLS, REQUIRED, named=CLOCK.name, parallel=False)
    structure = answer_grammar(ChatFormat(call_format, True, False), named, forms.special_id)
    assert structure is not None
    assert not forms.accepts(structure, called)
    assert forms.accepts(structure, spell(call_format, [(CLOCK.name, {})]))


@pytest.mark.parametrize("marks", ["folder", "marked"])
@pytest.mark.parametrize("call_format", FORMS)
@pytest.mark.parametrize("reasons", [False, True])
def test_calls_of_strict_tools_match_and_all_else_is_free(
    marks: str, call_format: CallFormat, reasons: bool, request: Any
) -> None:
    forms = Forms(request.getfixturevalue(marks))
    chat_format = ChatFormat(call_format, True, reasons)
    structure = answer_grammar(chat_format, ToolUse(STRICT), forms.special_id)
    assert structure is not None
    called, loose = spell(call_format, [CITY]), spell(call_format, [(CLOCK.name, {"zone": 1})])
    texts = ["", "Yes.", "a <tool_cal b", called, loose, spell(call_format, [CITY, CITY])]
    texts += [] if call_format is LLAMA else [f"Let me see. {called}"]
    texts += [f"<think>\nHm {{\n</think>\n\n{text}" for text in texts] if reasons else []
    assert [text for text in texts if not forms.accepts(structure, text)] == []
    wrong = [called.replace('"Ulm"', "1"), spell(call_format, [CITY]).replace("city", "town")]
    wrong += [f"<think>Hm</think>{text}" for text in wrong] if reasons else []
    assert not any(forms.accepts(structure, text) for text in wrong)
    assert answer_grammar(chat_format, ToolUse(TOOLS), forms.special_id) is None
    assert answer_grammar(chat_format, ToolUse(STRICT, NONE), forms.special_id) is None


@pytest.mark.parametrize("marks", ["folder", "marked"])
@pytest.mark.parametrize("reasons", [False, True])
def test_what_is_read_as_a_call_is_held_to_its_schema(marks: str, reasons: bool, request: Any) -> None:
    """Where nothing announces a call, the grammar must take for one all that the reader does."""
    forms = Forms(request.getfixturevalue(marks))
    structure = answer_grammar(ChatFormat(LLAMA, True, reasons), ToolUse(STRICT), forms.special_id)
    assert structure is not None
    wrong, right = (spell(LLAMA, [(WEATHER.name, {"city": city})]) for city in (1, "Ulm"))
    for before in ("", " ", "\n", "<|python_tag|>", "\n<|python_tag|>", *(["<think>a</think>\n"] if reasons else [])):
        assert not forms.accepts(structure, before + wrong)
        assert forms.accepts(structure, before + right)
    assert forms.accepts(structure, "\n So: {")


@pytest.mark.parametrize("marks", ["folder", "marked"])
@pytest.mark.parametrize("call_format", [HERMES, QWEN_CODER, MINIMAX])
def test_no_text_is_read_as_a_call_beside_strict_tools(marks: str, call_format: CallFormat, request: Any) -> None:
    """Neither in a notation that begins without an opening, nor with an opening that is spelled in other tokens."""
    forms = Forms(request.getfixturevalue(marks))
    structure = answer_grammar(ChatFormat(call_format, True, False), ToolUse(STRICT), forms.special_id)
    assert structure is not None
    head = call_format.xml.head_start
    assert forms.accepts(structure, f"a {head}get_weather") is (head not in call_format.openings)
    assert forms.accepts(structure, f"a {head[:-1]}")
    letters = [token for letter in call_format.opening for token in forms.tokenizer.encode(letter, False)]
    matcher = forms.grammars.begin(structure)
    allowed = [matcher.allowed(letters[:count]) for count in range(len(letters) + 1)]
    if forms.special_id(call_format.opening) is None:  # the opening, after which only a call comes
        assert allowed[-1] is not None
        assert not allowed[-1][forms.tokenizer.encode("a", False)[0]]
    else:
        assert allowed[-2] is not None
        assert not allowed[-2][letters[-1]]


def test_schemas_are_enforced_whatever_they_say_besides(folder: Path) -> None:
    forms = Forms(folder)
    said = {"title": "%json", "description": "straße " * 9000, "default": "%json", "examples": ["%json"]}
    properties = {"title": {"type": "string"}, "default": {"enum": ["%json", "description"]}}
    tool = Tool(
        "f", "%json", {"properties": {k: v | said for k, v in properties.items()}, "required": ["title"]} | said
    )
    structure = forms.chats.structure(ToolUse((tool,), REQUIRED), None)
    assert structure is not None
    right = {"title": "a", "default": "%json"}
    assert forms.accepts(structure, spell(HERMES, [("f", right)]))
    for wrong in ({"default": "%json"}, right | {"default": "x"}):
        assert not forms.accepts(structure, spell(HERMES, [("f", wrong)]))
    assert not forms.accepts(structure, spell(HERMES, [("f", right)]).replace(json.dumps(right), "5"))


def test_formats_that_are_not_enforced_do_not_keep_a_tool_from_being_called(folder: Path) -> None:
    secret = Tool("f", parameters={"properties": {"key": {"type": "string", "format": "password"}}})
    answer = StructuredOutput.json_schema({"type": "object", "properties": {"n": {"format": "int64"}}})
    assert Forms(folder).chats.structure(ToolUse((secret,), REQUIRED), None) is not None
    assert Forms(folder).chats.structure(ToolUse((secret,)), answer) is not None


def test_as_many_tools_as_are_allowed_can_be_enforced(folder: Path) -> None:
    tools = tuple(Tool(f"tool_{i}", "What it does. " * 20, WEATHER.parameters, strict=True) for i in range(MAX_TOOLS))
    assert Forms(folder).chats.structure(ToolUse(tools), None) is not None


@pytest.mark.parametrize("marks", ["folder", "marked"])
@pytest.mark.parametrize("call_format", FORMS)
def test_an_answer_is_json_or_calls(marks: str, call_format: CallFormat, request: Any) -> None:
    forms = Forms(request.getfixturevalue(marks))
    answer = StructuredOutput.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})
    if call_format is LLAMA and marks == "folder":  # nothing would tell a call from an answer
        with pytest.raises(InvalidArgument, match="where its answer must be JSON"):
            answer_grammar(ChatFormat(LLAMA, True, False), ToolUse(TOOLS), forms.special_id, answer=answer)
        return
    structure = answer_grammar(ChatFormat(call_format, True, False), ToolUse(TOOLS), forms.special_id, answer=answer)
    assert structure is not None
    assert forms.accepts(structure, '{"a": 1}')
    assert forms.accepts(structure, ("<|python_tag|>" if call_format is LLAMA else "") + spell(call_format, [CITY]))
    assert not forms.accepts(structure, "Yes.")
    with pytest.raises(InvalidArgument, match="must match a regex"):
        answer_grammar(
            ChatFormat(call_format, True, False), ToolUse(TOOLS), forms.special_id, answer=StructuredOutput(REGEX, "a")
        )


def test_reasoning_that_the_prompt_has_begun_comes_first(folder: Path) -> None:
    forms = Forms(folder)
    use = ToolUse(TOOLS, REQUIRED)
    structure = answer_grammar(ChatFormat(HERMES, True, True), use, forms.special_id, is_reasoning=True)
    assert structure is not None
    assert forms.accepts(structure, f"Hm.\n</think>\n\n{spell(HERMES, [CITY])}")
    assert not forms.accepts(structure, spell(HERMES, [CITY]))


@pytest.mark.parametrize("marks", ["folder", "marked"])
@pytest.mark.parametrize("is_reasoning", [False, True])
def test_json_comes_after_reasoning(marks: str, is_reasoning: bool, request: Any) -> None:
    forms = Forms(request.getfixturevalue(marks))
    answer = StructuredOutput.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})
    thinks = ChatFormat(HERMES, True, True)
    for use in (None, ToolUse(TOOLS), ToolUse(TOOLS, NONE)):
        structure = answer_grammar(thinks, use, forms.special_id, answer=answer, is_reasoning=is_reasoning)
        assert structure is not None
        assert forms.accepts(structure, '{"a": 1}') != is_reasoning
        assert forms.accepts(structure, f'{"" if is_reasoning else "<think>"}Hm {{.</think>\n\n{{"a": 1}}')
        assert not forms.accepts(structure, f"{'' if is_reasoning else '<think>'}Hm.</think>Yes.")
    regex = StructuredOutput(REGEX, "a+")
    assert answer_grammar(thinks, None, forms.special_id, answer=regex, is_reasoning=is_reasoning) is regex
    plain = ChatFormat(HERMES, True, False)
    assert answer_grammar(plain, None, forms.special_id, answer=answer) is answer
    assert answer_grammar(plain, None, forms.special_id) is None


def call(messages: tuple[Message, ...] = CHAT[:2], **fields: Any) -> GenerateCall:
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0} | fields.pop("params", {}))
    return GenerateCall(request_id="a", sampling_params=params, messages=messages, **fields)


def maker(folder: Path) -> RequestMaker:
    model = ModelConfig.from_folder(str(folder))
    return RequestMaker(model, Tokenizer.from_folder(folder), Grammars(model))


async def test_a_request_carries_its_form_and_each_sequence_has_a_reader(marked: Path) -> None:
    made = await maker(marked).make(call(tools=ToolUse(STRICT), params={"n": 2}), 0.0, 1000)
    structure = made.request.sampling_params.structured_output
    assert structure is not None
    assert "args_0" in structure.source
    parts = [(0, "<tool_call>"), (1, "Hi"), (0, '{"name": "get_weather", "arguments": {}}'), (1, "!")]
    chunks = [chunk for index, text in parts for chunk in made.readers.read(Chunk(index=index, text=text))]
    assert [chunk.text for chunk in chunks] == ["", "Hi", "", "!"]
    assert [[piece.name for piece in chunk.tool_calls] for chunk in chunks] == [[], [], [WEATHER.name], []]
    plain = await maker(marked).make(call(tools=ToolUse(TOOLS)), 0.0, 1000)
    assert plain.request.sampling_params.structured_output is None
    free = await maker(marked).make(call(), 0.0, 1000)
    assert [chunk.text for chunk in free.readers.read(Chunk(index=0, text="<tool_call>"))] == ["<tool_call>"]


async def test_markers_that_are_special_tokens_are_shown_only_where_they_are_read(tmp_path: Path) -> None:
    template = "{% for tool in tools or [] %}{{ tool }}{% endfor %}[TOOL_CALLS] {{ messages }}"
    folder = write_tiny_tokenizer(make_checkpoint("llama", tmp_path), template)
    raw = raw_tiny_tokenizer()
    special = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    raw.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    made = await maker(folder).make(call(tools=ToolUse(TOOLS)), 0.0, 1000)
    assert made.shown == {tokenizer.token_id(text) for text in special}
    token_ids = tokenizer.encode('[TOOL_CALLS]get_weather[CALL_ID]a1[ARGS]{"city": "Ulm"}', add_special_tokens=False)
    assert made.shown <= set(token_ids)
    text, _ = TextStream(tokenizer, shown=made.shown).push(token_ids)
    ((piece,),) = [chunk.tool_calls for chunk in made.readers.read(Chunk(index=0, text=text))]
    assert (piece.name, piece.arguments) == (WEATHER.name, '{"city": "Ulm"}')
    assert (await maker(folder).make(call(), 0.0, 1000)).shown == frozenset()


async def test_a_prompt_that_ends_within_reasoning_is_answered_from_there(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}<think>\n{% if '</think>' in a %}{% endif %}"
    folder = write_tiny_tokenizer(make_checkpoint("llama", tmp_path), template)
    for params in ({}, {"structured_output": StructuredOutput.json_object()}):
        made = await maker(folder).make(call(params=params, template_options={"a": ""}), 0.0, 1000)
        (chunk,) = made.readers.read(Chunk(index=0, text="Hm.\n</think>\n\n{}", finish_reason=FinishReason.STOP))
        assert (chunk.reasoning, chunk.text) == ("Hm.", "{}")
    regex = {"structured_output": StructuredOutput(REGEX, "a")}
    made = await maker(folder).make(call(params=regex, template_options={"a": ""}), 0.0, 1000)
    assert [chunk.text for chunk in made.readers.read(Chunk(index=0, text="a"))] == ["a"]


DEEP: dict[str, Any] = {}
for _ in range(100):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"template_options": DEEP}, "template_options: got 'dict'; must be nested at most 64 times"),
        ({"template_options": {"a": "x" * 300_000}}, "template_options: got '3000.. characters'"),
        ({"template_options": {"a": "\ud800"}}, "template_options: .*Unicode"),
        (
            {"messages": (Message("assistant", "", (ToolCall("a", "f", json.dumps(DEEP)),)),)},
            "messages: .*arguments must be nested at most 64 times",
        ),
        (
            {"tools": ToolUse(TOOLS, REQUIRED), "params": {"ignore_eos": True}},
            "ignore_eos: got True; contradicts .*, where calls must match their schemas",
        ),
        (
            {"tools": ToolUse(TOOLS, REQUIRED), "params": {"beam_width": 2}},
            "tools: got 'calls that must match their schemas'; .*beam",
        ),
        (
            {"tools": ToolUse(TOOLS), "params": {"structured_output": StructuredOutput(REGEX, "a")}},
            "tools: .*cannot be called where the answer must match a regex",
        ),
    ],
)
async def test_bad_chats_are_told_what_is_wrong(folder: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        await maker(folder).make(call(**fields), 0.0, 1000)


async def test_arguments_of_the_past_may_be_anything(folder: Path) -> None:
    for arguments in ("", "{", "[" * 20_000, '"\\ud800"'):
        past = Message("assistant", "", (ToolCall("a", "f", arguments),))
        if "ud800" in arguments:
            with pytest.raises(InvalidArgument, match="Unicode"):
                await maker(folder).make(call((past,)), 0.0, 100_000)
        else:
            await maker(folder).make(call((past,)), 0.0, 100_000)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "a b"}, "name: "),
        ({"parameters": {"properties": [1]}}, "parameters.properties: .*must be an object"),
        ({"parameters": {"properties": None}}, "parameters.properties: .*must be an object"),
        ({"parameters": {"type": ["object"]}}, "parameters.type: .*must be 'object'"),
        ({"parameters": {"properties": DEEP}}, "parameters: .*nested at most 64"),
        ({"parameters": {"description": "\ud800"}}, "parameters: .*Unicode"),
    ],
)
def test_bad_tools_are_told_what_is_wrong(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Tool(**{"name": "f"} | fields)
    long = tuple(Tool(f"f{i}", parameters={"properties": {"a" * 9000: {"type": "string"}}}) for i in range(8))
    with pytest.raises(InvalidArgument, match=r"tools: got 'schemas of 7\d+ characters'; must have at most 65536"):
        answer_grammar(ChatFormat(HERMES, True, False), ToolUse(long, REQUIRED), lambda _: None)
    with pytest.raises(InvalidArgument, match=r"tools: got '4\d+ characters'; must have at most 262144"):
        ToolUse(tuple(Tool(f"f{i}", "x" * 200_000) for i in range(2)))


def test_what_a_schema_asks_for_and_nobody_can_enforce_is_refused_by_name(folder: Path) -> None:
    odd = Tool("odd", parameters={"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}})
    large = Tool("large", parameters={"type": "object", "properties": {"a": {"type": "number", "multipleOf": 99991}}})
    for tool, why in ((odd, "uniqueItems"), (large, "multipleOf")):
        with pytest.raises(InvalidArgument, match=f"tools: got '{tool.name}'; .*{why}"):
            Forms(folder).chats.structure(ToolUse((WEATHER, tool, CLOCK), REQUIRED), None)
        assert Forms(folder).chats.structure(ToolUse((tool,)), None) is None


@pytest.mark.parametrize("marks", ["folder", "marked"])
@pytest.mark.parametrize("mode", [AUTO, REQUIRED])
def test_a_models_calls_match_their_schemas(marks: str, mode: str, request: Any) -> None:
    """A model with random weights, so that nothing but the form can make them match."""
    folder = request.getfixturevalue(marks)
    forms = Forms(folder)
    schema = {
        "properties": {"city": {"enum": ["Ulm", "Köln"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}}
    }
    tool = Tool(
        "w", parameters={"type": "object", "required": ["city"], "additionalProperties": False} | schema, strict=True
    )
    use = ToolUse((tool,), mode)
    structure = answer_grammar(ChatFormat(HERMES, True, False), use, forms.special_id)
    assert structure is not None
    opening = forms.tokenizer.token_id(HERMES.opening)
    bias = ((opening, 100.0),) if opening is not None else ()  # else the model would never come to call
    asked = [
        SamplingParams(max_tokens=160, temperature=1.0, seed=seed, structured_output=structure, logit_bias=bias)
        for seed in range(12)
    ]
    with LLM(str(folder), num_blocks=512, max_num_seqs=16) as llm:
        outputs = llm.generate(make_prompts([9], seed=1) * len(asked), asked)
    num_calls = 0
    for output in outputs:
        reader = AnswerReader(ChatFormat(HERMES, True, False), use)
        calls: dict[int, str] = {}
        shown = forms.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        for piece in (call for of in reader.push(shown, is_last=True) for call in of.calls):
            assert piece.name == tool.name
            calls[piece.index] = piece.arguments
        is_whole = output.finish_reason is FinishReason.STOP
        assert calls or mode == AUTO or not is_whole
        for arguments in list(calls.values())[: None if is_whole else -1]:
            jsonschema.validate(json.loads(arguments), dict(tool.parameters))
            num_calls += 1
    assert num_calls >= 3 or (mode == AUTO and not bias)
