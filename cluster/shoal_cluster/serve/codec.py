"""`shoal.v1.Generation`: proto to domain and back. Nothing is lost either way.

Absent fields get the defaults that an OpenAI or vLLM user expects (temperature 1, no truncation of the distribution,
one sequence), except ``max_tokens``: by default it is as many as the model has room for, since a stream can be
cancelled at any time.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage

from shoal_cluster.chat.answer_pieces import CallPiece
from shoal_cluster.policies.pending_request import MAX_PRIORITY
from shoal_cluster.serve.call import Chunk, GenerateCall, Prompt, Usage
from shoal_cluster.serve.chat_codec import messages_to_proto, prompt_from_proto
from shoal_cluster.serve.request_id import check_request_id
from shoal_cluster.serve.rows import ModelCard
from shoal_cluster.serve.trace_context import TraceContext
from shoal_protos import generation_pb2 as pb
from shoal_replica.errors import InvalidArgument
from shoal_replica.executor import TokenLogprobs
from shoal_replica.request import FinishReason
from shoal_replica.sampling_defaults import DEFAULTED
from shoal_replica.sampling_params import SamplingParams
from shoal_replica.structured_output import StructuredOutput

M = TypeVar("M", bound=ProtoMessage)

_SCALARS = (  # the fields of SamplingParams that are `optional` in the proto, under the same names
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "n",
    "logprobs",
    "prompt_logprobs",
    "ignore_eos",
    "beam_width",
    "length_penalty",
    "early_stopping",
    "min_tokens",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "truncate_prompt_tokens",
)
_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_FINISH_REASONS_BACK = {number: reason for reason, number in _FINISH_REASONS.items()}


def parse(message_type: type[M], raw: bytes) -> M:
    """Parse a message. Raises InvalidArgument when ``raw`` is malformed, or a string in it is not UTF-8."""
    try:
        return message_type.FromString(raw)
    except DecodeError:
        name = message_type.DESCRIPTOR.full_name
        raise InvalidArgument("request", f"{len(raw)} bytes", f"must be a {name}, its strings in UTF-8") from None


def call_from_proto(
    request: pb.GenerateRequest,
    fresh_id: str,
    timeout_s: float | None = None,
    tenant: str | None = None,
    trace: TraceContext | None = None,
) -> GenerateCall:
    """The call that a client asked for. ``fresh_id`` stands in for an id that it lacks. ``tenant`` comes from the
    metadata, which a proxy may set, and takes precedence over the message's.

    Raises:
        InvalidArgument: there is no prompt, or a field is outside its limits.
    """
    prompt = request.WhichOneof("prompt")
    if prompt is None:
        raise InvalidArgument("prompt", None, "one of text, token_ids and messages must be set")
    if not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
        raise InvalidArgument("priority", request.priority, f"must lie between {-MAX_PRIORITY} and {MAX_PRIORITY}")
    chat = prompt_from_proto(request.messages) if prompt == "messages" else Prompt()
    call = GenerateCall(
        request_id=check_request_id(request.request_id) if request.HasField("request_id") else fresh_id,
        sampling_params=sampling_params_from_proto(request.sampling_params),
        left_out=frozenset(name for name in DEFAULTED if not request.sampling_params.HasField(name)),
        model=request.model,
        text=request.text if prompt == "text" else None,
        token_ids=tuple(request.token_ids.ids) if prompt == "token_ids" else None,
        messages=chat.messages,
        tools=chat.tools,
        template_options=chat.template_options,
        prompt_end=chat.end,
        priority=request.priority,
        tenant=request.tenant if tenant is None else tenant,
        cache_salt=request.cache_salt,
        timeout_s=timeout_s,
        trace=trace,
    )
    call.check_names()
    return call


def call_to_proto(call: GenerateCall) -> pb.GenerateRequest:
    """The request for ``call``. Its ``timeout_s`` travels as the RPC's deadline, its ``trace`` as metadata."""
    request = pb.GenerateRequest(
        sampling_params=sampling_params_to_proto(call.sampling_params, call.left_out),
        model=call.model,
        priority=call.priority,
        tenant=call.tenant,
        cache_salt=call.cache_salt,
        request_id=call.request_id,
    )
    if call.text is not None:
        request.text = call.text
    if call.token_ids is not None:
        request.token_ids.CopyFrom(pb.TokenIds(ids=call.token_ids))
    if call.messages is not None:
        request.messages.CopyFrom(messages_to_proto(call.messages, call.tools, call.template_options, call.prompt_end))
    return request


def sampling_params_from_proto(params: pb.SamplingParams) -> SamplingParams:
    """Raises InvalidArgument for a field outside its limits."""
    given: dict[str, Any] = {"max_tokens": None, **{field.name: value for field, value in params.ListFields()}}
    if params.bad_token_ids:
        given["bad_token_ids"] = tuple(tuple(token_ids.ids) for token_ids in params.bad_token_ids)
    if params.HasField("structured_output"):
        form = params.structured_output.WhichOneof("form")
        if form is None:
            raise InvalidArgument("structured_output", None, "one of json_schema, regex and lark must be set")
        given["structured_output"] = StructuredOutput(form, getattr(params.structured_output, form))
    return SamplingParams(**given)  # which turns repeated fields into tuples


