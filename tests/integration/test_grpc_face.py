"""The gRPC API over a scripted core: real server, real client, loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from uuid import uuid4

import grpc
import pytest
import pytest_asyncio
from fixtures.fake_gateway import ADMIN_KEY, CLUSTER, MODEL, SCALING, TOKENIZER, FakeGateway, example_record
from fixtures.model_cards import model_card
from fixtures.waiting import DEADLINE_S, until
from google.protobuf.descriptor_pool import DescriptorPool
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from shoal_cluster.commands.client import GatewayClient
from shoal_cluster.serve import codec, control_codec, scaling_codec
from shoal_cluster.serve.call import Chunk, GenerateCall, Usage
from shoal_cluster.serve.grpc_service import start_grpc_server
from shoal_cluster.serve.trace_context import TraceContext
from shoal_protos import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc
from shoal_replica.errors import ConfigError, DeadlineExceeded, EngineDead, ResourceExhausted, Unavailable
from shoal_replica.request import FinishReason
from shoal_replica.sampling_params import SamplingParams

MAX_MESSAGE_BYTES = 64 * 1024
MAX_CALL_S = 60.0


@pytest.fixture
def core() -> FakeGateway:
    return FakeGateway()


@pytest_asyncio.fixture
async def address(core: FakeGateway) -> AsyncIterator[str]:
    server, port = await start_grpc_server(core, "127.0.0.1:0", MAX_MESSAGE_BYTES, max_call_s=MAX_CALL_S)
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest_asyncio.fixture
async def channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel


@pytest.fixture
def generation(channel: grpc.aio.Channel) -> generation_pb2_grpc.GenerationStub:
    return generation_pb2_grpc.GenerationStub(channel)


async def collect(stub: generation_pb2_grpc.GenerationStub, **fields: object) -> list[Chunk]:
    request = generation_pb2.GenerateRequest(**fields)
    return [codec.chunk_from_proto(response) async for response in stub.Generate(request, timeout=DEADLINE_S)]


async def test_generate_streams_text_tokens_and_usage(generation: generation_pb2_grpc.GenerationStub) -> None:
    chunks = await collect(generation, text="hi")
    assert "".join(chunk.text for chunk in chunks) == "Hello, 👧!"
    assert sum((chunk.token_ids for chunk in chunks), ()) == TOKENIZER.encode("Hello, 👧!")
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason is FinishReason.STOP
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_output_tokens) == (2, 2, len(chunks))
    assert (usage.replica_id, usage.ttft_s, usage.num_resumes) == ("r0", 0.125, 1)


async def test_the_callers_trace_goes_on(address: str, core: FakeGateway) -> None:
    trace = TraceContext(
        trace_id="4bf92f3577b34da6a3ce929d0e0e4736", span_id="00f067aa0ba902b7", sampled=True, state="v=1"
    )
    async with GatewayClient(address) as client:
        for told in (trace, None):
            call = GenerateCall(
                request_id=uuid4().hex, text="hi", sampling_params=SamplingParams(), timeout_s=DEADLINE_S, trace=told
            )
            assert [chunk async for chunk in client.generate(call)]
    assert [call.trace for call in core.calls] == [trace, None]


async def test_two_sequences_with_logprobs(generation: generation_pb2_grpc.GenerationStub) -> None:
    chunks = await collect(generation, token_ids={"ids": [1, 2]}, sampling_params={"n": 2, "logprobs": 2})
    for index in (0, 1):
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert "".join(chunk.text for chunk in mine) == "Hello, 👧!"
        assert all(len(chunk.logprobs[0].top) == 2 for chunk in mine)


async def test_the_tenant_of_the_metadata_goes_before_the_messages(
    core: FakeGateway, generation: generation_pb2_grpc.GenerationStub
) -> None:
    for request in (generation_pb2.GenerateRequest(text="x"), generation_pb2.GenerateRequest(text="x", tenant="field")):
        async for _ in generation.Generate(request, metadata=(("x-tenant", "metadata"),), timeout=DEADLINE_S):
            pass
    assert [call.tenant for call in core.calls] == ["metadata", "metadata"]


async def test_the_core_gets_what_the_client_asked(
    core: FakeGateway, generation: generation_pb2_grpc.GenerationStub
) -> None:
    await collect(
        generation,
        messages={"messages": [{"role": "user", "content": "hi"}]},
        model=MODEL,
        priority=-3,
        tenant="t",
        cache_salt="s",
        request_id="mine",
        sampling_params={"max_tokens": 2},
    )
    (call,) = core.calls
    assert (call.request_id, call.model, call.priority, call.tenant, call.cache_salt) == ("mine", MODEL, -3, "t", "s")
    assert call.sampling_params.max_tokens == 2
    assert call.timeout_s is not None
    assert DEADLINE_S / 2 < call.timeout_s <= 1.01 * DEADLINE_S  # gRPC rounds up the timeout that it sends


async def test_without_deadline_there_is_no_timeout(
    core: FakeGateway, generation: generation_pb2_grpc.GenerationStub
) -> None:
    call = generation.Generate(generation_pb2.GenerateRequest(text="hi"))
    metadata = dict(await call.initial_metadata())
    async for _ in call:
        pass
    assert core.calls[0].timeout_s is None
    assert metadata["x-request-id"] == core.calls[0].request_id


async def test_cancel_closes_the_cores_stream(
    core: FakeGateway, generation: generation_pb2_grpc.GenerationStub
) -> None:
    core.gate.clear()
    for number in range(1, 31):
        call = generation.Generate(generation_pb2.GenerateRequest(text="hi"))
        await call.read()
        call.cancel()
        await until(lambda number=number: core.num_closed_early == number)
    assert core.num_open == 0


async def test_cancel_of_a_running_stream_closes_it(
    core: FakeGateway, generation: generation_pb2_grpc.GenerationStub
) -> None:
    core.text = "x" * 20_000  # more than the client's window holds: the server is stuck in a write
    for _ in range(10):
        call = generation.Generate(generation_pb2.GenerateRequest(text="hi"))
        await call.read()
        call.cancel()
    await until(lambda: len(core.calls) == 10 and core.num_open == 0)
    assert core.num_closed_early == 10


async def test_a_last_message_that_is_not_read_yet_comes_whole_and_then_the_status(
    generation: generation_pb2_grpc.GenerationStub,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its call is over by then. A client that leaves is no error."""
    usage = Usage(num_prompt_tokens=1, num_cached_tokens=0, num_output_tokens=1, replica_id="", ttft_s=0, num_resumes=0)
    last = Chunk(index=0, text="x" * 500_000, finish_reason=FinishReason.STOP, usage=usage)  # beyond a client's window
    num_over = 0

    async def generate(core: FakeGateway, call: GenerateCall) -> AsyncIterator[Chunk]:
        nonlocal num_over
        yield last
        num_over += 1

    monkeypatch.setattr(FakeGateway, "generate", generate)
    reads, leaves = (generation.Generate(generation_pb2.GenerateRequest(text="hi")) for _ in range(2))
    await asyncio.gather(reads.initial_metadata(), leaves.initial_metadata())
    await until(lambda: num_over == 2)
    leaves.cancel()
    assert codec.chunk_from_proto(await reads.read()) == last
    assert await reads.read() is grpc.aio.EOF
    assert await reads.code() is grpc.StatusCode.OK
    assert await collect(generation, text="hi") == [last]
    assert not caplog.records


