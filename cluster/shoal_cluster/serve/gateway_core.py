"""What both front ends (gRPC, HTTP) and the dashboard need of a gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Protocol

from shoal_cluster.policies.route_record import RouteRecord
from shoal_cluster.serve.block_map import BlockMap
from shoal_cluster.serve.call import Chunk, GenerateCall, Prompt
from shoal_cluster.serve.deployment_watch import DeploymentRow
from shoal_cluster.serve.explanation import Explanation
from shoal_cluster.serve.journal import Event
from shoal_cluster.serve.metrics.tally import Point
from shoal_cluster.serve.past_sample import PastSample
from shoal_cluster.serve.rows import ClusterRow, ModelCard, ScalingRow


class GatewayCore(Protocol):
    """What the front ends need of the gateway. Methods raise subclasses of ShoalError for clients' mistakes."""

    def generate(self, call: GenerateCall) -> AsyncIterator[Chunk]:
        """Stream a call. Closing the iterator cancels the request and frees its blocks."""
        ...

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool) -> tuple[int, ...]:
        """The tokens that a prompt becomes; ``add_special_tokens`` is for texts."""
        ...

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        ...

    def check_model(self, name: str) -> None:
        """Raise NotFound unless ``name`` is empty, the served model or one of its adapters."""
        ...

    def authenticate(self, authorization: str | None) -> str | None:
        """The tenant whose key the header has; None where no key is needed. Raises Unauthenticated."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for."""
        ...

    def model_card(self, name: str = "") -> ModelCard:
        """The card of the model, or of the adapter of that name. Raises as ``check_model`` does."""
        ...

    def cluster(self) -> ClusterRow: ...

    async def metrics(self) -> Iterable[Point]:
        """What is counted here, and what replicas and the autoscaler report."""
        ...

    def refuse_unread(self, request_id: str, error: str) -> None:
        """Count and log a call that a front end has refused, for an ``error`` of that type."""
        ...

    async def explain(self, request_id: str) -> Explanation:
        """What is known of a request's placement, from whichever gateway has it. Raises NotFound when nothing is kept,
        and Unavailable when another gateway, which may have something, does not answer.
        """
        ...

    def recent_routes(self, limit: int) -> Sequence[RouteRecord]:
        """The last routing decisions of all requests, newest first, at most ``limit``."""
        ...

    def events(self, limit: int) -> Sequence[Event]:
        """The last events, oldest first, at most ``limit``."""
        ...

    def deployment(self) -> DeploymentRow | None:
        """What Serve reports about the replicas; None while it reports nothing."""
        ...

    async def block_map(self, replica_id: str) -> BlockMap:
        """A replica's block pool as it is now. Raises NotFound, or Unavailable when the replica does not answer."""
        ...

    async def replica_past(self, replica_id: str) -> Sequence[PastSample]:
        """What a replica remembers of its past, oldest first. Raises as ``block_map`` does."""
        ...

    def scaling(self) -> ScalingRow:
        """The autoscaler's settings and last decisions."""
        ...

    async def tune(self, changes: Mapping[str, float], *, reset: bool) -> ScalingRow:
        """Change the autoscaler's settings in place; with ``reset``, first go back to the deployment's."""
        ...

    def check_admin(self, key: str | None) -> None:
        """Raise PermissionDenied unless ``key`` is the admin key."""
        ...

    async def drain(self, replica_id: str) -> None:
        """Let a replica finish its requests and be replaced. Raises as ``block_map`` does."""
        ...

    def knows_call(self, request_id: str) -> bool:
        """Whether a request with that id runs here or is still on record."""
        ...

    def is_ready(self) -> bool:
        """Whether a replica can take a request, or the next request would start one: deployments may scale to zero."""
        ...
