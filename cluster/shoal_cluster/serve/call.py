"""A call as the gateway sees it: what both front ends (gRPC, HTTP) hand in, and the chunks they get back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from shoal_cluster.chat.answer_reader import CallPiece
from shoal_cluster.chat.message import Message
from shoal_cluster.chat.tool import ToolUse
from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.autoscaling_view import ScaleRecord
from shoal_cluster.policies.columns import Phase
from shoal_cluster.policies.routing import RouteRecord
from shoal_cluster.policies.view import ReplicaView
from shoal_cluster.serve.block_map import BlockMap
from shoal_cluster.serve.deployment_watch import DeploymentRow
from shoal_cluster.serve.explanation import Explanation
from shoal_cluster.serve.journal import Event
from shoal_cluster.serve.latency_window import LatencySummary
from shoal_cluster.serve.replica_past import PastSample
from shoal_cluster.serve.trace_context import TraceContext
from shoal_cluster.serve.view_tally import ViewQuality
from shoal_replica.chat_template import PromptEnd
from shoal_replica.errors import InvalidArgument
from shoal_replica.executor import TokenLogprobs
from shoal_replica.request import FinishReason
from shoal_replica.sampling_params import SamplingParams
from shoal_replica.stats import ReplicaStats

if TYPE_CHECKING:
    from shoal_cluster.serve.metrics.tally import Point

MAX_PROMPTS = 128  # in one completion request
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
        return len(self.text or "") + turns + tools + len(repr(self.template_options)) + bad_words


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """The served model, as it is described to clients, with its ``adapters``; or one of these, whose ``parent`` is the
    model.
    """

    name: str
    max_model_len: int
    vocab_size: int
    block_size: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    created_s: int
    parent: str = ""
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRow:
    """One replica as the gateway knows it. ``stats`` is None until its feed has delivered some; ``age_s`` is their age.
    A ``stalled`` replica gets nothing new until it makes progress. ``slowness`` is how many times as long as the
    fastest replica it takes for a prompt; ``role`` the phase of requests that it is for, "" for both.

    ``start_report`` says what its memory went to when it started.
    """

    replica_id: str
    node_id: str = ""
    stats: ReplicaStats | None = None
    age_s: float = 0.0
    num_reserved_blocks: int = 0
    connected: bool = False
    stalled: bool = False
    slowness: float = 1.0
    role: Phase = ""
    start_report: str = ""

    @classmethod
    def of(cls, view: ReplicaView, start_report: str) -> ReplicaRow:
        """From a row of the gateway's view."""
        return cls(
            replica_id=view.replica_id,
            node_id=view.node_id,
            stats=view.stats,
            age_s=view.age_s,
            num_reserved_blocks=view.num_reserved_blocks,
            connected=view.connected,
            stalled=view.stalled,
            slowness=view.slowness,
            role=view.role,
            start_report=start_report,
        )


@dataclass(frozen=True, slots=True)
class ModelRow:
    """The model, or one of its adapters: how many replicas have it, and the requests and tokens of this gateway."""

    name: str
    num_replicas: int
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRow:
    """The replicas, and this gateway's totals. ``latency`` is what its clients saw lately, ``quality`` how accurate its
    view was; ``devices`` describes those of each replica, ``models`` begins with the model itself.
    """

    model: str
    replicas: tuple[ReplicaRow, ...]
    num_requests: int = 0
    num_active: int = 0
    num_shed: int = 0
    num_failed: int = 0
    num_resumes: int = 0
    recent_ttft_s: tuple[float, ...] = field(default=())
    latency: LatencySummary | None = None
    devices: str = ""
    quality: ViewQuality = field(default_factory=ViewQuality)
    models: tuple[ModelRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """The autoscaler as the gateway knows it, at most a second old.

    Attributes:
        config: the settings in force; ``tuned`` names those that differ from the deployment's.
        current: the last decision, dated by its ``time_s``, whether or not it changed the count; None before the first.
        records: the last decisions that changed the count, oldest first.
    """

    config: ScaleConfig
    tuned: tuple[str, ...] = ()
    current: ScaleRecord | None = None
    records: tuple[ScaleRecord, ...] = ()


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

    def refuse_unread(self) -> None:
        """Count a call that a front end could not parse."""
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
