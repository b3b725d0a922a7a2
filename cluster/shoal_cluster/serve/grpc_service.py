"""The gRPC front end: `shoal.v1.Generation` and `shoal.v1.Control` over a gateway core, with health and reflection.

Requests arrive as bytes and are parsed here rather than by the server, so that a malformed one gets INVALID_ARGUMENT
instead of the server's INTERNAL.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from shoal_cluster.errors import INTERNAL, report_error
from shoal_cluster.gateway_settings import DEFAULT_MAX_REQUEST_BYTES
from shoal_cluster.serve import codec, control_codec, scaling_codec
from shoal_cluster.serve.admin import key_of_header
from shoal_cluster.serve.call import GenerateCall
from shoal_cluster.serve.chunks import open_chunks
from shoal_cluster.serve.explanation_codec import explanation_to_proto
from shoal_cluster.serve.gateway_core import GatewayCore
from shoal_cluster.serve.logs import error_fields, fields
from shoal_cluster.serve.long_texts import in_turn
from shoal_cluster.serve.request_id import new_request_id
from shoal_cluster.serve.trace_context import trace_context
from shoal_protos import control_pb2, generation_pb2
from shoal_replica.errors import ConfigError, DeadlineExceeded, InvalidArgument, Unauthenticated

GENERATION = "shoal.v1.Generation"
CONTROL = "shoal.v1.Control"
READINESS_PERIOD_S = 0.25
TENANT_KEY = "x-tenant"  # takes precedence over the message's; an API key's tenant over both
AUTHORIZATION = "authorization"
NUM_TASKS_BEFORE = 2  # a call's leg and its placement: the request goes to its replica before the client gets its id
KEEPALIVE_OPTIONS = (  # a client that vanished silently is noticed within 40 s
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)

logger = logging.getLogger(__name__)
_tasks: set[asyncio.Task[None]] = set()  # the event loop keeps only weak references to them


class GenerationService:
    """Serves `shoal.v1.Generation`."""

    def __init__(self, core: GatewayCore, max_call_s: float) -> None:
        self._core = core
        self._max_call_s = max_call_s

    async def generate(self, raw: bytes, context: grpc.aio.ServicerContext) -> None:
        """Stream a call. Whatever ends it early, a cancellation included, closes the core's stream at once."""
        request_id = new_request_id()
        try:
            call = self._read(raw, context, request_id)
            request_id = call.request_id
            await self._stream(call, context)
        except Exception as error:
            await _abort(context, error, request_id)

    def _read(self, raw: bytes, context: grpc.aio.ServicerContext, fresh_id: str) -> GenerateCall:
        headers = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        try:
            tenant = self._core.authenticate(_authorization(context))
            tenant = headers.get(TENANT_KEY) if tenant is None else tenant
            request = codec.parse(generation_pb2.GenerateRequest, raw)
            return codec.call_from_proto(request, fresh_id, context.time_remaining(), tenant, trace_context(headers))
        except (InvalidArgument, Unauthenticated) as error:
            self._core.refuse_unread(fresh_id, type(error).__name__)
            raise

    async def _stream(self, call: GenerateCall, context: grpc.aio.ServicerContext) -> None:
        """Stream the chunks. The request id is sent meanwhile: the client has it when this ends, unless it has left."""
        telling = asyncio.create_task(_tell_id(context, call.request_id))
        telling.add_done_callback(lambda task: task.cancelled() or task.exception())  # unawaited if the client leaves
        try:
            async with asyncio.timeout(self._max_call_s) as life, open_chunks(self._core, call) as chunks:
                async for chunk in chunks:
                    if not telling.done():
                        await telling
                    message = codec.chunk_to_proto(chunk)
                    if chunk.usage is None:
                        await context.write(message)
                    else:
                        await _begin_last_write(context, message)
        except asyncio.CancelledError:
            telling.cancel()
            raise
        except Exception as error:
            await telling
            if isinstance(error, TimeoutError) and life.expired():
                raise DeadlineExceeded(f"the answer was not read within {self._max_call_s:g} s") from None
            raise
        await telling

    async def tokenize(self, raw: bytes, context: grpc.aio.ServicerContext) -> generation_pb2.TokenizeResponse:
        async with _errors_as_status(context, new_request_id()):
            self._core.authenticate(_authorization(context))
            request = codec.parse(generation_pb2.TokenizeRequest, raw)
            self._core.check_model(request.model)
            # In a thread: a long text takes a while, and streams must go on meanwhile.
            token_ids = await in_turn(
                self._core.tokenize,
                codec.tokenize_input_from_proto(request),
                add_special_tokens=not request.HasField("add_special_tokens") or request.add_special_tokens,
            )
            return generation_pb2.TokenizeResponse(token_ids=token_ids)

    async def get_model(self, raw: bytes, context: grpc.aio.ServicerContext) -> generation_pb2.Model:
        async with _errors_as_status(context, new_request_id()):
            self._core.authenticate(_authorization(context))
            request = codec.parse(generation_pb2.GetModelRequest, raw)
            return codec.model_card_to_proto(self._core.model_card(request.model))

    def handler(self) -> grpc.GenericRpcHandler:
        """The RPC handlers, for a server."""
        return grpc.method_handlers_generic_handler(
            GENERATION,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(self.generate, response_serializer=_serialize),
                "Tokenize": grpc.unary_unary_rpc_method_handler(self.tokenize, response_serializer=_serialize),
                "GetModel": grpc.unary_unary_rpc_method_handler(self.get_model, response_serializer=_serialize),
            },
        )


