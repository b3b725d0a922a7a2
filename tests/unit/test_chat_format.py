"""What chat templates tell of their models. The lines are those by which the families' templates differ."""

from __future__ import annotations

import pytest

from shoal_cluster.chat.chat_format import GLM, HERMES, LLAMA, MINIMAX, MISTRAL, QWEN_CODER, CallFormat, ChatFormat
from shoal_replica.chat_template import ChatTemplate

TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "calls", "takes_tools", "reasons", "parallel"),
    [
        (TOOLS + '<tool_call>\n{"name": <function-name>}\n</tool_call>', HERMES, True, False, True),
        (TOOLS + "<tool_call>{% if enable_thinking %}<think>\n\n</think>{% endif %}", HERMES, True, True, True),
        (TOOLS + "<tool_call>\n<function=example_function_name>\n<parameter=a>", QWEN_CODER, True, False, True),
        (
            TOOLS + "<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>x</arg_value></tool_call>{# </think> #}",
            GLM,
            True,
            True,
            True,
        ),
        (TOOLS + '<minimax:tool_call>\n<invoke name="x">\n</invoke>', MINIMAX, True, False, True),
        (
            "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{%- if tools is not none %}x{% endif %}"
            '{{- raise_exception("This model only supports single tool-calls at once!") }}<|python_tag|>',
            LLAMA,
            True,
            False,
            False,
        ),
        (TOOLS + "{{ '[TOOL_CALLS] [' }}", MISTRAL, True, False, True),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", HERMES, False, False, True),
        ("{{ messages }}<|Assistant|><think>\n{% if '</think>' in content %}{% endif %}", HERMES, False, True, True),
        (TOOLS + "something new", LLAMA, True, False, True),
    ],
)
def test_notation(source: str, calls: CallFormat, takes_tools: bool, reasons: bool, parallel: bool) -> None:
    assert ChatFormat.of(ChatTemplate(source, {})) == ChatFormat(calls, takes_tools, reasons, parallel)


def test_special_tokens_around_calls_are_read() -> None:
    mistral = ChatFormat(MISTRAL, True, False).call_markers
    assert set(mistral) >= {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}
    assert "<|python_tag|>" in ChatFormat(LLAMA, True, False).call_markers
    assert set(ChatFormat(GLM, True, False).call_markers) >= {"<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"}
    assert "<minimax:tool_call>" in ChatFormat(MINIMAX, True, False).call_markers
    assert set(ChatFormat(HERMES, True, False).call_markers) >= {"<tool_call>", "</tool_call>"}


def test_a_template_of_its_own_for_tools_is_the_one_that_tells() -> None:
    template = ChatTemplate("{{ messages }}", {}, for_tools=f"{TOOLS}<tool_call>")
    assert ChatFormat.of(template).takes_tools
    assert ChatFormat.of(None) == ChatFormat(HERMES, takes_tools=False, reasons=False)
