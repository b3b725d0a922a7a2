"""A request's sampling parameters, validated on construction."""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal_replica.errors import InvalidArgument
from shoal_replica.field_checks import as_tuple, check_integer, check_number, check_unicode
from shoal_replica.structured_output import StructuredOutput

MAX_LOGPROBS = 20
MAX_N = 128
MAX_BEAM_WIDTH = 128
MAX_BEAM_STOPS = 64
MAX_LENGTH_PENALTY = 10.0
MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 1024
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKENS = 8192
MAX_BAD_WORDS = 256
MAX_BAD_CHARACTERS = 4096  # of all bad words together
MAX_BAD_SEQUENCES = 1024
MAX_BAD_TOKENS = 32_768  # of all bad sequences together: two spellings of the longest bad words, a byte a token
MAX_LOGIT_BIAS = 100.0
MAX_SEED = 2**63 - 1
MAX_INTEGER = 2**63 - 1
MAX_TOP_K = 2**64 - 1  # the largest that the feed can carry; the sampler has no limit
MAX_TOKEN_ID = 2**32 - 1
SMALLEST, LARGEST = math.ulp(0.0), sys.float_info.max  # finite floats above 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling controls of one request. Raises InvalidArgument for a value outside its range.

    Attributes:
        max_tokens: most tokens to generate per sequence, at least 1. None means as many as the model has room for,
            and so does any number beyond its context; numbers above MAX_INTEGER are clamped to it.
        min_tokens: end-of-sequence tokens, stop tokens and stop strings are ignored until a sequence has this many.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches it, in (0, 1].
        min_p: drop tokens less likely than ``min_p`` times the likeliest one, in [0, 1].
        presence_penalty, frequency_penalty: OpenAI's, over generated tokens, in [-2, 2].
        repetition_penalty: CTRL's, over prompt and generated tokens; above 0; 1 is off.
        seed: makes the draw repeatable; None lets the gateway choose one.
        n: how many sequences to generate; of a beam search, how many of the best to return.
        logprobs: None, or how many top log-probabilities to return beside the chosen token's (0 to 20).
        prompt_logprobs: the same for the tokens of the prompt, from the second on. All of such a prompt is computed: it
            neither finds its beginning cached nor leaves it to others.
        stop: strings that end the text; the matched string is not part of it, unless ``include_stop_str_in_output``.
        stop_token_ids: token ids that end the sequence; the stop token is among its tokens, but not in its text.
        ignore_eos: continue past the model's end-of-sequence tokens.
        beam_width: above 1, beam search with this many beams instead of sampling: see ``BeamSearch``. It takes neither
            truncation of the distribution nor penalties nor stop strings, and temperature 0 and 1 are the same to it.
        length_penalty: a finished beam is ranked by its log-probability divided by its number of tokens to this power,
            in [-10, 10]; larger favours longer answers.
        logit_bias: pairs of a token id and what is added to its logit, in [-100, 100]; or a mapping of them.
        allowed_token_ids: if there are any, no other tokens are generated: an answer ends by itself only if an
            end-of-sequence token is among them. One that has no token left to go on with ends there, for its length,
            with an end-of-sequence token.
        bad_words: texts that are not generated, at the beginning of a word or within it.
        bad_token_ids: sequences of tokens of which the last is not generated after the others: ``ban_words`` makes
            these of ``bad_words``. At most 1024, with 32768 tokens together.
        structured_output: what the answer must match, or None; it ends when it is complete.
        include_stop_str_in_output: the text of what ended the answer, a stop string or token, is part of it.
        skip_special_tokens: special tokens have no text.
        truncate_prompt_tokens: use only this many tokens of a prompt, the last ones; -1 for as many as leave room
            for ``max_tokens``, or for one where that is None. None refuses prompts that are too long.
        early_stopping: end a beam search once ``beam_width`` beams have finished, even if others could still be better.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    structured_output: StructuredOutput | None = None
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        self._make_tuples()
        self._check_length()
        if self.logit_bias:
            self._check_logit_bias()
            object.__setattr__(self, "logit_bias", tuple(sorted(self.logit_bias)))
        self._check_numbers()
        self._check_stops()
        if self.truncate_prompt_tokens not in (None, -1):
            check_integer("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, MAX_INTEGER)
        if self.allowed_token_ids or self.bad_words or self.bad_token_ids:
            self._check_choice()
        if self.structured_output is not None:
            self._check_structure()
        if self.beam_width > 1:
            self._check_beam_search()
        elif self.length_penalty != 1.0 or self.early_stopping:
            name = "early_stopping" if self.early_stopping else "length_penalty"
            raise InvalidArgument(name, getattr(self, name), "needs beam search: a beam_width of at least 2")

    def _make_tuples(self) -> None:
        """Of what may be given as a single string, a list or a mapping."""
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias.items()))
        for name in ("stop", "bad_words"):
            if isinstance(text := getattr(self, name), str):
                object.__setattr__(self, name, (text,))
        for name in ("stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words", "bad_token_ids"):
            if type(value := getattr(self, name)) is not tuple:
                object.__setattr__(self, name, as_tuple(name, value))

    def _check_length(self) -> None:
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, None)
            if self.max_tokens > MAX_INTEGER:
                object.__setattr__(self, "max_tokens", MAX_INTEGER)
        check_integer("min_tokens", self.min_tokens, 0, MAX_INTEGER)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidArgument("min_tokens", self.min_tokens, f"must be at most max_tokens, {self.max_tokens}")

    def _check_numbers(self) -> None:
        check_number("temperature", self.temperature, 0.0, LARGEST, "must be a finite number of at least 0")
        check_integer("top_k", self.top_k, 0, MAX_TOP_K)
        check_number("top_p", self.top_p, SMALLEST, 1.0, "must be in (0, 1]")
        check_number("min_p", self.min_p, 0.0, 1.0, "must be in [0, 1]")
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0, "must be in [-2, 2]")
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "must be in [-2, 2]")
        check_number(
            "repetition_penalty", self.repetition_penalty, SMALLEST, LARGEST, "must be a finite number above 0"
        )
        if self.seed is not None:
            check_integer("seed", self.seed, 0, MAX_SEED)
        check_integer("n", self.n, 1, MAX_N)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                check_integer(name, count, 0, MAX_LOGPROBS)
        check_integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        low, high = -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY
        check_number("length_penalty", self.length_penalty, low, high, f"must be in [{low:g}, {high:g}]")

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidArgument("stop", self.stop, f"must have at most {MAX_STOP_STRINGS} strings")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidArgument("stop", text, "must be non-empty strings")
            check_unicode("stop", text)
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            limit = f"must be at most {MAX_STOP_TOKENS}"
            raise InvalidArgument("stop_token_ids", f"{len(self.stop_token_ids)} ids", limit)
        for token_id in self.stop_token_ids:
            check_integer("stop_token_ids", token_id, 0, MAX_TOKEN_ID)

    def _check_structure(self) -> None:
        limit = "contradicts structured output, which ends when it is complete"
        if self.ignore_eos:
            raise InvalidArgument("ignore_eos", True, limit)
        if self.min_tokens:
            raise InvalidArgument("min_tokens", self.min_tokens, limit)

    def _check_logit_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            limit = f"must have at most {MAX_LOGIT_BIASES} tokens"
            raise InvalidArgument("logit_bias", f"{len(self.logit_bias)} tokens", limit)
        seen = set[int]()
        for pair in self.logit_bias:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise InvalidArgument("logit_bias", pair, "must be pairs of a token id and a number")
            check_integer("logit_bias", pair[0], 0, MAX_TOKEN_ID)
            check_number("logit_bias", pair[1], -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, "must be in [-100, 100]")
            if pair[0] in seen:
                raise InvalidArgument("logit_bias", pair[0], "must not be given twice")
            seen.add(pair[0])

    def _check_choice(self) -> None:
        """Raise InvalidArgument for what may or may not be generated."""
        if len(self.allowed_token_ids) > MAX_ALLOWED_TOKENS:
            limit = f"must be at most {MAX_ALLOWED_TOKENS}"
            raise InvalidArgument("allowed_token_ids", f"{len(self.allowed_token_ids)} ids", limit)
        for token_id in self.allowed_token_ids:
            check_integer("allowed_token_ids", token_id, 0, MAX_TOKEN_ID)
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidArgument("bad_words", f"{len(self.bad_words)} words", f"must be at most {MAX_BAD_WORDS}")
        for word in self.bad_words:
            if not isinstance(word, str) or not word.strip():
                raise InvalidArgument("bad_words", word, "must be non-empty strings that are not only whitespace")
        if (length := sum(map(len, self.bad_words))) > MAX_BAD_CHARACTERS:
            limit = f"must have at most {MAX_BAD_CHARACTERS} together"
            raise InvalidArgument("bad_words", f"{length} characters", limit)
        self._check_bad_token_ids()

    def _check_bad_token_ids(self) -> None:
        if (count := len(self.bad_token_ids)) > MAX_BAD_SEQUENCES:
            limit = f"must be at most {MAX_BAD_SEQUENCES}, those of bad_words included"
            raise InvalidArgument("bad_token_ids", f"{count} sequences", limit)
        for bad in self.bad_token_ids:
            if not isinstance(bad, tuple) or not bad:
                raise InvalidArgument("bad_token_ids", bad, "must be non-empty tuples of token ids")
        if (length := sum(map(len, self.bad_token_ids))) > MAX_BAD_TOKENS:
            raise InvalidArgument("bad_token_ids", f"{length} ids", f"must be at most {MAX_BAD_TOKENS} together")
        for bad in self.bad_token_ids:
            for token_id in bad:
                check_integer("bad_token_ids", token_id, 0, MAX_TOKEN_ID)

    def seeded(self) -> SamplingParams:
        """The same with a seed, chosen if there is none, so that the draws are repeatable from here on."""
        return self if self.seed is not None else replace(self, seed=secrets.randbelow(MAX_SEED))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidArgument for a token that a vocabulary of that size does not have."""
        for name, token_ids in (
            ("logit_bias", [token_id for token_id, _ in self.logit_bias]),
            ("allowed_token_ids", self.allowed_token_ids),
            ("bad_token_ids", [token_id for bad in self.bad_token_ids for token_id in bad]),
        ):
            if token_ids and max(token_ids) >= vocab_size:
                raise InvalidArgument(name, max(token_ids), f"token ids must be in [0, {vocab_size})")

    def _check_beam_search(self) -> None:
        """Raise InvalidArgument for what a beam search would have to ignore."""
        if self.n > self.beam_width:
            raise InvalidArgument("n", self.n, f"must be at most the beam_width, {self.beam_width}")
        if len(self.stop_token_ids) > MAX_BEAM_STOPS:
            limit = f"must be at most {MAX_BEAM_STOPS} in a beam search"
            raise InvalidArgument("stop_token_ids", f"{len(self.stop_token_ids)} ids", limit)
        if self.temperature not in (0.0, 1.0):
            raise InvalidArgument("temperature", self.temperature, "must be 0 or 1 in a beam search")
        for name, off in _NOT_IN_BEAM_SEARCH.items():
            if (value := getattr(self, name)) != off:
                raise InvalidArgument(name, value, "is not supported in a beam search; leave it out")

    def truncate(self, prompt_token_ids: tuple[int, ...], max_model_len: int) -> tuple[int, ...]:
        """What is used of a prompt. Raises InvalidArgument if more is asked for than a model takes."""
        most = self.truncate_prompt_tokens
        if most is None:
            return prompt_token_ids
        if most == -1:
            is_bound = self.max_tokens is not None and self.max_tokens < max_model_len
            most = max_model_len - (self.max_tokens or 1 if is_bound else 1)
        if most >= max_model_len:
            raise InvalidArgument("truncate_prompt_tokens", most, f"must be under {max_model_len}, the model's length")
        return prompt_token_ids[-most:]

    @property
    def is_beam_search(self) -> bool:
        return self.beam_width > 1

    @property
    def is_greedy(self) -> bool:
        """Whether no token is drawn."""
        return self.temperature == 0.0 or self.beam_width > 1

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def changes_logits(self) -> bool:
        """Whether a row's logits are changed before its token is chosen."""
        changed = self.has_penalties or self.structured_output or self.logit_bias or self.min_tokens
        return bool(changed or self.restricts_choice)

    @property
    def restricts_choice(self) -> bool:
        """Whether some tokens are not allowed, or may complete what must not be there."""
        return bool(self.allowed_token_ids or self.bad_token_ids)

    @property
    def takes_likeliest(self) -> bool:
        """Whether each token is simply the largest logit of its row, and nothing else of the row is needed."""
        return self.is_greedy and not self.changes_logits and self.logprobs is None and self.beam_width == 1


_NOT_IN_BEAM_SEARCH: dict[str, object] = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "stop": (),
    "structured_output": None,
    "logit_bias": (),
    "min_tokens": 0,
    "allowed_token_ids": (),
    "bad_words": (),
    "bad_token_ids": (),
    "prompt_logprobs": None,
}