async def test_passed_deadline_closes_the_cores_stream(
    core: FakeGateway, generation: generation_pb2_grpc.GenerationStub
) -> None:
    core.gate.clear()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in generation.Generate(generation_pb2.GenerateRequest(text="hi"), timeout=0.2):
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: core.num_open == 0)


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({}, "INVALID_ARGUMENT", "prompt: got None"),
        ({"text": ""}, "INVALID_ARGUMENT", "prompt: got ()"),
        ({"text": "x" * 200}, "INVALID_ARGUMENT", "below 128 tokens"),
        ({"text": "x", "model": "other"}, "NOT_FOUND", "'other' is not served here"),
        ({"text": "x", "sampling_params": {"temperature": -0.5}}, "INVALID_ARGUMENT", "temperature: got -0.5"),
        ({"text": "x", "sampling_params": {"top_p": 1.5}}, "INVALID_ARGUMENT", "top_p: got 1.5; must be in (0, 1]"),
        ({"text": "x", "request_id": "a b"}, "INVALID_ARGUMENT", "request_id: got 'a b'"),
        (
            {"text": "x", "sampling_params": {"structured_output": {}}},
            "INVALID_ARGUMENT",
            "one of json_schema, regex and lark must be set",
        ),
        ({"messages": {"messages": [{"role": "x"}]}}, "INVALID_ARGUMENT", "unknown role x"),
        ({"text": "x" * (MAX_MESSAGE_BYTES + 1)}, "RESOURCE_EXHAUSTED", "larger than max"),
    ],
)
async def test_bad_input_has_its_status(
    core: FakeGateway,
    generation: generation_pb2_grpc.GenerationStub,
    fields: dict[str, object],
    status: str,
    words: str,
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(generation, **fields)
    assert caught.value.code().name == status
    assert words in caught.value.details()
    assert "\n" not in caught.value.details()
    assert core.num_unread + core.num_refused == ("larger than max" not in words)  # that one gRPC itself refuses
    assert "".join(chunk.text for chunk in await collect(generation, text="hi")) == core.text


@pytest.mark.parametrize("raw", [b"\x0a\x02\xff\xfe", b"garbage"])
@pytest.mark.parametrize("method", ["Generation/Generate", "Generation/Tokenize", "Control/ExplainRoute"])
async def test_malformed_bytes_are_an_invalid_argument(channel: grpc.aio.Channel, method: str, raw: bytes) -> None:
    kind = channel.unary_stream if method.endswith("Generate") else channel.unary_unary
    call = kind(f"/shoal.v1.{method}")(raw, timeout=DEADLINE_S)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if method.endswith("Generate") else call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "UTF-8" in caught.value.details()


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ResourceExhausted("no room", retry_after_s=1.5), "RESOURCE_EXHAUSTED", "no room"),
        (DeadlineExceeded("too late"), "DEADLINE_EXCEEDED", "too late"),
        (Unavailable("no replica"), "UNAVAILABLE", "no replica"),
        (EngineDead("step failed"), "UNAVAILABLE", "step failed"),
        (KeyError("secret"), "INTERNAL", "internal error (request id mine)"),
    ],
)
@pytest.mark.parametrize("error_after", [0, 2])
async def test_errors_of_the_core_have_their_status(
    core: FakeGateway,
    generation: generation_pb2_grpc.GenerationStub,
    error: Exception,
    status: str,
    words: str,
    error_after: int,
) -> None:
    core.error, core.error_after = error, error_after
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(generation, text="x", request_id="mine")
    assert (caught.value.code().name, caught.value.details()) == (status, words)
    hint = dict(caught.value.trailing_metadata()).get("retry-after")
    assert hint == ("1.5" if status == "RESOURCE_EXHAUSTED" else None)
    details = dict(caught.value.trailing_metadata()).get("grpc-status-details-bin")
    assert (details is not None) == (status == "RESOURCE_EXHAUSTED")
    if details is not None:
        told = status_pb2.Status.FromString(details)
        info = error_details_pb2.RetryInfo()
        assert told.details[0].Unpack(info)
        assert (told.code, told.message) == (caught.value.code().value[0], words)
        assert info.retry_delay.ToMilliseconds() == 1500
    assert core.num_open == 0


