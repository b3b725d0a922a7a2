"""What absent fields mean on the wire, and what is refused there. Round trips: tests/property/test_codec.py."""

from __future__ import annotations

import pytest
from fixtures.fake_gateway import CLUSTER, example_record

from shoal_cluster.chat.message import Message
from shoal_cluster.policies.pending_request import RESUMED_PRIORITY
from shoal_cluster.serve import codec, control_codec
from shoal_cluster.serve.call import Prompt
from shoal_protos import control_pb2, generation_pb2
from shoal_replica.errors import InvalidArgument
from shoal_replica.sampling_params import SamplingParams


def test_an_empty_request_has_the_documented_defaults() -> None:
    call = codec.call_from_proto(generation_pb2.GenerateRequest(text="x"), "fresh", timeout_s=2.0)
    assert call.sampling_params == SamplingParams(max_tokens=None, temperature=1.0, top_p=1.0, n=1)
    assert (call.request_id, call.timeout_s, call.model, call.priority) == ("fresh", 2.0, "", 0)
    assert (call.text, call.token_ids, call.messages) == ("x", None, None)


def test_zero_is_a_value() -> None:
    params = generation_pb2.SamplingParams(temperature=0, seed=0, logprobs=0)
    domain = codec.sampling_params_from_proto(params)
    assert (domain.temperature, domain.seed, domain.logprobs) == (0.0, 0, 0)


def test_an_empty_prompt_is_still_a_prompt() -> None:
    request = generation_pb2.GenerateRequest(messages=generation_pb2.ChatMessages())
    assert codec.call_from_proto(request, "fresh").messages == ()
    assert codec.call_from_proto(generation_pb2.GenerateRequest(text=""), "fresh").text == ""


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (generation_pb2.GenerateRequest(), "prompt"),
        (generation_pb2.GenerateRequest(text="x", request_id=""), "request_id"),
        (generation_pb2.GenerateRequest(text="x", request_id="a b"), "request_id"),
        (generation_pb2.GenerateRequest(text="x", request_id="a\n"), "request_id"),
        (generation_pb2.GenerateRequest(text="x", request_id="é"), "request_id"),
        (generation_pb2.GenerateRequest(text="x", request_id="a" * 129), "request_id"),
        (generation_pb2.GenerateRequest(text="x", priority=RESUMED_PRIORITY), "priority"),
        (generation_pb2.GenerateRequest(text="x", sampling_params={"max_tokens": 0}), "max_tokens"),
        (generation_pb2.GenerateRequest(text="x", sampling_params={"temperature": -1}), "temperature"),
        (generation_pb2.GenerateRequest(text="x", sampling_params={"temperature": float("nan")}), "temperature"),
        (generation_pb2.GenerateRequest(text="x", sampling_params={"top_p": 0}), "top_p"),
        (generation_pb2.GenerateRequest(text="x", sampling_params={"seed": -1}), "seed"),
        (generation_pb2.GenerateRequest(text="x", sampling_params={"stop": [""]}), "stop"),
        (generation_pb2.GenerateRequest(messages={"messages": [{}] * 20_001}), "messages"),
        (generation_pb2.GenerateRequest(messages={"messages": [{"tool_calls": [{}] * 20_000}]}), "messages"),
        (generation_pb2.GenerateRequest(messages={"messages": [{}], "tools": [{"name": "f"}] * 129}), "tools"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_requests_name_their_field(request_: generation_pb2.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        codec.call_from_proto(request_, "fresh")
    assert caught.value.field == field


def test_what_is_left_out_is_told_apart_from_a_default() -> None:
    given = generation_pb2.SamplingParams(temperature=1.0, repetition_penalty=1.0)
    call = codec.call_from_proto(generation_pb2.GenerateRequest(text="x", sampling_params=given), "fresh")
    assert call.left_out == {"top_k", "top_p", "min_p"}
    again = codec.call_from_proto(codec.call_to_proto(call), "fresh")
    assert (again.left_out, again.sampling_params) == (call.left_out, call.sampling_params)


@pytest.mark.parametrize("raw", [b"\x0a\x02\xff\xfe", b"\xff", b"\x0a\x7f"])
def test_malformed_bytes_are_an_invalid_argument(raw: bytes) -> None:
    with pytest.raises(InvalidArgument, match=r"shoal\.v1\.GenerateRequest"):
        codec.parse(generation_pb2.GenerateRequest, raw)


def test_tokenize_input() -> None:
    messages = generation_pb2.ChatMessages(messages=[{"role": "user", "content": "hi"}])
    assert codec.tokenize_input_from_proto(generation_pb2.TokenizeRequest(text="")) == Prompt("")
    told = codec.tokenize_input_from_proto(generation_pb2.TokenizeRequest(messages=messages))
    assert told == Prompt(messages=(Message("user", "hi"),))
    with pytest.raises(InvalidArgument, match="input"):
        codec.tokenize_input_from_proto(generation_pb2.TokenizeRequest())


def test_cluster_carries_the_sums_of_the_ledger() -> None:
    cluster = control_codec.cluster_to_proto(CLUSTER)
    assert cluster.blocks == control_pb2.BlockLedger(
        num_allocated_blocks=30, num_cached_blocks=20, num_free_blocks=70, num_total_blocks=100, utilization=0.3
    )
    assert cluster.replicas[0].stats.blocks.utilization == 0.3
    assert not cluster.replicas[1].HasField("stats")


def test_of_a_gateway_that_is_older_or_newer_what_it_does_not_tell_is_usual():
    told = control_pb2.ReplicaView(replica_id="a", role="verify")
    view = control_codec.view_from_proto(told)
    assert (view.role, view.slowness) == ("", 1.0)


def test_a_record_replays_after_the_journey() -> None:
    record = control_codec.route_record_from_proto(control_codec.route_record_to_proto(example_record()))
    assert record.replay() == record.decision == example_record().decision
