"""From tokens to the text that a client sees: whole characters, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_replica.detokenizer import IncrementalDetokenizer
from shoal_replica.request import FinishReason, TokenDelta
from shoal_replica.sampling_params import SamplingParams
from shoal_replica.tokenizer import Tokenizer


class _StopMatcher:
    """How much of one stop string the end of the text matches (Knuth, Morris and Pratt 1977), a character at a time.

    ``_borders[k]`` is the length of the longest proper prefix of ``stop[:k]`` that is also its suffix. The table grows
    only as far as the text has matched, so a long stop string costs nothing until the text begins to match it.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._borders = [0, 0]

    def advance(self, character: str) -> bool:
        """Take one character. Returns whether the stop string is now complete."""
        self.num_matched = self._next(self.num_matched, character)
        if self.num_matched == len(self._borders):
            self._borders.append(self._next(self._borders[-1], self.stop[self.num_matched - 1]))
        return self.num_matched == len(self.stop)

    def _next(self, num_matched: int, character: str) -> int:
        while num_matched and self.stop[num_matched] != character:
            num_matched = self._borders[num_matched]
        return num_matched + 1 if self.stop[num_matched] == character else 0


class StopChecker:
    """Passes text on until the first stop string is complete, holding back any end of it that may begin one.

    The first is the one that ends earliest; of several that end together, the longest. It is part of the text if
    ``keeps``. Amortised constant work per character and stop string.
    """

    def __init__(self, stop: tuple[str, ...], keeps: bool = False) -> None:
        self._keeps = keeps
        self._matchers = [_StopMatcher(text) for text in stop]
        self._held = ""
        self.found = ""  # the stop string that was completed

    @property
    def stopped(self) -> bool:
        return bool(self.found)

    def push(self, text: str) -> str:
        """The text that is now certain to precede any stop string, or to be one that is kept; empty after a stop."""
        if self.stopped:
            return ""
        if not self._matchers:
            return text
        for end, character in enumerate(text, start=1):
            complete = [matcher for matcher in self._matchers if matcher.advance(character)]
            if complete:
                self.found = max((matcher.stop for matcher in complete), key=len)
                before = self._held + text[:end]
                self._held = ""
                return before if self._keeps else before[: len(before) - len(self.found)]
        known = self._held + text
        num_sure = len(known) - max(matcher.num_matched for matcher in self._matchers)
        self._held = known[num_sure:]
        return known[:num_sure]

    def flush(self) -> str:
        """The text held back, now that no more will come."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """The visible text of one sequence, as its tokens arrive.

    However the tokens are split into pushes, the returned texts add up to the same: the decoded tokens up to the first
    stop string, which is part of them if ``includes_stop``. ``context`` holds the prompt's tokens, as in
    ``IncrementalDetokenizer``, ``shown`` the special tokens that are text. Stop strings count only in the text of
    tokens after the first ``min_tokens``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        context: Sequence[int] = (),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        shown: frozenset[int] = frozenset(),
        includes_stop: bool = False,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens
        self._includes_stop = includes_stop
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens, context, shown)
        self._checker = StopChecker(stop, includes_stop)
        self._has_stop = bool(stop)
        self._num_tokens = 0

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        shown: frozenset[int] = frozenset(),
    ) -> TextStream:
        """The text of a sequence with these parameters."""
        return cls(
            tokenizer,
            params.stop,
            prompt_token_ids,
            params.skip_special_tokens,
            params.min_tokens,
            shown,
            params.include_stop_str_in_output,
            params.stop_token_ids,
        )

    def take(self, delta: TokenDelta) -> tuple[str, TokenDelta]:
        """``push`` the tokens of a delta whose text is part of the answer, and ``finish`` with the last one. Returns
        the text, and the delta: if a stop string has ended the answer, up to the token that completed it.
        """
        num_before = self._num_tokens
        text, stopped = self.push(delta.text_token_ids(self._includes_stop))
        if stopped:
            return text, delta.stopped_after(self._num_tokens - num_before)
        if delta.finish_reason is not None:
            text += self.finish()
            if self.stopped:  # by text that was held back until no more could come
                delta = delta.stopped_after(len(delta.token_ids))
        return text, delta

    @property
    def num_tokens(self) -> int:
        """Tokens consumed: all that were pushed, or those up to and including the one that completed a stop string."""
        return self._num_tokens

    @property
    def stopped(self) -> bool:
        return self._checker.stopped

    def stop_reason(self, delta: TokenDelta) -> str | int | None:
        """What of the parameters has ended the sequence, with its last delta: the stop string, or the stop token id."""
        if self.stopped:
            return self._checker.found
        is_ended = delta.finish_reason is FinishReason.STOP and bool(delta.token_ids)
        return delta.token_ids[-1] if is_ended and delta.token_ids[-1] in self._stop_token_ids else None

    def push(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        """Take tokens. Returns the text to emit and whether a stop string ended it; later tokens are not consumed."""
        if not self._has_stop:
            self._num_tokens += len(token_ids)
            return self._detokenizer.push(token_ids), False
        texts = []
        for token_id in token_ids:  # one at a time, to know which one completes the stop string
            if self.stopped:
                break
            self._num_tokens += 1
            text = self._detokenizer.push((token_id,))
            texts.append(text if self._num_tokens <= self._min_tokens else self._checker.push(text))
        return "".join(texts), self.stopped

    def finish(self) -> str:
        """The text held back, once no more tokens will come; empty after a stop."""
        if self.stopped:
            return ""
        return self._checker.push(self._detokenizer.flush()) + self._checker.flush()