class ControlService:
    """Serves `shoal.v1.Control`."""

    def __init__(self, core: GatewayCore) -> None:
        self._core = core

    async def list_replicas(self, raw: bytes, context: grpc.aio.ServicerContext) -> control_pb2.Cluster:
        async with _errors_as_status(context, new_request_id()):
            self._core.authenticate(_authorization(context))
            codec.parse(control_pb2.ListReplicasRequest, raw)
            return control_codec.cluster_to_proto(self._core.cluster())

    async def explain_route(self, raw: bytes, context: grpc.aio.ServicerContext) -> control_pb2.ExplainRouteResponse:
        async with _errors_as_status(context, new_request_id()):
            self._core.authenticate(_authorization(context))
            request = codec.parse(control_pb2.ExplainRouteRequest, raw)
            return explanation_to_proto(await self._core.explain(request.request_id))

    async def get_scaling(self, raw: bytes, context: grpc.aio.ServicerContext) -> control_pb2.Scaling:
        async with _errors_as_status(context, new_request_id()):
            self._core.authenticate(_authorization(context))
            codec.parse(control_pb2.GetScalingRequest, raw)
            return scaling_codec.scaling_to_proto(self._core.scaling())

    async def tune(self, raw: bytes, context: grpc.aio.ServicerContext) -> control_pb2.Scaling:
        async with _errors_as_status(context, new_request_id()):
            self._core.check_admin(key_of_header(_authorization(context)))
            changes, reset = scaling_codec.tune_from_proto(codec.parse(control_pb2.TuneRequest, raw))
            return scaling_codec.scaling_to_proto(await self._core.tune(changes, reset=reset))

    def handler(self) -> grpc.GenericRpcHandler:
        """The RPC handlers, for a server."""
        return grpc.method_handlers_generic_handler(
            CONTROL,
            {
                "ListReplicas": grpc.unary_unary_rpc_method_handler(self.list_replicas, response_serializer=_serialize),
                "ExplainRoute": grpc.unary_unary_rpc_method_handler(self.explain_route, response_serializer=_serialize),
                "GetScaling": grpc.unary_unary_rpc_method_handler(self.get_scaling, response_serializer=_serialize),
                "Tune": grpc.unary_unary_rpc_method_handler(self.tune, response_serializer=_serialize),
            },
        )