def sampling_params_to_proto(params: SamplingParams, left_out: Collection[str] = ()) -> pb.SamplingParams:
    structure = params.structured_output
    return pb.SamplingParams(
        max_tokens=params.max_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        allowed_token_ids=params.allowed_token_ids,
        bad_words=params.bad_words,
        bad_token_ids=[pb.TokenIds(ids=token_ids) for token_ids in params.bad_token_ids],
        logit_bias=dict(params.logit_bias),
        structured_output=None if structure is None else pb.StructuredOutput(**{structure.kind: structure.source}),
        **{name: getattr(params, name) for name in _SCALARS if name not in left_out},
    )


def chunk_to_proto(chunk: Chunk) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        index=chunk.index,
        text=chunk.text,
        token_ids=chunk.token_ids,
        logprobs=[_logprobs_to_proto(logprobs) for logprobs in chunk.logprobs],
        finish_reason=None if chunk.finish_reason is None else _FINISH_REASONS[chunk.finish_reason],
        stop_string=chunk.stop_reason if isinstance(chunk.stop_reason, str) else None,
        stop_token_id=chunk.stop_reason if isinstance(chunk.stop_reason, int) else None,
        usage=None if chunk.usage is None else _usage_to_proto(chunk.usage),
        reasoning=chunk.reasoning,
        tool_calls=[
            pb.ToolCallPiece(index=piece.index, id=piece.call_id, name=piece.name, arguments=piece.arguments)
            for piece in chunk.tool_calls
        ],
        prompt_logprobs=[_logprobs_to_proto(logprobs) for logprobs in chunk.prompt_logprobs],
    )


def chunk_from_proto(response: pb.GenerateResponse) -> Chunk:
    stopped_by = response.WhichOneof("stop_reason")
    return Chunk(
        index=response.index,
        text=response.text,
        token_ids=tuple(response.token_ids),
        logprobs=tuple(_logprobs_from_proto(logprobs) for logprobs in response.logprobs),
        finish_reason=_FINISH_REASONS_BACK.get(response.finish_reason),
        stop_reason=None if stopped_by is None else getattr(response, stopped_by),
        usage=_usage_from_proto(response.usage) if response.HasField("usage") else None,
        reasoning=response.reasoning,
        tool_calls=tuple(
            CallPiece(piece.index, piece.arguments, piece.id, piece.name) for piece in response.tool_calls
        ),
        prompt_logprobs=tuple(_logprobs_from_proto(logprobs) for logprobs in response.prompt_logprobs),
    )


def chunk_from_bytes(raw: bytes) -> Chunk:
    """One message of the stream, as a client reads it."""
    return chunk_from_proto(pb.GenerateResponse.FromString(raw))


def tokenize_input_from_proto(request: pb.TokenizeRequest) -> Prompt:
    """Raises InvalidArgument when nothing is set."""
    match request.WhichOneof("input"):
        case "text":
            return Prompt(request.text)
        case "messages":
            return prompt_from_proto(request.messages)
        case _:
            raise InvalidArgument("input", None, "one of text and messages must be set")


def model_card_to_proto(card: ModelCard) -> pb.Model:
    return pb.Model(
        name=card.name,
        max_model_len=card.max_model_len,
        vocab_size=card.vocab_size,
        block_size=card.block_size,
        dtype=card.dtype,
        eos_token_ids=card.eos_token_ids,
        has_chat_template=card.has_chat_template,
        created_s=card.created_s,
        parent=card.parent,
        adapters=card.adapters,
    )


def _logprobs_to_proto(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    top = [pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in logprobs.top]
    return pb.TokenLogprobs(token_id=logprobs.token_id, logprob=logprobs.logprob, top=top)


def _logprobs_from_proto(logprobs: pb.TokenLogprobs) -> TokenLogprobs:
    top = tuple((entry.token_id, entry.logprob) for entry in logprobs.top)
    return TokenLogprobs(logprobs.token_id, logprobs.logprob, top)


def _usage_to_proto(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.num_prompt_tokens,
        cached_tokens=usage.num_cached_tokens,
        output_tokens=usage.num_output_tokens,
        replica_id=usage.replica_id,
        ttft_s=usage.ttft_s,
        num_resumes=usage.num_resumes,
        reasoning_tokens=usage.num_reasoning_tokens,
    )


def _usage_from_proto(usage: pb.Usage) -> Usage:
    return Usage(
        num_prompt_tokens=usage.prompt_tokens,
        num_cached_tokens=usage.cached_tokens,
        num_output_tokens=usage.output_tokens,
        replica_id=usage.replica_id,
        ttft_s=usage.ttft_s,
        num_resumes=usage.num_resumes,
        num_reasoning_tokens=usage.reasoning_tokens,
    )
