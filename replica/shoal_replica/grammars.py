"""Which tokens may come next in a structured answer, by llguidance, which is imported only where one is asked for."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shoal_replica.errors import InvalidArgument
from shoal_replica.grammar_limits import SCHEMA, check_grammar, check_schema
from shoal_replica.json_schemas import without_unknown_formats
from shoal_replica.model_config import ModelConfig
from shoal_replica.structured_output import FIELD, JSON_SCHEMA, REGEX, WHITE_SPACE, StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

MAX_COMPILED = 128  # forms that are kept compiled
MAX_REASON = 300  # characters of llguidance's own message
# Compiling a form, making a mask and taking a token hold up a step. The library's own limits allow about a second of
# each; with these it is some tens of milliseconds.
MAX_LEXER_STATES = 20_000
INITIAL_LEXER_FUEL = 100_000
MAX_STEP_ITEMS = 10_000  # of the parser, for a mask or a token: where a grammar is ambiguous they grow with the answer
# Tokens that are certain must not be chosen by tokenizing their text, which may spell a special token.
OPTIONS = '%llguidance {"no_forcing": true}'


class Grammars:
    """Compiles structures for a model's vocabulary. Any thread may call its methods; what is called first reads the
    vocabulary, unless ``load`` has, and no other Python code runs meanwhile (0.24 s for 49 000 tokens).
    """

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._file = Path(model.folder) / "tokenizer.json"
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._failure = ""  # why there is no tokenizer
        self._compiled: dict[StructuredOutput, LLMatcher] = {}  # least lately used first

    def load(self) -> None:
        """Read the vocabulary, where the model has one and can end an answer."""
        if self._file.is_file() and self._model.eos_token_ids and (why := self._open()[1]):
            logger.warning("structured output is refused: its library cannot use this model's tokenizer: %s", why)

    def check(self, structure: StructuredOutput) -> None:
        """Raise InvalidArgument if ``structure`` is malformed, too complex or not supported, if nothing can match it,
        or if the model has no end-of-sequence token, by which a structured answer ends.
        """
        self._compile(structure)

    def begin(self, structure: StructuredOutput) -> Matcher:
        """The matcher of a new answer. One that ``check`` would refuse, though a gateway has not, matches nothing: an
        error would end the step, and others' answers with it.
        """
        try:
            return Matcher(self._compile(structure).deep_copy(), self._model)
        except InvalidArgument:  # its words have the client's in them, which no log may
            logger.error("a structured answer cannot be begun: its %s is refused here", structure.kind)
            return Matcher(None, self._model)

    def is_special(self, token_id: int, text: str) -> bool:
        """Whether grammars know the token of that text as one of its own, which they cannot spell as text."""
        tokenizer, _ = self._open()
        if tokenizer is None:
            return False
        from llguidance import LLMatcher

        return LLMatcher(tokenizer, f"start: {json.dumps(text)}", log_level=0).try_consume_tokens([token_id]) == 0

    def _compile(self, structure: StructuredOutput) -> LLMatcher:
        """The form before any token, not to be changed."""
        with self._lock:
            if (matcher := self._compiled.pop(structure, None)) is not None:
                self._compiled[structure] = matcher
                return matcher
        if not self._model.eos_token_ids:
            raise InvalidArgument(FIELD, structure.kind, "needs a model with an end-of-sequence token")
        tokenizer, failure = self._open()
        if tokenizer is None:
            raise InvalidArgument(FIELD, structure.kind, f"is not served with this model's tokenizer: {failure}")
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES, initial_lexer_fuel=INITIAL_LEXER_FUEL, step_max_items=MAX_STEP_ITEMS
        )
        try:
            matcher = LLMatcher(tokenizer, _grammar(structure), log_level=0, limits=limits)
        except ValueError as error:  # JSON that cannot be parsed
            raise _refusal(structure, str(error)) from None
        if not matcher.is_error():
            matcher.compute_bitmask()  # what no token can begin shows only here
        if matcher.is_error():
            raise _refusal(structure, matcher.get_error())
        with self._lock:
            if len(self._compiled) >= MAX_COMPILED:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[structure] = matcher
        return matcher

    def _open(self) -> tuple[LLTokenizer | None, str]:
        """The vocabulary, or why there is none."""
        with self._lock:
            if self._tokenizer is None and not self._failure:
                from llguidance import LLTokenizer

                eos = list(self._model.eos_token_ids)
                try:
                    text = self._file.read_text(encoding="utf-8")
                    self._tokenizer = LLTokenizer(text, n_vocab=self._model.vocab_size, eos_token=eos)
                except (OSError, ValueError) as error:
                    self._failure = str(error)
            return self._tokenizer, self._failure


class Matcher:
    """How far one answer has matched its structure."""

    def __init__(self, matcher: LLMatcher | None, model: ModelConfig) -> None:
        self._matcher = matcher
        self._vocab_size = model.vocab_size
        self._eos = [token_id for token_id in model.eos_token_ids if token_id < model.vocab_size]
        self._num_consumed = 0

    def allowed(self, generated: Sequence[int] | NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Which tokens may follow ``generated``, bool [vocab_size]: only those that end the answer once it is complete.
        None if nothing may: the answer does not match, or has become too complex to match.
        """
        if self._matcher is None:
            return None
        new = [int(token_id) for token_id in generated[self._num_consumed :]]
        if new:
            self._matcher.consume_tokens(new)
            self._num_consumed += len(new)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            reason = self._matcher.stop_reason()  # its words have the client's in them
            logger.warning("a structured answer is cut: it has become too complex, or does not match (%s)", reason)
            return None
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if not (self._matcher.is_accepting() or self._matcher.is_stopped()):
            allowed[self._eos] = False  # an end that is also ordinary text would end the answer early
        return allowed if allowed.any() else None


def _refusal(structure: StructuredOutput, reason: str) -> InvalidArgument:
    return InvalidArgument(FIELD, structure.source, f"cannot be used as {structure.kind}: {_short(reason)}")


def _short(reason: str) -> str:
    """llguidance's message without the state that it prints after some."""
    return " ".join(reason.partition("<state>")[0].split())[:MAX_REASON]


def _grammar(structure: StructuredOutput) -> str:
    """In Lark's notation. Raises ValueError for JSON that cannot be parsed, and for what asks for too much."""
    from llguidance import LLMatcher

    if structure.kind == JSON_SCHEMA:
        defaults: Any = {"whitespace_pattern": WHITE_SPACE}
        try:
            grammars = json.loads(LLMatcher.grammar_from_json_schema(structure.source, defaults=defaults))
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        schema = without_unknown_formats(grammars["grammars"][0]["json_schema"])
        check_schema(schema)
        return f"{OPTIONS}\nstart: {SCHEMA} {json.dumps(schema)}"
    if structure.kind == REGEX:
        grammars = json.loads(LLMatcher.grammar_from_regex(structure.source))
        return f"{OPTIONS}\n{grammars['grammars'][0]['lark_grammar']}"
    check_grammar(structure.source)
    has_options = any(line.startswith("%llguidance") for line in structure.source.splitlines())
    return structure.source if has_options else f"{OPTIONS}\n{structure.source}"
