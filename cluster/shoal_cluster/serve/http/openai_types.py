"""The request bodies of OpenAI's API, and the calls that they become.

The bodies of `/v1/chat/completions` and `/v1/completions`, with vLLM's extra fields (top_k, min_p, repetition_penalty,
ignore_eos, min_tokens, stop_token_ids, include_stop_str_in_output, skip_special_tokens, allowed_token_ids, bad_words,
prompt_logprobs, truncate_prompt_tokens, use_beam_search, length_penalty, structured_outputs, return_token_ids,
priority, cache_salt) and two of our own for beam search (beam_width, early_stopping). Unknown fields are ignored, and
null counts as absent. What would change the answer in OpenAI's and vLLM's APIs but is not supported here is refused.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any

from pydantic import Field

from shoal_cluster.policies.pending_request import MAX_PRIORITY
from shoal_cluster.serve.call import MAX_PROMPTS, GenerateCall
from shoal_cluster.serve.http.fields import (
    Body,
    ListOf,
    Text,
    TextOrNull,
    Unsupported,
    WholeBody,
    at_most,
    instead_of_null,
    left_out,
    only,
    renamed,
    seed_of,
    top_p_of,
    unicode_text,
)
from shoal_cluster.serve.http.openai_structures import ResponseFormat, StructuredOutputs
from shoal_replica.errors import InvalidArgument
from shoal_replica.sampling_params import MAX_BEAM_WIDTH, MAX_LOGIT_BIASES, SamplingParams
from shoal_replica.structured_output import StructuredOutput

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; a chat goes on as long as the model has room

MAX_DIGITS = 10  # of a token id
STRUCTURES = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""The fields that say what an answer must match."""

_PROMPT_SHAPES = "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"


class StreamOptions(Body):
    include_usage: Annotated[bool, instead_of_null(False)] = False
    continuous_usage_stats: Annotated[bool, instead_of_null(False)] = False


