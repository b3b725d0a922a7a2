"""An answer's text, told apart into content, reasoning and tool calls."""

from __future__ import annotations

import pytest
from fixtures.tool_formats import CLOCK, ODD, TOOLS, WEATHER, read

from shoal_cluster.chat.answer_reader import AnswerReader
from shoal_cluster.chat.chat_format import GLM, HERMES, LLAMA, MINIMAX, MISTRAL, QWEN_CODER, CallFormat, ChatFormat
from shoal_cluster.chat.tool import NONE, ToolUse
from shoal_cluster.serve.answer_readers import AnswerReaders
from shoal_cluster.serve.call import Chunk, Usage
from shoal_replica.request import FinishReason

CITY = '{"city": "Köln"}'
WEATHER_CALL, CLOCK_CALL = (WEATHER.name, CITY), (CLOCK.name, "{}")


@pytest.mark.parametrize(
    ("call_format", "text", "content", "calls"),
    [
        (HERMES, "Hello <b>there</b>.\n", "Hello <b>there</b>.\n", []),
        (HERMES, "  \n", "  \n", []),
        (HERMES, "", "", []),
        (
            HERMES,
            'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>\n',
            "Let me look.",
            [WEATHER_CALL],
        ),
        (
            HERMES,
            '<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}</tool_call> and\n'
            '<tool_call>{"arguments": {}, "id": 7, "name": "what-time.is_it"}</tool_call>\nthat is all ',
            "and\nthat is all",
            [WEATHER_CALL, CLOCK_CALL],
        ),
        (HERMES, '<tool_call>{"name": "what-time.is_it"}</tool_call>', "", [CLOCK_CALL]),
        (HERMES, '<tool_call>{"name": "what-time.is_it", "arguments": null}</tool_call>', "", [CLOCK_CALL]),
        (
            HERMES,
            '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Köln\\"}"}</tool_call>',
            "",
            [WEATHER_CALL],
        ),
        (
            HERMES,
            '<tool_call>{"name": "get_weather", "arguments": {"city": "a } \\" \\\\", "of": [{}, "]"]}, "x": [1]}\n',
            "",
            [(WEATHER.name, '{"city": "a } \\" \\\\", "of": [{}, "]"]}')],
        ),
        # Qwen3-Coder's notation: only the schema tells text from numbers.
        (
            HERMES,
            "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n</parameter>"
            "\n<parameter=note>\nall\nday\n</parameter>\n</function>\n</tool_call>",
            "",
            [(WEATHER.name, '{"city": "12", "days": 3, "note": "all\\nday"}')],
        ),
        (HERMES, "<tool_call><function=what-time.is_it></function></tool_call>", "", [CLOCK_CALL]),
        # Malformed: of a call that has a name, what comes before the next marker is dropped.
        (
            HERMES,
            '<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}\n</tool_call>\n<tool_call>'
            '{"name": "what-time.is_it", "arguments": {}}}\n</tool_call>\nSo.',
            "So.",
            [WEATHER_CALL, CLOCK_CALL],
        ),
        (HERMES, '<tool_call>{"name": "what-time.is_it" "arguments": {}}</tool_call>So.', "So.", [CLOCK_CALL]),
        (
            HERMES,
            '<tool_call>{"name": "what-time.is_it", "arguments": {}, "arguments": {"x": 1}}</tool_call>',
            "",
            [CLOCK_CALL],
        ),
        (HERMES, '<tool_call>{"name": "a b", "arguments": {}}', '<tool_call>{"name": "a b", "arguments": {}}', []),
        (HERMES, '<tool_call>{"name": "\\ud800"}', '<tool_call>{"name": "\\ud800"}', []),
        (
            HERMES,
            '<tool_call>{"name": "what-time.is_it", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}',
            "",
            [(CLOCK.name, '{"a": "\N{REPLACEMENT CHARACTER}"}')],
        ),
        (HERMES, f'<tool_call>{{"name": {"[" * 9000}', f'<tool_call>{{"name": {"[" * 9000}', []),
        (
            HERMES,
            "<tool_call><function=get_weather><parameter=city>Ulm</parameter></tool_call>So.",
            "So.",
            [(WEATHER.name, '{"city": "Ulm"}')],
        ),
        # Qwen3-Coder leaves out tags, and writes Python's words.
        (
            QWEN_CODER,
            "Well.\n<function=get_weather>\n<parameter=city>\nUlm\n<parameter=days>\n3\n</function>\n</tool_call>So.",
            "Well.\nSo.",
            [(WEATHER.name, '{"city": "Ulm", "days": 3}')],
        ),
        (
            QWEN_CODER,
            "<tool_call>\n<function=odd>\n<parameter=sure>True</parameter><parameter=note>null</parameter>"
            "<parameter=unit>12</parameter><parameter=any>1.10</parameter><parameter=any>2</parameter>"
            "<parameter=nan>NaN</parameter><parameter=deep>" + "[" * 9000 + "</parameter></function></tool_call>",
            "",
            [
                (
                    ODD.name,
                    '{"sure": true, "note": null, "unit": "12", "any": 1.10, "nan": "NaN", "deep": "'
                    + "[" * 9000
                    + '"}',
                )
            ],
        ),
        (QWEN_CODER, "<function=" + "a" * 300, "<function=" + "a" * 300, []),
        (HERMES, "<function=get_weather>", "<function=get_weather>", []),
        # GLM-4.5 writes lines, its successors none.
        (
            GLM,
            "Well.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Ulm</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>3</arg_value>\n</tool_call><tool_call>what-time.is_it</tool_call>So.",
            "Well.\nSo.",
            [(WEATHER.name, '{"city": "Ulm", "days": 3}'), (CLOCK.name, "{}")],
        ),
        (
            GLM,
            '<tool_call>{"name": "get_weather", "arguments": {"city": "Ulm"}}</tool_call>',
            "",
            [(WEATHER.name, '{"city": "Ulm"}')],
        ),
        (
            GLM,
            "<tool_call>odd<arg_key>note</arg_key><arg_value>a <b>\nc</arg_value><arg_key>sure</arg_key>"
            "<arg_value>True\n</tool_call>",
            "",
            [(ODD.name, '{"note": "a <b>\\nc", "sure": true}')],
        ),
        # The model ends its answer within a call.
        (GLM, "<tool_call>get_weather<arg_key>ci", "", [(WEATHER.name, "{}")]),
        (GLM, "<tool_call>get_weather", "<tool_call>get_weather", []),
        (GLM, "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Ul", "", [(WEATHER.name, '{"city": "Ul"}')]),
        (
            HERMES,
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nUlm\n</parameter>\n",
            "",
            [(WEATHER.name, '{"city": "Ulm"}')],
        ),
        (HERMES, "<tool_call><function=get_weather><parameter=city>Ulm</para", "", [(WEATHER.name, '{"city": "Ulm"}')]),
        (
            HERMES,
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nUlm\n",
            "",
            [(WEATHER.name, '{"city": "Ulm"}')],
        ),
        (GLM, "<tool_call>get_wea", "<tool_call>get_wea", []),
        (GLM, "<tool_call>a b</tool_call>", "<tool_call>a b</tool_call>", []),
        (GLM, "get_weather<arg_key>", "get_weather<arg_key>", []),
        (
            MINIMAX,
            'Well.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Ulm</parameter>\n'
            '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="what-time.is_it">\n</invoke>\n'
            "</minimax:tool_call>So.",
            "Well.\nSo.",
            [(WEATHER.name, '{"city": "Ulm", "days": 3}'), (CLOCK.name, "{}")],
        ),
        (MINIMAX, '<invoke name="what-time.is_it"></invoke>', "", [(CLOCK.name, "{}")]),
        (MINIMAX, "<minimax:tool_call><invoke nam", "<minimax:tool_call><invoke nam", []),
        # Cut off.
        (HERMES, '<tool_call>\n{"name": "get_weather", "arguments": {"ci', "", [(WEATHER.name, '{"ci')]),
        (HERMES, '<tool_call>\n{"name": "get_wea', '<tool_call>\n{"name": "get_wea', []),
        (HERMES, "and <tool_ca", "and <tool_ca", []),
        # Not calls.
        (HERMES, "<tool_call>\nnope</tool_call> ", "<tool_call>\nnope</tool_call> ", []),
        (HERMES, "<tool_call> </tool_call>.", "<tool_call> </tool_call>.", []),
        (HERMES, '<tool_call>{"nam": 1}</tool_call>', '<tool_call>{"nam": 1}</tool_call>', []),
        (HERMES, '<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', []),
        (HERMES, "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
        (HERMES, "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        (
            HERMES,
            "<tool_call>\n<function=get weather>\n</function>\n</tool_call>\nAnd that is all.",
            "<tool_call>\n<function=get weather>\n</function>\n</tool_call>\nAnd that is all.",
            [],
        ),
        (
            QWEN_CODER,
            "Write `<function=my func>` or `<function=foo>` first.\n<function=get_weather>\n<parameter=city>\nUlm\n"
            "</parameter>\n</function>",
            "Write `<function=my func>` or `<function=foo>` first.",
            [(WEATHER.name, '{"city": "Ulm"}')],
        ),
        (QWEN_CODER, "As `<function=get_weather>`, so.", "As `<function=get_weather>`, so.", []),
        (MINIMAX, 'As `<invoke name="foo">` or so.', 'As `<invoke name="foo">` or so.', []),
        (QWEN_CODER, "<function=nope>\n</function>", "<function=nope>\n</function>", []),
        (HERMES, "<tool_call><function></tool_call>", "<tool_call><function></tool_call>", []),
        (
            HERMES,
            '<tool_call>{"name": "what-time.is_it"}\n<tool_call>nope</tool_call>',
            "<tool_call>nope</tool_call>",
            [CLOCK_CALL],
        ),
        # A name that is no tool's is for the client to judge, where the model has said that it is a call.
        (HERMES, '<tool_call>{"name": "nope", "arguments": {}}</tool_call>', "", [("nope", "{}")]),
        (QWEN_CODER, "<tool_call>\n<function=nope>\n</function>\n</tool_call>", "", [("nope", "{}")]),
        (LLAMA, '{"name": "get_weather", "parameters": {"city": "Köln"}}', "", [WEATHER_CALL]),
        (LLAMA, '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Köln"}}', "", [WEATHER_CALL]),
        (
            LLAMA,
            '\n{"type": "function", "name": "get_weather", "parameters": {"city": "Köln"}}; '
            '{"name": "what-time.is_it"}',
            "",
            [WEATHER_CALL, CLOCK_CALL],
        ),
        (LLAMA, '[{"name": "what-time.is_it", "arguments": {}}]', "", [CLOCK_CALL]),
        (LLAMA, '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
        (LLAMA, '{"age": 36, "name": "what-time.is_it"}', '{"age": 36, "name": "what-time.is_it"}', []),
        (LLAMA, "[1, 2]", "[1, 2]", []),
        (LLAMA, '{"name": "what-time.is_it"}\n[1] says so', "[1] says so", [CLOCK_CALL]),
        (LLAMA, '\xa0{"name": "what-time.is_it"}', '\xa0{"name": "what-time.is_it"}', []),
        (LLAMA, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        (LLAMA, 'So: {"name": "what-time.is_it"}', 'So: {"name": "what-time.is_it"}', []),
        (
            MISTRAL,
            'Well.[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Köln"}, "id": "a1b2c3d4e"}, '
            '{"name": "what-time.is_it", "arguments": {}}]',
            "Well.",
            [WEATHER_CALL, CLOCK_CALL],
        ),
        (
            MISTRAL,
            '[TOOL_CALLS]get_weather[ARGS]{"city": "Köln"}[TOOL_CALLS]what-time.is_it[CALL_ID]9[ARGS]{}',
            "",
            [WEATHER_CALL, CLOCK_CALL],
        ),
        (MISTRAL, '[TOOL_CALLS]get_weather{"city": "Köln"}', "", [WEATHER_CALL]),
        (MISTRAL, "[TOOL_CALLS]none of them", "[TOOL_CALLS]none of them", []),
        (MISTRAL, "[TOOL_CALLS]what-time.is_it{} nope {x}", "nope {x}", [CLOCK_CALL]),
        (MISTRAL, "[TOOL_CALLS]other[ARGS]{}", "", [("other", "{}")]),
    ],
)
def test_calls_and_content(call_format: CallFormat, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read([text], call_format) == (content, "", calls)
    assert read([*text, ""], call_format) == (content, "", calls)


def test_a_tagged_call_that_is_cut_off_stays_open() -> None:
    reader = AnswerReader(ChatFormat(GLM, True, False), ToolUse(TOOLS))
    text = (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Ulm</arg_value><arg_key>days</arg_key><arg_value>1"
    )
    (piece,) = reader.push(text, is_last=True, is_cut=True)
    assert "".join(call.arguments for call in piece.calls) == '{"city": "Ulm"'


@pytest.mark.parametrize(
    ("text", "is_reasoning", "expected"),
    [
        ("<think>\nHm. <tool_call>\n</think>\n\nYes.", False, ("Yes.", "Hm. <tool_call>", [])),
        ("Hm.\n</think>\nYes.", True, ("Yes.", "Hm.", [])),
        ("Hm", True, ("", "Hm", [])),
        ("<think>\nHm.</think>Yes.", True, ("Yes.", "Hm.", [])),
        ("\n\n", False, ("\n\n", "", [])),
        ("\n Yes", False, ("\n Yes", "", [])),
        ("<think>Hm </thi", False, ("", "Hm </thi", [])),
        ("\n<think></think>", False, ("", "", [])),
        ("I <think> so", False, ("I <think> so", "", [])),
        ("<thin", False, ("<thin", "", [])),
        (
            'a</think>b <tool_call>{"name": "what-time.is_it", "arguments": {}}</tool_call>',
            True,
            ("b", "a", [CLOCK_CALL]),
        ),
    ],
)
def test_reasoning(text: str, is_reasoning: bool, expected: tuple[str, str, list[tuple[str, str]]]) -> None:
    assert read([text], HERMES, reasons=True, is_reasoning=is_reasoning) == expected
    assert read([*text, ""], HERMES, reasons=True, is_reasoning=is_reasoning) == expected


def test_without_tools_calls_are_text() -> None:
    text = '<tool_call>{"name": "what-time.is_it"}</tool_call>'
    assert read([text], HERMES, ToolUse(TOOLS, NONE)) == (text, "", [])


def test_only_the_first_call_counts_where_they_may_not_be_parallel() -> None:
    one = '<tool_call>{"name": "what-time.is_it", "arguments": {}}</tool_call>'
    assert read([*(one + one)], HERMES, ToolUse(TOOLS, parallel=False)) == ("", "", [CLOCK_CALL])


def test_a_template_that_takes_one_call_gets_one() -> None:
    reader = AnswerReader(ChatFormat(LLAMA, True, False, parallel=False), ToolUse(TOOLS))
    (piece,) = reader.push('{"name": "what-time.is_it"}; {"name": "what-time.is_it"}', is_last=True)
    assert len(piece.calls) == 1


def test_json_is_no_call_where_the_answer_is_json() -> None:
    text = '{"name": "what-time.is_it"}'
    for given, expected in ((text, (text, 0)), (f"<|python_tag|>{text}", ("", 1))):
        (piece,) = AnswerReader(ChatFormat(LLAMA, True, False), ToolUse(TOOLS), is_json=True).push(given, is_last=True)
        assert (piece.content, len(piece.calls)) == expected


@pytest.mark.parametrize(
    ("call_format", "text"),
    [
        (QWEN_CODER, '{"code": "<function=foo> <function=get_weather></function>"}'),
        (HERMES, ' {"code": "<tool_call>{\\"name\\": \\"get_weather\\"}"}'),
        (MISTRAL, '{"code": "[TOOL_CALLS]get_weather{}"}'),
    ],
)
def test_markers_within_an_answer_in_json_are_its_text(call_format: CallFormat, text: str) -> None:
    assert read([text], call_format, is_json=True) == (text, "", [])
    assert read([*f"Hm.</think>{text}", ""], call_format, reasons=True, is_reasoning=True, is_json=True) == (
        text.lstrip(),
        "Hm.",
        [],
    )


def test_calls_instead_of_an_answer_in_json_are_read() -> None:
    text = '\n<tool_call>{"name": "what-time.is_it"}</tool_call>\n<tool_call>{"name": "odd"}</tool_call>'
    assert read([text], HERMES, is_json=True) == ("", "", [CLOCK_CALL, (ODD.name, "{}")])
    assert read([*text, ""], HERMES, is_json=True) == ("", "", [CLOCK_CALL, (ODD.name, "{}")])


def test_arguments_are_passed_on_as_they_come() -> None:
    reader = AnswerReader(ChatFormat(HERMES, True, False), ToolUse(TOOLS))
    assert not reader.push('<tool_call>\n{"name": "get_wea')
    ((piece,),) = [of.calls for of in reader.push('ther", "arguments": {"ci')]
    assert (piece.index, piece.name, piece.arguments) == (0, "get_weather", '{"ci')
    ((piece,),) = [of.calls for of in reader.push('ty": 1')]
    assert (piece.name, piece.call_id, piece.arguments) == ("", "", 'ty": 1')


def test_ids_are_as_mistral_wants_them() -> None:
    ids = set()
    for _ in range(9):
        reader = AnswerReader(ChatFormat(MISTRAL, True, False), ToolUse(TOOLS))
        ((piece,),) = [of.calls for of in reader.push("[TOOL_CALLS]what-time.is_it[ARGS]{}", is_last=True)]
        ids.add(piece.call_id)
    assert len(ids) == 9
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)


@pytest.mark.parametrize("is_reasoning", [True, False])
def test_reasoning_counts_alike_however_tokens_come_together(is_reasoning: bool) -> None:
    tokens = ["<think>", *["so "] * 10, "</think>", *["yes "] * 100][is_reasoning:]
    num_thought = 12 - is_reasoning
    for step in (1, 2, 7, 30, len(tokens)):
        readers = AnswerReaders(
            [AnswerReader(ChatFormat(HERMES, takes_tools=True, reasons=True), None, is_reasoning=is_reasoning)]
        )
        usage = Usage(num_prompt_tokens=1, num_cached_tokens=0, num_output_tokens=0, replica_id="", ttft_s=0.0)
        for start in range(0, len(tokens), step):
            some, is_last = tokens[start : start + step], start + step >= len(tokens)
            chunk = Chunk(
                index=0,
                text="".join(some),
                token_ids=(0,) * len(some),
                finish_reason=FinishReason.STOP if is_last else None,
                usage=usage if is_last else None,
            )
            *_, told = readers.read(chunk)
        assert told.usage is not None
        assert abs(told.usage.num_reasoning_tokens - num_thought) <= (0 if step == 1 else 4)


def test_reasoning_has_no_more_tokens_than_the_answer() -> None:
    """Its marker may come in several tokens, of which the last one shows what it is."""
    readers = AnswerReaders([AnswerReader(ChatFormat(HERMES, takes_tools=True, reasons=True), None)])
    usage = Usage(num_prompt_tokens=1, num_cached_tokens=0, num_output_tokens=2, replica_id="", ttft_s=0.0)
    readers.read(Chunk(index=0, text="<think", token_ids=(0,)))
    *_, told = readers.read(Chunk(index=0, text=">", token_ids=(0,), finish_reason=FinishReason.STOP, usage=usage))
    assert told.usage is not None
    assert told.usage.num_reasoning_tokens <= 2


def test_pieces_keep_their_order() -> None:
    reader = AnswerReader(ChatFormat(HERMES, True, True), ToolUse(TOOLS))
    one = '<tool_call>{"name": "what-time.is_it", "arguments": {}}</tool_call>'
    pieces = reader.push(f"<think>Hm.</think>A.{one}B.{one}", is_last=True)
    told = [(piece.reasoning, piece.content, [call.index for call in piece.calls]) for piece in pieces]
    assert told == [("Hm.", "A.", [0]), ("", "\nB.", [1])]