async def test_tokenize(generation: generation_pb2_grpc.GenerationStub) -> None:
    reply = await generation.Tokenize(generation_pb2.TokenizeRequest(text="the end"))
    assert tuple(reply.token_ids) == TOKENIZER.encode("the end")
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    reply = await generation.Tokenize(generation_pb2.TokenizeRequest(messages=messages))
    assert tuple(reply.token_ids) == TOKENIZER.encode(
        TOKENIZER.apply_chat_template([{"role": "user", "content": "hi"}])
    )
    with pytest.raises(grpc.aio.AioRpcError, match="not served here"):
        await generation.Tokenize(generation_pb2.TokenizeRequest(text="x", model="other"))


async def test_get_model(core: FakeGateway, generation: generation_pb2_grpc.GenerationStub) -> None:
    reply = await generation.GetModel(generation_pb2.GetModelRequest())
    assert model_card(reply) == core.model_card()
    with pytest.raises(grpc.aio.AioRpcError, match="not served here"):
        await generation.GetModel(generation_pb2.GetModelRequest(model="other"))


async def test_tuning_needs_the_admin_key(core: FakeGateway, channel: grpc.aio.Channel) -> None:
    control = control_pb2_grpc.ControlStub(channel)
    scaling = await control.GetScaling(control_pb2.GetScalingRequest())
    records = tuple(replace(record, replicas=()) for record in SCALING.records)
    assert scaling_codec.scaling_from_proto(scaling) == replace(SCALING, records=records)
    request = scaling_codec.tune_to_proto({"max_replicas": 7}, reset=False)
    for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", ADMIN_KEY),)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await control.Tune(request, metadata=metadata)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert core.scaling_row == SCALING
    key = (("authorization", f"Bearer {ADMIN_KEY}"),)
    scaling = await control.Tune(request, metadata=key)
    assert scaling.settings.max_replicas == core.scaling_row.config.max_replicas == 7
    with pytest.raises(grpc.aio.AioRpcError, match="must be from") as caught:
        await control.Tune(scaling_codec.tune_to_proto({"target_utilization": 2.0}, reset=False), metadata=key)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_control(channel: grpc.aio.Channel) -> None:
    control = control_pb2_grpc.ControlStub(channel)
    cluster = await control.ListReplicas(control_pb2.ListReplicasRequest())
    assert control_codec.cluster_from_proto(cluster) == CLUSTER
    reply = await control.ExplainRoute(control_pb2.ExplainRouteRequest(request_id="asked"))
    assert [control_codec.route_record_from_proto(record) for record in reply.records] == [example_record()]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await control.ExplainRoute(control_pb2.ExplainRouteRequest(request_id="unknown"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("service", ["", "shoal.v1.Generation"])
async def test_health_follows_readiness(core: FakeGateway, channel: grpc.aio.Channel, service: str) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_S)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    core.ready = False
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    core.ready = True
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


async def test_reflection_describes_every_method_served(address: str) -> None:
    def describe() -> dict[str, list[str]]:
        with grpc.insecure_channel(address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            pool = DescriptorPool(database)
            names = [name for name in database.get_services() if name.startswith("shoal.")]
            return {name: [m.name for m in pool.FindServiceByName(name).methods] for name in names}

    assert await asyncio.to_thread(describe) == {
        "shoal.v1.Control": ["ListReplicas", "ExplainRoute", "GetScaling", "Tune"],
        "shoal.v1.Generation": ["Generate", "Tokenize", "GetModel"],
    }


async def test_a_port_in_use_is_a_config_error(core: FakeGateway, address: str) -> None:
    with pytest.raises(ConfigError, match="grpc_address"):
        await start_grpc_server(core, address, max_call_s=MAX_CALL_S)


async def test_a_port_can_be_shared_on_purpose(core: FakeGateway) -> None:
    first, port = await start_grpc_server(core, "127.0.0.1:0", max_call_s=MAX_CALL_S, share_port=True)
    second, same = await start_grpc_server(core, f"127.0.0.1:{port}", max_call_s=MAX_CALL_S, share_port=True)
    assert port == same
    await asyncio.gather(first.stop(None), second.stop(None))
