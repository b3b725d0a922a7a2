"""A gRPC client for gateways: domain values in, domain values out, gRPC errors raised as ShoalErrors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

import grpc

from shoal_cluster.addresses import no_gateway
from shoal_cluster.commands.gateway_access import TLS_CA_VARIABLE, GatewayAccess
from shoal_cluster.serve import codec, control_codec, scaling_codec
from shoal_cluster.serve.admin import BEARER
from shoal_cluster.serve.call import Chunk, GenerateCall
from shoal_cluster.serve.explanation import Explanation
from shoal_cluster.serve.explanation_codec import explanation_from_bytes
from shoal_cluster.serve.rows import ClusterRow, ScalingRow
from shoal_protos import control_pb2
from shoal_replica.errors import (
    DeadlineExceeded,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    ShoalError,
    Unauthenticated,
    Unavailable,
)

ERRORS: dict[grpc.StatusCode, type[ShoalError]] = {
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
}
CONTROL_TIMEOUT_S = 10.0
# How gRPC begins what it says of connections; other texts are gateways'.
NOT_CONNECTED = ("failed to connect", "connections to all backends failing", "socket closed", "recvmsg:")
HANDSHAKE = ("handshake", "certificate", "ssl_error", "tsi", "socket closed", "connection reset")
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)  # gateways that share a port split connections


class GatewayClient:
    """One channel to the gateway at ``address``. Use it as an async context manager.

    ``access`` is by default what the environment says.
    """

    def __init__(self, address: str, access: GatewayAccess | None = None) -> None:
        self.address = address
        access = GatewayAccess.from_environment() if access is None else access
        self._metadata = access.headers
        self._channel = access.channel(address, OWN_CONNECTION)
        self._generate = self._channel.unary_stream(
            "/shoal.v1.Generation/Generate",
            request_serializer=lambda call: codec.call_to_proto(call).SerializeToString(),
            response_deserializer=codec.chunk_from_bytes,
        )
        self._list_replicas = self._channel.unary_unary(
            "/shoal.v1.Control/ListReplicas",
            response_deserializer=lambda raw: control_codec.cluster_from_proto(control_pb2.Cluster.FromString(raw)),
        )
        self._explain = self._channel.unary_unary(
            "/shoal.v1.Control/ExplainRoute",
            request_serializer=control_pb2.ExplainRouteRequest.SerializeToString,
            response_deserializer=explanation_from_bytes,
        )
        self._get_scaling = self._channel.unary_unary(
            "/shoal.v1.Control/GetScaling",
            response_deserializer=lambda raw: scaling_codec.scaling_from_proto(control_pb2.Scaling.FromString(raw)),
        )
        self._tune = self._channel.unary_unary(
            "/shoal.v1.Control/Tune",
            request_serializer=control_pb2.TuneRequest.SerializeToString,
            response_deserializer=lambda raw: scaling_codec.scaling_from_proto(control_pb2.Scaling.FromString(raw)),
        )

    async def generate(self, call: GenerateCall) -> AsyncIterator[Chunk]:
        """Stream the answer to a call; closing the iterator cancels the call."""
        trace = call.trace.headers() if call.trace is not None else ()
        stream = self._generate(call, timeout=call.timeout_s, metadata=(*trace, *self._metadata))
        try:
            with self._own_errors():
                async for chunk in stream:
                    yield chunk
        finally:
            stream.cancel()

    async def cluster(self) -> ClusterRow:
        """The replicas and their ledgers."""
        with self._own_errors():
            row: ClusterRow = await self._list_replicas(b"", timeout=CONTROL_TIMEOUT_S, metadata=self._metadata)
        return row

    async def explain(self, request_id: str) -> Explanation:
        """What the gateways know of a request's placement."""
        request = control_pb2.ExplainRouteRequest(request_id=request_id)
        with self._own_errors():
            call = self._explain(request, timeout=CONTROL_TIMEOUT_S, metadata=self._metadata)
            explanation: Explanation = await call
        return explanation

    async def scaling(self) -> ScalingRow:
        """The autoscaler's settings and decisions."""
        with self._own_errors():
            row: ScalingRow = await self._get_scaling(b"", timeout=CONTROL_TIMEOUT_S, metadata=self._metadata)
        return row

    async def tune(self, changes: Mapping[str, float], *, reset: bool, admin_key: str | None) -> ScalingRow:
        """Change the autoscaler's settings; return them as they are then."""
        metadata = self._metadata if admin_key is None else (("authorization", BEARER + admin_key),)
        request = scaling_codec.tune_to_proto(changes, reset=reset)
        with self._own_errors():
            row: ScalingRow = await self._tune(request, timeout=CONTROL_TIMEOUT_S, metadata=metadata)
        return row

    async def __aenter__(self) -> GatewayClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    @contextmanager
    def _own_errors(self) -> Iterator[None]:
        """Raise gRPC's errors as this project's."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None

    def _error(self, error: grpc.aio.AioRpcError) -> ShoalError:
        details = error.details() or error.code().name
        said = details.lower()
        if error.code() is grpc.StatusCode.UNAVAILABLE and said.startswith(NOT_CONNECTED):
            if any(word in said for word in HANDSHAKE):
                hint = f"its certificate is not one of {TLS_CA_VARIABLE}, or only one of the two speaks TLS"
                return Unavailable(f"no connection to {self.address}: {hint} ({' '.join(details.split())[:200]})")
            return Unavailable(no_gateway(self.address, self.address))
        return ERRORS.get(error.code(), ShoalError)(details)