async def start_grpc_server(
    core: GatewayCore,
    address: str,
    max_message_bytes: int = DEFAULT_MAX_REQUEST_BYTES,
    *,
    max_call_s: float,
    credentials: grpc.ServerCredentials | None = None,
    share_port: bool = False,
) -> tuple[grpc.aio.Server, int]:
    """Serve ``core`` at ``address`` ("host:port"; port 0 takes a free one). Returns the server and its port.

    A call's work ends after ``max_call_s``, read or not. ``credentials`` turn TLS on. ``share_port`` lets several
    gateways on one host share a port. Health follows ``core.is_ready()`` until the server stops.

    Raises:
        ConfigError: the address cannot be bound.
    """
    server = grpc.aio.server(
        options=(
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.so_reuseport", int(share_port)),
            *KEEPALIVE_OPTIONS,
        )
    )
    server.add_generic_rpc_handlers((GenerationService(core, max_call_s).handler(), ControlService(core).handler()))
    health_service = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    reflection.enable_server_reflection((GENERATION, CONTROL, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        port = (
            server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
        )
    except RuntimeError:
        raise ConfigError(f"grpc_address: cannot listen on {address!r}; it is malformed or in use") from None
    await _set_health(core, health_service)
    await server.start()
    follower = asyncio.create_task(_follow_readiness(core, health_service, server))
    _tasks.add(follower)
    follower.add_done_callback(_tasks.discard)
    return server, port


async def _begin_last_write(context: grpc.aio.ServicerContext, message: generation_pb2.GenerateResponse) -> None:
    """Begin to write a call's last message. The status follows right behind it, which spares a client half a
    millisecond: the server learns that something has been written from a thread of its own.
    """
    writing = asyncio.create_task(context.write(message))
    _tasks.add(writing)
    writing.add_done_callback(_end_last_write)
    await asyncio.sleep(0)  # it begins now


def _end_last_write(writing: asyncio.Task[None]) -> None:
    _tasks.discard(writing)
    if not writing.cancelled():
        writing.exception()  # the client has left: there is nobody to be told


async def _follow_readiness(core: GatewayCore, service: health.aio.HealthServicer, server: grpc.aio.Server) -> None:
    """Keep the health status equal to readiness, until the server stops."""
    while await server.wait_for_termination(READINESS_PERIOD_S):  # True: it timed out, so the server still runs
        await _set_health(core, service)


async def _set_health(core: GatewayCore, service: health.aio.HealthServicer) -> None:
    response = health_pb2.HealthCheckResponse
    status = response.SERVING if core.is_ready() else response.NOT_SERVING
    for name in ("", GENERATION, CONTROL):
        await service.set(name, status)


async def _tell_id(context: grpc.aio.ServicerContext, request_id: str) -> None:
    for _ in range(NUM_TASKS_BEFORE):
        await asyncio.sleep(0)
    await context.send_initial_metadata((("x-request-id", request_id),))


@asynccontextmanager
async def _errors_as_status(context: grpc.aio.ServicerContext, request_id: str) -> AsyncIterator[None]:
    """End the call with the status of an error that is raised inside."""
    try:
        yield
    except Exception as error:
        await _abort(context, error, request_id)


async def _abort(context: grpc.aio.ServicerContext, error: Exception, request_id: str) -> None:
    report = report_error(error, request_id)
    if report.kind is INTERNAL:
        logger.error("request failed", extra=fields(request_id=request_id, **error_fields(error)))
    status = grpc.StatusCode[report.kind.grpc_status]
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    if report.retry_after_s is not None:
        metadata = (
            ("retry-after", f"{report.retry_after_s:g}"),
            ("grpc-status-details-bin", _retry_details(status, report.message, report.retry_after_s)),
        )
    await context.abort(status, report.message, trailing_metadata=metadata)


def _retry_details(status: grpc.StatusCode, message: str, retry_after_s: float) -> bytes:
    """A google.rpc.Status with a RetryInfo, which is read by clients that retry automatically."""
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromNanoseconds(round(retry_after_s * 1e9))
    details = status_pb2.Status(code=status.value[0], message=message)
    details.details.add().Pack(info)
    return bytes(details.SerializeToString())


def _authorization(context: grpc.aio.ServicerContext) -> str | None:
    """The caller's authorization. Of several none is believed: a proxy may have looked at another one."""
    given = [value for key, value in context.invocation_metadata() or () if key == AUTHORIZATION]
    return ", ".join(each for each in given if isinstance(each, str)) or None


def _serialize(message: Any) -> bytes:
    return bytes(message.SerializeToString())
