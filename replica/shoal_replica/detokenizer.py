"""Incremental detokenization: the text of tokens as they arrive."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from itertools import dropwhile, groupby

from shoal_replica.tokenizer import Tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder makes of bytes that are not a character (yet)
MAX_UNFINISHED = 3  # a UTF-8 character lacks at most 1 of 4 bytes; each of the others may be shown as one UNFINISHED
_new_utf8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Text of a growing token list, a piece at a time.

    How a token decodes depends on its neighbours, so each step decodes the last few tokens together with the new ones
    and returns the text past the part already returned. Bytes that may still become a character are held back. Work
    and memory per token do not depend on how many tokens came before.

    Byte-fallback tokens (``Tokenizer.is_fallback_byte``) are assembled to UTF-8 here: the tokenizers library decodes a
    run of them as a whole, and shows all its bytes as unfinished as long as the last character is.

    Args:
        context: the preceding tokens, that is, the prompt: some tokens lose their leading space at the start of a text.
        shown: special tokens that are part of the text all the same.
    """

    # Every token has at least one byte, so the kept tokens cover all the text held back, and one token of context.
    _NUM_KEPT = MAX_UNFINISHED * MAX_UNFINISHED + 1

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        context: Sequence[int] = (),
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._shown = shown
        self._utf8 = _new_utf8("replace")
        self._bytes: list[int] = []  # byte tokens of the character that is not complete yet
        self._token_ids: list[int] = []
        self._num_returned = 0  # characters of the kept tokens' text that have been returned
        self._go_on_after(self._whole_characters(context))

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that ``token_ids`` complete, which may be empty."""
        with_text = self._with_text(token_ids)
        if not self._tokenizer.has_byte_fallback:
            return self._push_texts(with_text)
        runs = groupby(with_text, self._tokenizer.is_fallback_byte)
        return "".join([self._push_bytes(run) if are_bytes else self._push_texts(run) for are_bytes, run in runs])

    def flush(self) -> str:
        """The text held back, with unfinished bytes as replacement characters. No push may follow."""
        return self._end_bytes() + self._rest()

    def _push_texts(self, token_ids: Iterable[int]) -> str:
        before = self._end_bytes()
        self._token_ids += token_ids
        text = self._decode(self._token_ids)
        num_held = min(len(text) - len(text.rstrip(UNFINISHED)), MAX_UNFINISHED)
        new = text[self._num_returned : len(text) - num_held]
        self._num_returned = max(self._num_returned, len(text) - num_held)
        if len(self._token_ids) > 2 * self._NUM_KEPT:  # rarely, because it takes another decode
            num_unreturned = len(text) - self._num_returned
            del self._token_ids[: -self._NUM_KEPT]
            self._num_returned = len(self._decode(self._token_ids)) - num_unreturned
        return before + new

    def _push_bytes(self, token_ids: Iterable[int]) -> str:
        text = self._rest()
        for token_id in token_ids:
            self._bytes.append(token_id)
            if new := self._utf8.decode(self._tokenizer.token_bytes(token_id)):
                text += new
                num_done = len(self._bytes) - len(self._utf8.getstate()[0])
                done, self._bytes = self._bytes[:num_done], self._bytes[num_done:]
                self._go_on_after(done)
        return text

    def _end_bytes(self) -> str:
        """Decode the pending byte tokens as they are: the character will not be completed any more."""
        if not self._bytes:
            return ""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        done, self._bytes = self._bytes, []
        self._go_on_after(done)
        return text

    def _rest(self) -> str:
        new = self._decode(self._token_ids)[self._num_returned :] if self._token_ids else ""
        self._num_returned += len(new)
        return new

    def _go_on_after(self, token_ids: list[int]) -> None:
        """Keep ``token_ids``, whose text has been returned, as the context of the tokens to come."""
        self._token_ids = token_ids
        self._num_returned = len(self._decode(token_ids)) if token_ids else 0

    def _whole_characters(self, context: Sequence[int]) -> list[int]:
        """The last tokens of ``context`` that form whole characters: later tokens must not complete a partial one."""
        kept = self._with_text(context[-self._NUM_KEPT :])
        if self._tokenizer.has_byte_fallback:
            kept = list(dropwhile(self._is_inside_character, kept))
        while kept and self._decode(kept).endswith(UNFINISHED):
            del kept[-1]
        return kept

    def _is_inside_character(self, token_id: int) -> bool:
        """Whether the token is a UTF-8 continuation byte."""
        tokenizer = self._tokenizer
        return tokenizer.is_fallback_byte(token_id) and tokenizer.token_bytes(token_id)[0] & 0xC0 == 0x80

    def _with_text(self, token_ids: Sequence[int]) -> list[int]:
        has_text, skip, shown = self._tokenizer.has_text, self._skip_special_tokens, self._shown
        return [token_id for token_id in token_ids if has_text(token_id, skip) or token_id in shown]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens and not self._shown)
