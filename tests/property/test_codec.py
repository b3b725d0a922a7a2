"""Domain objects to proto and back: every value comes back equal, also through serialized bytes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from fixtures.model_cards import model_card
from hypothesis import given
from hypothesis import strategies as st

from shoal_cluster.chat.answer_pieces import CallPiece
from shoal_cluster.chat.message import Message
from shoal_cluster.chat.tool import AUTO, NAME_PATTERN, NONE, REQUIRED, Tool, ToolCall, ToolUse
from shoal_cluster.policies.autoscaling_config import COUNTS, LIMITS, ScaleConfig
from shoal_cluster.policies.autoscaling_view import ScaleRecord
from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import PHASES
from shoal_cluster.policies.pending_request import MAX_PRIORITY
from shoal_cluster.policies.replica_view import ReplicaView
from shoal_cluster.policies.route_decision import CandidateTerms, RouteDecision
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.policies.route_record import RouteRecord
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.serve import codec, control_codec, scaling_codec
from shoal_cluster.serve.call import Chunk, GenerateCall, Usage
from shoal_cluster.serve.rows import ClusterRow, ModelCard, ModelRow, ReplicaRow, ScalingRow
from shoal_cluster.serve.view_tally import ViewQuality
from shoal_protos import control_pb2, generation_pb2
from shoal_replica.chat_template import PromptEnd
from shoal_replica.errors import InvalidArgument
from shoal_replica.executor import TokenLogprobs
from shoal_replica.request import GOES_ON, FinishReason
from shoal_replica.sampling_params import MAX_SEED, SamplingParams
from shoal_replica.stats import ReplicaStats
from shoal_replica.structured_output import KINDS, StructuredOutput

text = st.text(max_size=8)
count = st.integers(0, 2**31 - 1)
number = st.floats(allow_nan=False, allow_infinity=False)
amount = st.floats(0, 1e9)
token_id = st.integers(0, 2**32 - 1)
token_ids = st.lists(token_id, max_size=5).map(tuple)
request_id_characters = st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters="#")
request_id = st.text(request_id_characters, min_size=1, max_size=128)

beam_searches = st.integers(2, 128).flatmap(
    lambda width: st.builds(
        SamplingParams,
        max_tokens=st.none() | st.integers(1, 2**40),
        temperature=st.sampled_from([0.0, 1.0]),
        n=st.integers(1, width),
        beam_width=st.just(width),
        length_penalty=st.floats(-10, 10),
        early_stopping=st.booleans(),
    )
)
sampling_params = (
    beam_searches
    | st.builds(
        SamplingParams,
        max_tokens=st.none() | st.integers(1, 2**40),
        temperature=amount,
        top_k=count,
        top_p=st.floats(0, 1, exclude_min=True),
        min_p=st.floats(0, 1),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        repetition_penalty=st.floats(0, 10, exclude_min=True),
        seed=st.none() | st.integers(0, MAX_SEED),
        n=st.integers(1, 128),
        logprobs=st.none() | st.integers(0, 20),
        prompt_logprobs=st.none() | st.integers(0, 20),
        include_stop_str_in_output=st.booleans(),
        skip_special_tokens=st.booleans(),
        truncate_prompt_tokens=st.none() | st.just(-1) | st.integers(1, 2**40),
        stop=st.lists(st.text(min_size=1, max_size=4), max_size=3).map(tuple),
        stop_token_ids=token_ids,
        ignore_eos=st.booleans(),
    )
    | st.builds(
        SamplingParams,
        min_tokens=st.integers(0, 16),
        logit_bias=st.dictionaries(token_id, st.floats(-100, 100), max_size=4),
        allowed_token_ids=token_ids,
        bad_token_ids=st.lists(token_ids.filter(bool), max_size=2).map(tuple),
        bad_words=st.lists(st.text(min_size=1, max_size=4).filter(str.strip), max_size=3).map(tuple),
    )
    | st.builds(
        SamplingParams,
        structured_output=st.builds(StructuredOutput, st.sampled_from(KINDS), st.text(min_size=1, max_size=9)),
    )
)
json_objects = st.dictionaries(text, st.none() | st.booleans() | st.integers(-9, 9) | text, max_size=3)
tool_calls = st.lists(st.builds(ToolCall, text, text, text), max_size=2).map(tuple)
messages = st.builds(Message, text, text, tool_calls, text, text, text)
tool_name = st.from_regex(NAME_PATTERN, fullmatch=True)
tools = st.lists(
    st.builds(Tool, tool_name, text, json_objects.map(lambda of: of | {"type": "object"}) | st.just({}), st.booleans()),
    max_size=3,
    unique_by=lambda tool: tool.name,
).map(tuple)
tool_uses = st.builds(ToolUse, tools, st.sampled_from([AUTO, NONE]), st.just(""), st.booleans()) | tools.filter(
    bool
).flatmap(
    lambda some: st.builds(
        ToolUse,
        st.just(some),
        st.just(REQUIRED),
        st.sampled_from(["", *(tool.name for tool in some)]),
        st.booleans(),
    )
)
prompts: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries({"text": text}),
    st.fixed_dictionaries({"token_ids": token_ids}),
    st.fixed_dictionaries(
        {
            "messages": st.lists(messages, max_size=3).map(tuple),
            "tools": st.none() | tool_uses,
            "template_options": json_objects,
            "prompt_end": st.sampled_from(PromptEnd),
        }
    ),
)
calls = st.builds(
    lambda prompt, **others: GenerateCall(**prompt, **others),
    prompts,
    request_id=request_id,
    sampling_params=sampling_params,
    model=text,
    priority=st.integers(-MAX_PRIORITY, MAX_PRIORITY),
    tenant=text,
    cache_salt=text,
    timeout_s=st.none() | amount,
)
logprobs = st.builds(TokenLogprobs, token_id, number, st.lists(st.tuples(token_id, number), max_size=3).map(tuple))
usages = st.builds(
    Usage,
    num_prompt_tokens=count,
    num_cached_tokens=count,
    num_output_tokens=count,
    replica_id=text,
    ttft_s=amount,
    num_resumes=count,
    num_reasoning_tokens=count,
)
chunks = st.builds(
    Chunk,
    index=count,
    text=text,
    token_ids=token_ids,
    logprobs=st.lists(logprobs, max_size=2).map(tuple),
    finish_reason=st.none() | st.sampled_from(sorted(set(FinishReason) - GOES_ON)),
    stop_reason=st.none() | count | text,
    usage=st.none() | usages,
    reasoning=text,
    tool_calls=st.lists(st.builds(CallPiece, count, text, text, text), max_size=2).map(tuple),
    prompt_logprobs=st.lists(logprobs, max_size=2).map(tuple),
)
cards = st.builds(
    ModelCard,
    name=text,
    max_model_len=count,
    vocab_size=count,
    block_size=count,
    dtype=text,
    eos_token_ids=token_ids,
    has_chat_template=st.booleans(),
    created_s=count,
    parent=text,
    adapters=st.lists(text, max_size=2).map(tuple),
)
stats = st.builds(
    ReplicaStats,
    **{
        name: count
        for name in ReplicaStats.__struct_fields__
        if name not in ("time_s", "step_s", "token_s", "full_token_s", "draining", "by_due", "due_tokens")
    }
    | {"block_size": st.integers(1, 1024)},
    time_s=amount,
    step_s=amount,
    token_s=amount,
    due_tokens=st.lists(count, max_size=7).map(tuple),
    draining=st.booleans(),
    by_due=st.booleans(),
    full_token_s=amount,
)
rows = st.builds(
    ReplicaRow,
    replica_id=text,
    node_id=text,
    stats=st.none() | stats,
    age_s=amount,
    num_reserved_blocks=count,
    connected=st.booleans(),
    stalled=st.booleans(),
    slowness=st.floats(1, 1e9),
    role=st.sampled_from(PHASES),
)
clusters = st.builds(
    ClusterRow,
    model=text,
    replicas=st.lists(rows, max_size=3).map(tuple),
    num_requests=count,
    num_active=count,
    num_shed=count,
    num_failed=count,
    num_resumes=count,
    recent_ttft_s=st.lists(amount, max_size=3).map(tuple),
    models=st.lists(st.builds(ModelRow, text, count, count, count, count, count), max_size=2).map(tuple),
    quality=st.builds(
        ViewQuality,
        num_requests=count,
        num_prompt_tokens=count,
        num_predicted_tokens=count,
        num_cached_tokens=count,
        age_p50_s=amount,
        age_p99_s=amount,
    ),
)
views = st.builds(
    ReplicaView,
    replica_id=text,
    stats=st.none() | stats,
    age_s=amount,
    connected=st.booleans(),
    stalled=st.booleans(),
    slowness=st.floats(1, 1e9),
    role=st.sampled_from(PHASES),
    num_reserved=count,
    num_reserved_blocks=count,
    num_reserved_tokens=count,
    num_matched_blocks=count,
    node_id=text,
)
candidates = st.builds(
    CandidateTerms, text, st.booleans(), text, number, st.lists(st.tuples(text, number), max_size=3).map(tuple)
)
records = st.builds(
    RouteRecord,
    time_s=amount,
    query=st.builds(
        RouteQuery,
        request_id=text,
        block_hashes=st.lists(st.binary(min_size=16, max_size=16), max_size=3).map(tuple),
        num_prompt_tokens=count,
        num_blocks_needed=count,
        block_size=count,
        excluded=st.frozensets(text, max_size=3),
        decode_steps=st.integers(1, 128),
        num_known_blocks=count,
        num_alike=st.integers(1, 9),
        num_holders=count,
        passed=st.dictionaries(text, count, max_size=3).map(lambda passed: tuple(sorted(passed.items()))),
        phase=st.sampled_from(PHASES),
        patience_tokens=st.none() | st.integers(-(2**40), 2**40),
    ),
    replicas=st.lists(views, max_size=2).map(Candidates.of),
    weights=st.builds(RouteWeights, prefill_price=amount, decode_price=amount),
    seed=st.integers(0, 2**64 - 1),
    decision=st.builds(
        RouteDecision, st.lists(text, max_size=3).map(tuple), text, st.lists(candidates, max_size=2).map(tuple)
    ),
    rule=st.none(),
)

configs = st.builds(
    ScaleConfig,
    min_replicas=st.integers(0, 5),
    max_replicas=st.integers(5, 1000),
    target_utilization=st.floats(0.05, 1),
    ttft_objective_s=st.floats(0.01, 3600),
    burst_window_s=st.floats(1, 60),
    downscale_delay_s=st.floats(0, 86400),
    headroom=st.floats(0, 100),
    burst_memory_s=st.floats(0, 86400),
)
scale_records = st.builds(
    ScaleRecord,
    seq=st.integers(0, 2**64 - 1),
    time_s=amount,
    num_before=count,
    num_after=count,
    num_running=count,
    num_starting=count,
    reason=text,
    terms=st.lists(st.tuples(text, number), max_size=3).map(tuple),
    replicas=st.lists(views, max_size=2).map(tuple),
    config=configs,
)
scalings = st.builds(
    ScalingRow,
    config=configs,
    tuned=st.lists(text, max_size=3).map(tuple),
    current=st.none() | scale_records,
    records=st.lists(scale_records, max_size=2).map(tuple),
)
changes = st.fixed_dictionaries(
    {},
    optional={
        name: count if name in COUNTS else number  # out of bounds, too: the gateway checks the limits
        for name in LIMITS
    },
)


@given(calls)
def test_calls(call: GenerateCall) -> None:
    raw = codec.call_to_proto(call).SerializeToString()
    request = codec.parse(generation_pb2.GenerateRequest, raw)
    assert codec.call_from_proto(request, "fresh", timeout_s=call.timeout_s) == call


@given(chunks)
def test_chunks(chunk: Chunk) -> None:
    raw = codec.chunk_to_proto(chunk).SerializeToString()
    assert codec.chunk_from_proto(generation_pb2.GenerateResponse.FromString(raw)) == chunk


@given(cards)
def test_model_cards(card: ModelCard) -> None:
    assert model_card(codec.model_card_to_proto(card)) == card


@given(clusters)
def test_clusters(cluster: ClusterRow) -> None:
    raw = control_codec.cluster_to_proto(cluster).SerializeToString()
    assert control_codec.cluster_from_proto(control_pb2.Cluster.FromString(raw)) == cluster


@given(records)
def test_route_records(record: RouteRecord) -> None:
    raw = control_codec.route_record_to_proto(record).SerializeToString()
    assert control_codec.route_record_from_proto(control_pb2.RouteRecord.FromString(raw)) == record


@given(scalings)
def test_scaling(scaling: ScalingRow) -> None:
    raw = scaling_codec.scaling_to_proto(scaling).SerializeToString()
    told = replace(scaling, records=tuple(replace(record, replicas=()) for record in scaling.records))
    assert scaling_codec.scaling_from_proto(control_pb2.Scaling.FromString(raw)) == told


@given(changes, st.booleans())
def test_tuning(changes: dict[str, float], reset: bool) -> None:
    raw = scaling_codec.tune_to_proto(changes, reset=reset).SerializeToString()
    assert scaling_codec.tune_from_proto(control_pb2.TuneRequest.FromString(raw)) == (changes, reset)


@given(st.binary(max_size=64))
def test_any_bytes_are_a_request_or_an_invalid_argument(raw: bytes) -> None:
    with suppress(InvalidArgument):
        codec.call_from_proto(codec.parse(generation_pb2.GenerateRequest, raw), "fresh")
