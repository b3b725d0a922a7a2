"""A call as the gateway sees it: what both front ends (gRPC, HTTP) hand in, and the chunks they get back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shoal_cluster.chat.answer_pieces import CallPiece
from shoal_cluster.chat.message import Message
from shoal_cluster.chat.tool import ToolUse
from shoal_cluster.serve.trace_context import TraceContext
from shoal_replica.chat_template import PromptEnd
from shoal_replica.errors import InvalidArgument
from shoal_replica.executor import TokenLogprobs
from shoal_replica.request import FinishReason
from shoal_replica.sampling_params import SamplingParams

MAX_PROMPTS = 128  # in one completion request
MAX_ENTRIES = 20_000
"""Messages, tool calls, and whatever a body nests: each takes microseconds, in which all streams stand still."""
MAX_NAME = 512  # characters of a tenant or a salt
CHAT_ID, COMPLETION_ID, RESPONSE_ID, MESSAGE_ID = ANSWER_IDS = "chatcmpl-", "cmpl-", "resp_", "msg_"
"""What the ids of answers by HTTP begin with; the request's id follows."""
TURN_LENGTH = 64  # what a chat turn costs besides its text, in characters


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, or else messages with what goes with them."""

    text: str | None = None
    messages: tuple[Message, ...] | None = None
    tools: ToolUse | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    end: PromptEnd = PromptEnd.ANSWER


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """What a client asked for, before tokenisation. Exactly one of ``text``, ``token_ids`` and ``messages`` is given.

    ``left_out`` names those of ``DEFAULTED`` parameters that the client leaves to the model's recommendation.
    ``timeout_s`` counts from the arrival at the gateway; None means the gateway's own limit. ``tools``,
    ``template_options``, variables of the chat template, and ``prompt_end`` go with ``messages``.
    """

    request_id: str
    sampling_params: SamplingParams
    left_out: frozenset[str] = frozenset()
    model: str = ""
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    tools: ToolUse | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    prompt_end: PromptEnd = PromptEnd.ANSWER
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    timeout_s: float | None = None
    trace: TraceContext | None = None

    def check_names(self) -> None:
        """Raises InvalidArgument if ``tenant`` or ``cache_salt`` is longer than ``MAX_NAME`` characters."""
        for name, value in (("tenant", self.tenant), ("cache_salt", self.cache_salt)):
            if len(value) > MAX_NAME:  # they are kept for a while, and logged
                raise InvalidArgument(name, value, f"must have at most {MAX_NAME} characters")

    @property
    def length(self) -> int:
        """What was given, in characters of text that would take as long to tokenise."""
        turns = sum(turn.length + TURN_LENGTH for turn in self.messages or ())
        tools = 0 if self.tools is None else self.tools.length
        bad_words = sum(len(word) + TURN_LENGTH for word in self.sampling_params.bad_words)
        return len(self.text or "") + turns + tools + _length(self.template_options) + bad_words


def _length(options: Mapping[str, Any]) -> int:
    try:
        return len(repr(options))
    except RecursionError:
        return 0  # they are refused for their depth


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a request over all its sequences, and the replica that computed them. Of the output tokens,
    ``num_reasoning_tokens`` came before the answer.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    replica_id: str
    ttft_s: float
    num_resumes: int = 0
    num_reasoning_tokens: int = 0

    def tokens_per_s(self, seconds: float) -> float:
        """Output tokens a second after the first, of an answer that took ``seconds`` in all."""
        return max(self.num_output_tokens - 1, 0) / max(seconds - self.ttft_s, 1e-9)


class PromptRead(NamedTuple):
    """A call's prompt: its tokens, the first ``num_cached_tokens`` of which the replica had cached."""

    token_ids: tuple[int, ...]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New text and tokens of one sequence. Text lags behind tokens at an unfinished character or possible stop string.
    An answer to messages has its reasoning and tool calls, if any, apart from its text.

    ``prompt`` comes with the request's first chunk, within the gateway. ``finish_reason`` comes with a sequence's last
    chunk, with ``stop_reason`` if a stop string or stop token id of the call has ended it; ``usage`` with the request's
    last chunk. ``prompt_logprobs``, if asked for, come before the first token of sequence 0 or with it.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    reasoning: str = ""
    tool_calls: tuple[CallPiece, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    prompt: PromptRead | None = None

    @classmethod
    def joined(cls, chunks: Sequence[Chunk]) -> Chunk:
        """Chunks of a sequence, one right behind the other, as one. Of those whose text has not been read yet."""
        return cls(
            index=chunks[0].index,
            text="".join([chunk.text for chunk in chunks]),
            token_ids=tuple([token_id for chunk in chunks for token_id in chunk.token_ids]),
            logprobs=tuple([logprobs for chunk in chunks for logprobs in chunk.logprobs]),
            finish_reason=chunks[-1].finish_reason,
            stop_reason=chunks[-1].stop_reason,
            prompt_logprobs=tuple([logprobs for chunk in chunks for logprobs in chunk.prompt_logprobs]),
        )
