"""Every metric: its name, type, unit, labels and the process that counts it. Code and docs are checked against this.

A metric is counted once, by its ``source``, which the second word of its name tells. Label values are enumerated here,
except for ids of running gateways and replicas and for served names: nothing that a client sends becomes a label.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shoal_cluster.serve.call_record import RequestOutcome
from shoal_cluster.serve.call_times import HANDOVER_REASONS
from shoal_replica.request import FinishReason


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Source(StrEnum):
    """The process that counts a metric."""

    GATEWAY = "gateway"
    REPLICA = "replica"
    AUTOSCALER = "autoscaler"


class DecisionReason(StrEnum):
    """Why a routing decision chose what it chose."""

    PREFIX = "prefix"  # no replica caches more of the prompt than the chosen one, and some cache less
    LOAD = "load"  # cached blocks did not tell the replicas apart, or were outweighed by load
    ONLY = "only"  # one replica was eligible
    UNPLACED = "unplaced"  # no replica was eligible; Serve asks again until one is


@dataclass(frozen=True, slots=True)
class Label:
    """``values`` are all that it can have; None for an id, which has one value per running process, and for names."""

    name: str
    values: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """One metric. ``unit`` is what a value counts; ``buckets`` are a histogram's upper bounds."""

    name: str
    kind: Kind
    unit: str
    source: Source
    help: str
    labels: tuple[Label, ...]
    buckets: tuple[float, ...] = ()


GATEWAY_ID = Label("gateway_id")
REPLICA_ID = Label("replica_id")
MODEL = Label("model")
TOKEN_KINDS = ("prompt", "cached", "output")
DEVICE, HOST = TIERS = ("device", "host")
TIER = Label("tier", TIERS)
STATE = Label("state", ("running", "cached", "empty"))

WAIT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 60.0)
AGE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
STEP_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0),
)


def _gateway(name: str, kind: Kind, unit: str, words: str, *labels: Label, buckets: tuple[float, ...] = ()) -> Family:
    return Family(
        name=f"shoal_gateway_{name}",
        kind=kind,
        unit=unit,
        source=Source.GATEWAY,
        help=words,
        labels=(GATEWAY_ID, *labels),
        buckets=buckets,
    )


def _replica(name: str, kind: Kind, unit: str, words: str, *labels: Label, buckets: tuple[float, ...] = ()) -> Family:
    return Family(
        name=f"shoal_replica_{name}",
        kind=kind,
        unit=unit,
        source=Source.REPLICA,
        help=words,
        labels=(REPLICA_ID, *labels),
        buckets=buckets,
    )


def _autoscaler(name: str, kind: Kind, unit: str, words: str, *labels: Label) -> Family:
    return Family(
        name=f"shoal_autoscaler_{name}",
        kind=kind,
        unit=unit,
        source=Source.AUTOSCALER,
        help=words,
        labels=labels,
    )


_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

REQUESTS = _gateway(
    "requests_total", _C, "requests", "Requests that have ended", Label("outcome", tuple(RequestOutcome))
)
SEQUENCES = _gateway(
    "sequences_total", _C, "sequences", "Sequences finished", Label("reason", (FinishReason.STOP, FinishReason.LENGTH))
)
MODEL_REQUESTS = _gateway(
    "model_requests_total",
    _C,
    "requests",
    "Valid requests that have ended, by the model or adapter asked for",
    MODEL,
)
MODEL_TOKENS = _gateway(
    "model_tokens_total",
    _C,
    "tokens",
    "Their tokens: in prompts, in prompts and found cached, and generated",
    MODEL,
    Label("kind", TOKEN_KINDS),
)
WITHIN_OBJECTIVE = _gateway(
    "requests_within_objective_total", _C, "requests", "Finished requests that met the latency objective"
)
ACTIVE = _gateway("requests_active", _G, "requests", "Requests in progress")
RESUMES = _gateway("resumes_total", _C, "streams", "Streams resumed on another replica")
HANDOVERS = _gateway(
    "handovers_total",
    _C,
    "placements",
    "Placements handed over to another replica with their blocks: the prompt was computed, or the replica drained",
    Label("reason", HANDOVER_REASONS),
)
STALLS = _gateway(
    "stalls_total",
    _C,
    "stalls",
    "Times that a replica fell silent or its step did not end, so that its waiting requests were recalled",
)
REQUEST_TIME = _gateway(
    "request_seconds", _H, "seconds", "Time from arrival to end, of finished requests", buckets=REQUEST_BUCKETS
)
TTFT = _gateway(
    "time_to_first_token_seconds",
    _H,
    "seconds",
    "Time from a request's arrival to its first token",
    buckets=WAIT_BUCKETS,
)
INTER_TOKEN = _gateway(
    "inter_token_seconds", _H, "seconds", "Time between tokens of a sequence, once per token", buckets=STEP_BUCKETS
)
PLACEMENT = _gateway(
    "placement_seconds",
    _H,
    "seconds",
    "Time from arrival until the request went to the replica that took it",
    buckets=WAIT_BUCKETS,
)
DECISIONS = _gateway(
    "routing_decisions_total", _C, "decisions", "Routing decisions", Label("reason", tuple(DecisionReason))
)
VIEW_AGE = _gateway(
    "view_age_seconds", _H, "seconds", "Age of the chosen replica's stats when it was chosen", buckets=AGE_BUCKETS
)
PLACED_TOKENS = _gateway(
    "placed_prompt_tokens_total", _C, "tokens", "Prompt tokens of requests whose first token has come"
)
PREDICTED_TOKENS = _gateway(
    "predicted_cached_tokens_total", _C, "tokens", "Those tokens predicted to be cached when the replica was chosen"
)
FOUND_TOKENS = _gateway(
    "found_cached_tokens_total", _C, "tokens", "Those tokens that the replica found cached, in whole blocks"
)
INDEX_ENTRIES = _gateway("index_entries", _G, "blocks", "Cached blocks that the prefix index knows a holder of")
INDEX_EVICTED = _gateway(
    "index_evicted_total",
    _C,
    "blocks",
    "Blocks that the prefix index forgot for lack of room; this only loses predicted hits",
)
CONNECTED = _gateway("feed_connected", _G, "0 or 1", "1 when the replica's feed is open", REPLICA_ID)
SLOWNESS = _gateway(
    "replica_slowness",
    _G,
    "ratio",
    "How many times longer than the fastest replica a prompt takes, by full steps; 1 if none was measured lately",
    REPLICA_ID,
)
STALLED = _gateway(
    "replica_stalled",
    _G,
    "0 or 1",
    "1 while the replica is sent no new requests because it makes no progress",
    REPLICA_ID,
)
FEED_AGE = _gateway("feed_age_seconds", _G, "seconds", "Age of the replica's stats at the gateway", REPLICA_ID)
RESERVED = _gateway(
    "reserved_blocks", _G, "blocks", "KV blocks promised to requests that the replica does not count yet", REPLICA_ID
)
GATEWAY_MEMORY = _gateway("resident_bytes", _G, "bytes", "Resident memory of the gateway")