class RequestBody(WholeBody):
    """The fields that both bodies share."""

    model: TextOrNull = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: Text | ListOf[Text] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: ListOf[int] | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    priority: Annotated[int, instead_of_null(0)] = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    user: TextOrNull = ""
    cache_salt: TextOrNull = ""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Text | dict[str, Any] | None = None
    guided_regex: Text | None = None
    guided_choice: ListOf[Text] | None = None
    guided_grammar: Text | None = None
    guided_json_object: Unsupported = None
    guided_whitespace_pattern: Unsupported = None
    structural_tag: Unsupported = None
    logit_bias: Annotated[dict[Text, float], at_most(MAX_LOGIT_BIASES)] | None = None
    min_tokens: int | None = None
    allowed_token_ids: ListOf[int] | None = None
    bad_words: ListOf[Text] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: Unsupported = None
    logits_processors: Unsupported = None
    prompt_embeds: Unsupported = None
    vllm_xargs: Unsupported = None
    moderation: Unsupported = None
    repetition_detection: Unsupported = None

    @abstractmethod
    def to_calls(self, request_id: str) -> list[GenerateCall]:
        """The calls that the body asks for. Raises InvalidArgument."""

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with an event that carries the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def tells_usage_so_far(self) -> bool:
        """Whether all events of a stream carry the usage, as far as it goes."""
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def echoes(self) -> bool:
        """Whether the answer's text begins with the prompt."""
        return False

    @property
    def is_all_prompt(self) -> bool:
        """Whether an answer that begins with its prompt ends with it, too."""
        return False

    @property
    def words(self) -> dict[str, str]:
        """Fields of calls, as the body has them."""
        given = [name for name in STRUCTURES if getattr(self, name) is not None]
        if self.response_format is not None and self.response_format.type == "text":  # asks for nothing
            given.remove("response_format")
        return {"structured_output": next(iter(given), "response_format"), "tenant": "user"}

    def in_its_words(self, error: Exception) -> Exception:
        """``error`` with the field that the body has for it."""
        return renamed(error, self.words)

    @property
    def num_sequences(self) -> int:
        """Sequences per prompt."""
        return 1 if self.n is None else self.n

    def sampling_params(
        self,
        max_tokens: int | None,
        logprobs: int | None,
        best_of: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """Raises InvalidArgument for a field outside its limits.

        Args:
            prompt_logprobs: how many at least, if any.
            best_of: the number of beams, where `use_beam_search` asks for some and `beam_width` does not say how many.
                Without either there are as many as are returned, as with vLLM.
        """
        given = {
            "temperature": self.temperature,
            "top_p": top_p_of(self.top_p),
            "n": self.n,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "top_k": None if self.top_k == -1 else self.top_k,  # vLLM also spells "all" this way
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "ignore_eos": self.ignore_eos,
            "beam_width": self._num_beams(best_of),
            "length_penalty": self.length_penalty,
            "early_stopping": self.early_stopping,
            "min_tokens": self.min_tokens,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "skip_special_tokens": self.skip_special_tokens,
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
        }
        counts = [count for count in (self.prompt_logprobs, prompt_logprobs) if count is not None]
        present: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        params = SamplingParams(
            max_tokens=max_tokens,
            seed=seed_of(self.seed),
            logprobs=logprobs,
            prompt_logprobs=max(counts, default=None),
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            allowed_token_ids=self._allowed_token_ids(),
            bad_words=tuple(self.bad_words or ()),
            structured_output=self._structured_output(),
            logit_bias=tuple((_token_id(key), bias) for key, bias in (self.logit_bias or {}).items()),
            **present,
        )
        if counts and self.stream:
            raise InvalidArgument("stream", True, "log-probabilities of the prompt come in a whole answer only")
        return params

    def _allowed_token_ids(self) -> tuple[int, ...]:
        if self.allowed_token_ids == []:
            raise InvalidArgument("allowed_token_ids", [], "must not be empty: nothing could be generated")
        return tuple(self.allowed_token_ids or ())

    def _structured_output(self) -> StructuredOutput | None:
        """What the answer must match, from whichever field says so. Raises InvalidArgument if several do."""
        guided = StructuredOutputs(
            json=self.guided_json, regex=self.guided_regex, choice=self.guided_choice, grammar=self.guided_grammar
        )
        given = [
            form.structure() for form in (self.response_format, self.structured_outputs, guided) if form is not None
        ]
        structures = [structure for structure in given if structure is not None]
        if len(structures) > 1:
            raise InvalidArgument("response_format", None, "must be the only field that says what an answer must match")
        return structures[0] if structures else None

    def _num_beams(self, best_of: int | None) -> int | None:
        """See `sampling_params`; None if nothing asks for a beam search."""
        if self.use_beam_search is False and self.beam_width not in (None, 1):
            raise InvalidArgument("use_beam_search", False, f"contradicts a beam_width of {self.beam_width}")
        if not self.use_beam_search or self.beam_width is not None:
            if best_of not in (None, self.num_sequences):
                raise InvalidArgument("best_of", best_of, "is not supported; leave it out")
            if self.use_beam_search and self.beam_width == 1:
                raise InvalidArgument("beam_width", 1, "contradicts use_beam_search")
            return self.beam_width
        if best_of is not None and not max(2, self.num_sequences) <= best_of <= MAX_BEAM_WIDTH:
            limit = f"must be from {max(2, self.num_sequences)} to {MAX_BEAM_WIDTH} with use_beam_search"
            raise InvalidArgument("best_of", best_of, limit)
        num_beams = self.num_sequences if best_of is None else best_of
        if num_beams == 1:
            raise InvalidArgument("use_beam_search", True, "needs at least two beams: set beam_width")
        return num_beams


class CompletionRequest(RequestBody):
    """`POST /v1/completions`."""

    prompt: Any = None
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: Annotated[Any, only(True)] = None
    suffix: Unsupported = None
    best_of: int | None = None

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def is_all_prompt(self) -> bool:
        return self.echoes and self.max_tokens == 0

    @property
    def words(self) -> dict[str, str]:
        return super().words | {"text": "prompt"}

    def in_its_words(self, error: Exception) -> Exception:
        if isinstance(error, InvalidArgument) and error.field == "prompt_logprobs" and self.prompt_logprobs is None:
            return InvalidArgument.retold("logprobs", f"logprobs, with echo: {error}")
        return super().in_its_words(error)

    def to_calls(self, request_id: str) -> list[GenerateCall]:
        """One call per prompt. Raises InvalidArgument."""
        max_tokens = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        if self.is_all_prompt:
            max_tokens = 1  # which is not told
        params = self.sampling_params(max_tokens, self.logprobs, self.best_of, self.logprobs if self.echo else None)
        prompts = _prompts(self.prompt)
        return [
            GenerateCall(
                request_id=request_id if len(prompts) == 1 else f"{request_id}-{number}",
                sampling_params=params,
                left_out=left_out(self),
                model=self.model,
                text=prompt if isinstance(prompt, str) else None,
                token_ids=None if isinstance(prompt, str) else prompt,
                priority=self.priority,
                tenant=self.user,
                cache_salt=self.cache_salt,
            )
            for number, prompt in enumerate(prompts)
        ]


def _prompts(prompt: object) -> list[str | tuple[int, ...]]:
    """The prompts, in any of OpenAI's four shapes, as a list."""
    if isinstance(prompt, str):
        return [_prompt_text(prompt)]
    if not isinstance(prompt, list):
        raise InvalidArgument("prompt", prompt, _PROMPT_SHAPES)
    if not prompt:
        raise InvalidArgument("prompt", prompt, "must not be empty")
    if all(type(item) is int for item in prompt):
        return [tuple(prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidArgument("prompt", f"{len(prompt)} prompts", f"must be at most {MAX_PROMPTS}")
    if all(isinstance(item, str) for item in prompt):
        return [_prompt_text(item) for item in prompt]
    if all(isinstance(item, list) and all(type(token_id) is int for token_id in item) for item in prompt):
        return [tuple(item) for item in prompt]
    raise InvalidArgument("prompt", prompt, _PROMPT_SHAPES)


def _token_id(key: str) -> int:
    """A key of `logit_bias`: JSON has no other keys than text."""
    if not (key.isascii() and key.isdecimal() and len(key) <= MAX_DIGITS):
        raise InvalidArgument("logit_bias", key, "its keys must be token ids")
    return int(key)


def _prompt_text(text: str) -> str:
    try:
        return unicode_text(text)
    except ValueError as error:
        raise InvalidArgument("prompt", text, str(error)) from None
