"""The grammar of an answer to messages: of calls that must match their schemas, and of JSON after reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from shoal_cluster.chat.chat_format import END_OF_THINK, PYTHON_TAG, THINK, CallFormat, ChatFormat
from shoal_cluster.chat.tool import REQUIRED, Tool, ToolUse
from shoal_replica.errors import InvalidArgument
from shoal_replica.json_schemas import bare, without_unknown_formats
from shoal_replica.structured_output import JSON_SCHEMA, LARK, MAX_SOURCE_LENGTH, WHITE_SPACE, StructuredOutput

ANYTHING = "/(?s:.*)/"
SPACE = r"[ \t\r\n]{0,4}"
GAP = f"/{SPACE}/"
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_ARGUMENTS = {"type": "object"}

SpecialId = Callable[[str], int | None]
"""The id of a text that is a token of its own, which no text of a grammar can spell; else None."""


def answer_grammar(
    chat_format: ChatFormat,
    use: ToolUse | None,
    special_id: SpecialId,
    *,
    answer: StructuredOutput | None = None,
    is_reasoning: bool = False,
) -> StructuredOutput | None:
    """What an answer must match, in Lark's notation with llguidance's extensions; None if it may be anything.

    A call that the choice requires matches its tool's schema. Where the model may choose, only the calls of strict
    tools have to, and other text may come before them. Reasoning comes first and is free, but for an ``answer`` that is
    not JSON.

    Args:
        answer: what the answer must be unless it calls tools.
        is_reasoning: the prompt ends within reasoning.

    Raises:
        InvalidArgument: there are tools, and ``answer`` is another form than JSON, or all schemas are too long.
    """
    tools = () if use is None else use.callable
    is_required = use is not None and use.mode == REQUIRED
    is_parallel = chat_format.parallel and (use is None or use.parallel)
    thinks = is_reasoning or chat_format.reasons
    if not tools and (answer is None or answer.kind != JSON_SCHEMA or not thinks):
        return answer
    if tools and answer is None and not (is_required or any(tool.strict for tool in tools)):
        return None
    rules = [_call(number, tool, chat_format.calls.arguments_key, is_required) for number, tool in enumerate(tools)]
    if tools:
        rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
        rules += _calls(chat_format.calls, special_id, is_parallel)
    if is_required:
        start = "calls"
    elif answer is not None:
        start = f"{_apart(chat_format.calls, special_id)} calls | answer" if tools else "answer"
        rules.append(f"answer: {_json_schema(answer)}")
    else:
        start, free = _or_text(chat_format, special_id, is_parallel)
        rules += free
    if thinks:
        rules.append(_until("thought", ANYTHING, END_OF_THINK, special_id))
        is_text = special_id(THINK) is None
        think = f"/{SPACE}{re.escape(THINK)}/" if is_text else f"{GAP} {_spelled(THINK, special_id)}"
        start = (f"thought {GAP}" if is_reasoning else f"({think} thought {GAP})?") + f" ({start})"
    source = "\n".join(['%llguidance {"no_forcing": true}', f"start: {start}", *rules])
    if tools and len(source) > MAX_SOURCE_LENGTH:
        limit = f"must have at most {MAX_SOURCE_LENGTH} together, without descriptions, where calls must match them"
        raise InvalidArgument("tools", f"schemas of {len(source)} characters", limit)
    return StructuredOutput(LARK, source)


def _json_schema(answer: StructuredOutput) -> str:
    if answer.kind != JSON_SCHEMA:
        raise InvalidArgument("tools", None, f"cannot be called where the answer must match a {answer.kind}")
    try:
        schema = without_unknown_formats(json.loads(answer.source))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("response_format", answer.source, f"is not JSON: {error}") from None
    return _within(schema)


def _apart(calls: CallFormat, special_id: SpecialId) -> str:
    """What comes before calls, lest their beginning is read as that of other JSON."""
    if calls.opening:
        return ""
    if special_id(PYTHON_TAG) is None:
        raise InvalidArgument("tools", None, "cannot be called by this model where its answer must be JSON")
    return _spelled(PYTHON_TAG, special_id)


def _call(number: int, tool: Tool, arguments_key: str, is_required: bool) -> str:
    """One tool's call."""
    head = f'{{"name": {json.dumps(tool.name)}, {json.dumps(arguments_key)}: '
    schema: Any = ANY_ARGUMENTS
    if is_required or tool.strict:
        schema = ANY_ARGUMENTS | without_unknown_formats(bare(tool.parameters)) if tool.parameters else NO_PARAMETERS
    return f'call_{number}: {json.dumps(head)} args_{number} "}}"\nargs_{number}: {_within(schema)}'