BLOCKS = _replica("blocks", _G, "blocks", "KV blocks by state; those of a tier add up to it", STATE, TIER)
MOVED_BLOCKS = _replica(
    "moved_blocks_total",
    _C,
    "blocks",
    "Blocks moved out to host memory, and in again",
    Label("direction", ("out", "in")),
)
TRANSFERRED_BLOCKS = _replica(
    "transferred_blocks_total",
    _C,
    "blocks",
    "Cached blocks copied to other replicas, and from them",
    Label("direction", ("out", "in")),
)
SEQUENCES_NOW = _replica(
    "sequences", _G, "sequences", "Sequences in the engine", Label("state", ("running", "waiting"))
)
WAITING_TOKENS = _replica("waiting_tokens", _G, "tokens", "Prompt tokens that no step has computed yet")
DRAINING = _replica("draining", _G, "0 or 1", "1 when it takes no new requests")
STEPS = _replica("steps_total", _C, "steps", "Steps run")
PROMPT_TOKENS = _replica("prompt_tokens_total", _C, "tokens", "Prompt tokens of requests that have started")
CACHED_TOKENS = _replica("cached_tokens_total", _C, "tokens", "Prompt tokens found in the prefix cache", TIER)
GENERATED_TOKENS = _replica("generated_tokens_total", _C, "tokens", "Tokens generated")
DRAFT_TOKENS = _replica("draft_tokens_total", _C, "tokens", "Draft tokens computed")
ACCEPTED_TOKENS = _replica("accepted_tokens_total", _C, "tokens", "Draft tokens that were right")
FINISHED = _replica("requests_total", _C, "requests", "Requests that have ended")
PREEMPTIONS = _replica(
    "preemptions_total",
    _C,
    "sequences",
    "Sequences preempted: their blocks were taken, to be found cached or recomputed",
)
REFUSALS = _replica("refusals_total", _C, "requests", "Requests refused because too many wait")
STEP_TIME = _replica("step_seconds", _H, "seconds", "Length of a step", buckets=STEP_BUCKETS)
QUEUE_TIME = _replica(
    "queue_seconds",
    _H,
    "seconds",
    "Time from a request's arrival at the replica to its first step",
    buckets=WAIT_BUCKETS,
)
PREFILL_TIME = _replica(
    "prefill_seconds", _H, "seconds", "Time from a request's first step to its first token", buckets=WAIT_BUCKETS
)
REPLICA_MEMORY = _replica(
    "memory_bytes",
    _G,
    "bytes",
    "Memory: resident in all, and planned for weights and KV blocks",
    Label("kind", ("resident", "weights", "kv_blocks")),
)

DESIRED = _autoscaler("desired_replicas", _G, "replicas", "Replicas the autoscaler asks for")
RUNNING = _autoscaler("running_replicas", _G, "replicas", "Running replicas")
SCALINGS = _autoscaler(
    "decisions_total", _C, "decisions", "Changes of the desired count", Label("direction", ("up", "down"))
)

BY_VIEW = (PLACED_TOKENS, PREDICTED_TOKENS, FOUND_TOKENS, INDEX_EVICTED)  # counted by a gateway's view, not its tally
BY_MODEL = (MODEL_REQUESTS, MODEL_TOKENS)

FAMILIES: tuple[Family, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Family))
