"""Which tokens may come next in a structured answer, by llguidance, which is imported only where one is asked for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shoal_replica.config import ModelConfig
from shoal_replica.errors import InvalidArgument
from shoal_replica.structured_output import FIELD, JSON_SCHEMA, REGEX, StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 256  # structures that were found to be right
MAX_REASON = 300  # characters of llguidance's own message


class Grammars:
    """Compiles structures for a model's vocabulary. Any thread may call its methods; what is called first reads the
    vocabulary, unless ``load`` has, and no other Python code runs meanwhile (0.24 s for 49 000 tokens).
    """

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._file = Path(model.folder) / "tokenizer.json"
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._checked: dict[StructuredOutput, None] = {}

    def load(self) -> None:
        """Read the vocabulary, where the model has one and can end an answer."""
        if not (self._file.is_file() and self._model.eos_token_ids):
            return
        try:
            self._open()
        except ValueError as error:
            logger.warning("structured output is refused: its library cannot use this model's tokenizer: %s", error)

    def check(self, structure: StructuredOutput) -> None:
        """Raise InvalidArgument if ``structure`` is malformed, too complex or not supported, or if the model has no
        end-of-sequence token, by which a structured answer ends.
        """
        if structure in self._checked:
            return
        if not self._model.eos_token_ids:
            raise InvalidArgument(FIELD, structure.kind, "needs a model with an end-of-sequence token")
        from llguidance import LLMatcher

        try:
            tokenizer = self._open()
        except ValueError as error:
            raise InvalidArgument(
                FIELD, structure.kind, f"is not served with this model's tokenizer: {error}"
            ) from None
        try:
            reason = LLMatcher(tokenizer, _grammar(structure), log_level=0).get_error()
        except ValueError as error:  # JSON that cannot be parsed
            reason = str(error)
        if reason:
            words = " ".join(reason.split())[:MAX_REASON]
            raise InvalidArgument(FIELD, structure.source, f"cannot be used as {structure.kind}: {words}")
        with self._lock:
            if len(self._checked) >= MAX_REMEMBERED:
                del self._checked[next(iter(self._checked))]
            self._checked[structure] = None

    def begin(self, structure: StructuredOutput) -> Matcher:
        """The matcher of a new answer; ``structure`` was checked."""
        from llguidance import LLMatcher

        return Matcher(LLMatcher(self._open(), _grammar(structure), log_level=0), self._model.vocab_size)

    def _open(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._lock:
            if self._tokenizer is None:
                text = self._file.read_text(encoding="utf-8")
                eos = list(self._model.eos_token_ids)
                self._tokenizer = LLTokenizer(text, n_vocab=self._model.vocab_size, eos_token=eos)
            return self._tokenizer


class Matcher:
    """How far one answer has matched its structure."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._num_consumed = 0

    def allowed(self, generated: Sequence[int] | NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which tokens may follow ``generated``, bool [vocab_size]: only those that end the answer once it is complete,
        and also if it does not match, or has become too complex to match.
        """
        new = [int(token_id) for token_id in generated[self._num_consumed :]]
        if new:
            self._matcher.consume_tokens(new)
            self._num_consumed += len(new)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)


def _grammar(structure: StructuredOutput) -> str:
    from llguidance import LLMatcher

    if structure.kind == JSON_SCHEMA:
        return str(LLMatcher.grammar_from_json_schema(structure.source))
    if structure.kind == REGEX:
        return str(LLMatcher.grammar_from_regex(structure.source))
    return str(LLMatcher.grammar_from_lark(structure.source))