def _within(schema: Any) -> str:
    """A schema within a grammar. The mark of another one cannot be in it."""
    if isinstance(schema, dict):
        schema = schema | {"x-guidance": {"whitespace_pattern": WHITE_SPACE}}
    return "%json " + json.dumps(schema, ensure_ascii=False).replace("%", "\\u0025")


def _calls(calls: CallFormat, special_id: SpecialId, parallel: bool) -> list[str]:
    """All calls of an answer, one after the other."""
    opening, closing = _spelled(calls.opening, special_id), _spelled(calls.closing, special_id)
    if not calls.opening:
        more = _more('"; " call', parallel)
        return [f"calls: call {more}"]
    if calls.is_list:
        more = _more('", " call', parallel)
        return [f'body: {GAP} "[" call {more} "]"', f"calls: {opening} body"]
    more = _more(f"{GAP} {opening} body", parallel)
    return [f"body: {GAP} call {GAP} {closing}", f"calls: {opening} body {more}"]


def _or_text(chat_format: ChatFormat, special_id: SpecialId, parallel: bool) -> tuple[str, list[str]]:
    """What an answer may be that need not call, and the rules for that. No text may have in it what the reader takes
    for the beginning of a call, also where that is a token of its own and could be spelled in others.
    """
    calls, unless = chat_format.calls, ""
    if chat_format.reasons and special_id(THINK) is None:
        unless = f" & ~/\\s*{re.escape(THINK)}(?s:.*)/"  # that is another way to begin
    if not calls.opening:  # what begins with a brace is a call
        before = f"{GAP} ({_spelled(PYTHON_TAG, special_id)})?"
        if special_id(PYTHON_TAG) is None:
            before = f"/{SPACE}({re.escape(PYTHON_TAG)})?/"
            unless += rf" & ~/\s*{re.escape(PYTHON_TAG)}(?s:.*)/"
        return f"(FREE | {before} calls)?", [rf"FREE: /\s*[^\s{{\[](?s:.*)/{unless}"]
    free = f"FREE: {ANYTHING}{_without(calls.openings)}{unless}"
    if special_id(calls.opening) is not None:
        return "FREE? calls?", [free]
    text = f"{ANYTHING}{_without(opening for opening in calls.openings if opening != calls.opening)}"
    before = _until("before", "FIRST", calls.opening, special_id)
    between = _until("between", "NEXT", calls.opening, special_id)
    more = _more("between body", parallel and not calls.is_list)
    return f"FREE | before body {more}", [free, f"FIRST: {text}{unless}", f"NEXT: {text}", before, between]


def _without(texts: Iterable[str]) -> str:
    """Of a regular expression: what matches has none of ``texts`` in it."""
    return "".join(f" & ~/(?s:.*){re.escape(text)}(?s:.*)/" for text in texts)


def _until(name: str, text: str, marker: str, special_id: SpecialId) -> str:
    """The rule for text up to and including the first ``marker``."""
    if special_id(marker) is None:
        return f"{name}[suffix={json.dumps(marker)}]: {text}"
    return f"{name}: {text} {_spelled(marker, special_id)}"


def _spelled(marker: str, special_id: SpecialId) -> str:
    token_id = special_id(marker) if marker else None
    return json.dumps(marker) if token_id is None else f"<[{token_id}]>"


def _more(rule: str, parallel: bool) -> str:
    return f"({rule})*" if parallel else ""
