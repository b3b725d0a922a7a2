from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListReplicasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Cluster(_message.Message):
    __slots__ = ("model", "replicas", "blocks", "num_requests", "num_active", "num_shed", "num_failed", "num_resumes", "recent_ttft_s", "quality", "models")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    NUM_SHED_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    NUM_RESUMES_FIELD_NUMBER: _ClassVar[int]
    RECENT_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    QUALITY_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    model: str
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    blocks: BlockLedger
    num_requests: int
    num_active: int
    num_shed: int
    num_failed: int
    num_resumes: int
    recent_ttft_s: _containers.RepeatedScalarFieldContainer[float]
    quality: ViewQuality
    models: _containers.RepeatedCompositeFieldContainer[ModelUse]
    def __init__(self, model: _Optional[str] = ..., replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ..., blocks: _Optional[_Union[BlockLedger, _Mapping]] = ..., num_requests: _Optional[int] = ..., num_active: _Optional[int] = ..., num_shed: _Optional[int] = ..., num_failed: _Optional[int] = ..., num_resumes: _Optional[int] = ..., recent_ttft_s: _Optional[_Iterable[float]] = ..., quality: _Optional[_Union[ViewQuality, _Mapping]] = ..., models: _Optional[_Iterable[_Union[ModelUse, _Mapping]]] = ...) -> None: ...

class ModelUse(_message.Message):
    __slots__ = ("name", "num_replicas", "num_requests", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_replicas: int
    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    def __init__(self, name: _Optional[str] = ..., num_replicas: _Optional[int] = ..., num_requests: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ...) -> None: ...

class ViewQuality(_message.Message):
    __slots__ = ("num_requests", "num_prompt_tokens", "num_predicted_tokens", "num_cached_tokens", "age_p50_s", "age_p99_s")
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREDICTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_P50_S_FIELD_NUMBER: _ClassVar[int]
    AGE_P99_S_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    num_prompt_tokens: int
    num_predicted_tokens: int
    num_cached_tokens: int
    age_p50_s: float
    age_p99_s: float
    def __init__(self, num_requests: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_predicted_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., age_p50_s: _Optional[float] = ..., age_p99_s: _Optional[float] = ...) -> None: ...

class BlockLedger(_message.Message):
    __slots__ = ("num_allocated_blocks", "num_cached_blocks", "num_free_blocks", "num_total_blocks", "utilization")
    NUM_ALLOCATED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    num_allocated_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_total_blocks: int
    utilization: float
    def __init__(self, num_allocated_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_total_blocks: _Optional[int] = ..., utilization: _Optional[float] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("replica_id", "node_id", "stats", "age_s", "num_reserved_blocks", "connected", "start_report", "stalled", "slowness", "role")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    START_REPORT_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    SLOWNESS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    node_id: str
    stats: ReplicaStats
    age_s: float
    num_reserved_blocks: int
    connected: bool
    start_report: str
    stalled: bool
    slowness: float
    role: str
    def __init__(self, replica_id: _Optional[str] = ..., node_id: _Optional[str] = ..., stats: _Optional[_Union[ReplicaStats, _Mapping]] = ..., age_s: _Optional[float] = ..., num_reserved_blocks: _Optional[int] = ..., connected: _Optional[bool] = ..., start_report: _Optional[str] = ..., stalled: _Optional[bool] = ..., slowness: _Optional[float] = ..., role: _Optional[str] = ...) -> None: ...

class ReplicaStats(_message.Message):
    __slots__ = ("time_s", "block_size", "blocks", "num_running", "num_waiting", "num_waiting_tokens", "max_num_seqs", "max_num_batched_tokens", "step_s", "num_steps", "num_prompt_tokens", "num_cached_tokens", "num_generated_tokens", "num_finished", "num_preemptions", "num_refused", "draining", "busy_s", "token_s", "due_tokens", "num_host_blocks", "num_host_cached_blocks", "num_host_cached_tokens", "num_blocks_out", "num_blocks_in", "full_token_s", "by_due", "num_draft_tokens", "num_accepted_tokens", "num_blocks_given", "num_blocks_taken")
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    DUE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_OUT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_IN_FIELD_NUMBER: _ClassVar[int]
    FULL_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    BY_DUE_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_GIVEN_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_TAKEN_FIELD_NUMBER: _ClassVar[int]
    time_s: float
    block_size: int
    blocks: BlockLedger
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    step_s: float
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_finished: int
    num_preemptions: int
    num_refused: int
    draining: bool
    busy_s: float
    token_s: float
    due_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_host_blocks: int
    num_host_cached_blocks: int
    num_host_cached_tokens: int
    num_blocks_out: int
    num_blocks_in: int
    full_token_s: float
    by_due: bool
    num_draft_tokens: int
    num_accepted_tokens: int
    num_blocks_given: int
    num_blocks_taken: int
    def __init__(self, time_s: _Optional[float] = ..., block_size: _Optional[int] = ..., blocks: _Optional[_Union[BlockLedger, _Mapping]] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_waiting_tokens: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., step_s: _Optional[float] = ..., num_steps: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_generated_tokens: _Optional[int] = ..., num_finished: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_refused: _Optional[int] = ..., draining: _Optional[bool] = ..., busy_s: _Optional[float] = ..., token_s: _Optional[float] = ..., due_tokens: _Optional[_Iterable[int]] = ..., num_host_blocks: _Optional[int] = ..., num_host_cached_blocks: _Optional[int] = ..., num_host_cached_tokens: _Optional[int] = ..., num_blocks_out: _Optional[int] = ..., num_blocks_in: _Optional[int] = ..., full_token_s: _Optional[float] = ..., by_due: _Optional[bool] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_blocks_given: _Optional[int] = ..., num_blocks_taken: _Optional[int] = ...) -> None: ...

class ExplainRouteRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainRouteResponse(_message.Message):
    __slots__ = ("records", "looks", "held", "refusals", "num_left_off")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    LOOKS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEFT_OFF_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[RouteRecord]
    looks: _containers.RepeatedCompositeFieldContainer[Look]
    held: _containers.RepeatedCompositeFieldContainer[Held]
    refusals: _containers.RepeatedCompositeFieldContainer[Refusal]
    num_left_off: int
    def __init__(self, records: _Optional[_Iterable[_Union[RouteRecord, _Mapping]]] = ..., looks: _Optional[_Iterable[_Union[Look, _Mapping]]] = ..., held: _Optional[_Iterable[_Union[Held, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ..., num_left_off: _Optional[int] = ...) -> None: ...

class QueuePlace(_message.Message):
    __slots__ = ("request_id", "replica_id", "due_in_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    DUE_IN_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    replica_id: str
    due_in_s: float
    def __init__(self, request_id: _Optional[str] = ..., replica_id: _Optional[str] = ..., due_in_s: _Optional[float] = ...) -> None: ...

class Look(_message.Message):
    __slots__ = ("request_id", "queue")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    queue: _containers.RepeatedCompositeFieldContainer[QueuePlace]
    def __init__(self, request_id: _Optional[str] = ..., queue: _Optional[_Iterable[_Union[QueuePlace, _Mapping]]] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("time_s", "request_id", "waited_s", "number", "num_held", "queue")
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    time_s: float
    request_id: str
    waited_s: float
    number: int
    num_held: int
    queue: _containers.RepeatedCompositeFieldContainer[QueuePlace]
    def __init__(self, time_s: _Optional[float] = ..., request_id: _Optional[str] = ..., waited_s: _Optional[float] = ..., number: _Optional[int] = ..., num_held: _Optional[int] = ..., queue: _Optional[_Iterable[_Union[QueuePlace, _Mapping]]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("time_s", "request_id", "reason", "retry_after_s", "terms", "record")
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    time_s: float
    request_id: str
    reason: str
    retry_after_s: float
    terms: _containers.RepeatedCompositeFieldContainer[Term]
    record: AdmissionRecord
    def __init__(self, time_s: _Optional[float] = ..., request_id: _Optional[str] = ..., reason: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., terms: _Optional[_Iterable[_Union[Term, _Mapping]]] = ..., record: _Optional[_Union[AdmissionRecord, _Mapping]] = ...) -> None: ...

class AdmissionRecord(_message.Message):
    __slots__ = ("query", "replicas", "max_waiting_tokens", "max_waiting_requests", "objective", "num_held_tokens", "num_held", "waited_s", "admitted", "reason", "retry_after_s", "never_fits", "deadline_in_s", "never_in_time", "pair_s", "num_refused_tokens", "was_last")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVE_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    NEVER_FITS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_IN_S_FIELD_NUMBER: _ClassVar[int]
    NEVER_IN_TIME_FIELD_NUMBER: _ClassVar[int]
    PAIR_S_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAS_LAST_FIELD_NUMBER: _ClassVar[int]
    query: RouteQuery
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaView]
    max_waiting_tokens: int
    max_waiting_requests: int
    objective: LatencyObjective
    num_held_tokens: float
    num_held: int
    waited_s: float
    admitted: bool
    reason: str
    retry_after_s: float
    never_fits: bool
    deadline_in_s: float
    never_in_time: bool
    pair_s: float
    num_refused_tokens: float
    was_last: bool
    def __init__(self, query: _Optional[_Union[RouteQuery, _Mapping]] = ..., replicas: _Optional[_Iterable[_Union[ReplicaView, _Mapping]]] = ..., max_waiting_tokens: _Optional[int] = ..., max_waiting_requests: _Optional[int] = ..., objective: _Optional[_Union[LatencyObjective, _Mapping]] = ..., num_held_tokens: _Optional[float] = ..., num_held: _Optional[int] = ..., waited_s: _Optional[float] = ..., admitted: _Optional[bool] = ..., reason: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., never_fits: _Optional[bool] = ..., deadline_in_s: _Optional[float] = ..., never_in_time: _Optional[bool] = ..., pair_s: _Optional[float] = ..., num_refused_tokens: _Optional[float] = ..., was_last: _Optional[bool] = ...) -> None: ...

class LatencyObjective(_message.Message):
    __slots__ = ("ttft_s", "prefill_factor")
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FACTOR_FIELD_NUMBER: _ClassVar[int]
    ttft_s: float
    prefill_factor: float
    def __init__(self, ttft_s: _Optional[float] = ..., prefill_factor: _Optional[float] = ...) -> None: ...

class RouteRecord(_message.Message):
    __slots__ = ("time_s", "query", "replicas", "weights", "seed", "decision", "rule")
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    time_s: float
    query: RouteQuery
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaView]
    weights: RouteWeights
    seed: int
    decision: RouteDecision
    rule: NamedRule
    def __init__(self, time_s: _Optional[float] = ..., query: _Optional[_Union[RouteQuery, _Mapping]] = ..., replicas: _Optional[_Iterable[_Union[ReplicaView, _Mapping]]] = ..., weights: _Optional[_Union[RouteWeights, _Mapping]] = ..., seed: _Optional[int] = ..., decision: _Optional[_Union[RouteDecision, _Mapping]] = ..., rule: _Optional[_Union[NamedRule, _Mapping]] = ...) -> None: ...

class NamedRule(_message.Message):
    __slots__ = ("routing", "turn", "num_sent_blocks", "num_remembered_blocks")
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    NUM_SENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_REMEMBERED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    routing: str
    turn: int
    num_sent_blocks: _containers.RepeatedScalarFieldContainer[int]
    num_remembered_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, routing: _Optional[str] = ..., turn: _Optional[int] = ..., num_sent_blocks: _Optional[_Iterable[int]] = ..., num_remembered_blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class RouteQuery(_message.Message):
    __slots__ = ("request_id", "block_hashes", "num_prompt_tokens", "num_blocks_needed", "block_size", "excluded", "decode_steps", "passed", "num_known_blocks", "num_alike", "num_holders", "phase", "patience_tokens")
    class PassedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_NEEDED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_ALIKE_FIELD_NUMBER: _ClassVar[int]
    NUM_HOLDERS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    num_prompt_tokens: int
    num_blocks_needed: int
    block_size: int
    excluded: _containers.RepeatedScalarFieldContainer[str]
    decode_steps: int
    passed: _containers.ScalarMap[str, int]
    num_known_blocks: int
    num_alike: int
    num_holders: int
    phase: str
    patience_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., num_prompt_tokens: _Optional[int] = ..., num_blocks_needed: _Optional[int] = ..., block_size: _Optional[int] = ..., excluded: _Optional[_Iterable[str]] = ..., decode_steps: _Optional[int] = ..., passed: _Optional[_Mapping[str, int]] = ..., num_known_blocks: _Optional[int] = ..., num_alike: _Optional[int] = ..., num_holders: _Optional[int] = ..., phase: _Optional[str] = ..., patience_tokens: _Optional[int] = ...) -> None: ...

class ReplicaView(_message.Message):
    __slots__ = ("replica_id", "node_id", "stats", "age_s", "connected", "num_reserved", "num_reserved_blocks", "num_reserved_tokens", "num_matched_blocks", "stalled", "slowness", "role")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    NUM_RESERVED_FIELD_NUMBER: _ClassVar[int]
    NUM_RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESERVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_MATCHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    SLOWNESS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    node_id: str
    stats: ReplicaStats
    age_s: float
    connected: bool
    num_reserved: int
    num_reserved_blocks: int
    num_reserved_tokens: int
    num_matched_blocks: int
    stalled: bool
    slowness: float
    role: str
    def __init__(self, replica_id: _Optional[str] = ..., node_id: _Optional[str] = ..., stats: _Optional[_Union[ReplicaStats, _Mapping]] = ..., age_s: _Optional[float] = ..., connected: _Optional[bool] = ..., num_reserved: _Optional[int] = ..., num_reserved_blocks: _Optional[int] = ..., num_reserved_tokens: _Optional[int] = ..., num_matched_blocks: _Optional[int] = ..., stalled: _Optional[bool] = ..., slowness: _Optional[float] = ..., role: _Optional[str] = ...) -> None: ...

class RouteWeights(_message.Message):
    __slots__ = ("prefill_price", "decode_price")
    PREFILL_PRICE_FIELD_NUMBER: _ClassVar[int]
    DECODE_PRICE_FIELD_NUMBER: _ClassVar[int]
    prefill_price: float
    decode_price: float
    def __init__(self, prefill_price: _Optional[float] = ..., decode_price: _Optional[float] = ...) -> None: ...

class RouteDecision(_message.Message):
    __slots__ = ("ranked", "reason", "candidates")
    RANKED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    ranked: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    def __init__(self, ranked: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("replica_id", "eligible", "rejected", "score", "terms")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ELIGIBLE_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    eligible: bool
    rejected: str
    score: float
    terms: _containers.RepeatedCompositeFieldContainer[Term]
    def __init__(self, replica_id: _Optional[str] = ..., eligible: _Optional[bool] = ..., rejected: _Optional[str] = ..., score: _Optional[float] = ..., terms: _Optional[_Iterable[_Union[Term, _Mapping]]] = ...) -> None: ...

class Term(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class GetScalingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Scaling(_message.Message):
    __slots__ = ("settings", "tuned", "current", "records")
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    TUNED_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    settings: ScaleSettings
    tuned: _containers.RepeatedScalarFieldContainer[str]
    current: ScaleRecord
    records: _containers.RepeatedCompositeFieldContainer[ScaleRecord]
    def __init__(self, settings: _Optional[_Union[ScaleSettings, _Mapping]] = ..., tuned: _Optional[_Iterable[str]] = ..., current: _Optional[_Union[ScaleRecord, _Mapping]] = ..., records: _Optional[_Iterable[_Union[ScaleRecord, _Mapping]]] = ...) -> None: ...

class TuneRequest(_message.Message):
    __slots__ = ("changes", "reset")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    changes: ScaleSettings
    reset: bool
    def __init__(self, changes: _Optional[_Union[ScaleSettings, _Mapping]] = ..., reset: _Optional[bool] = ...) -> None: ...

class ScaleSettings(_message.Message):
    __slots__ = ("min_replicas", "max_replicas", "target_utilization", "ttft_objective_s", "burst_window_s", "downscale_delay_s", "headroom", "burst_memory_s")
    MIN_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MAX_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    TARGET_UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    TTFT_OBJECTIVE_S_FIELD_NUMBER: _ClassVar[int]
    BURST_WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    DOWNSCALE_DELAY_S_FIELD_NUMBER: _ClassVar[int]
    HEADROOM_FIELD_NUMBER: _ClassVar[int]
    BURST_MEMORY_S_FIELD_NUMBER: _ClassVar[int]
    min_replicas: int
    max_replicas: int
    target_utilization: float
    ttft_objective_s: float
    burst_window_s: float
    downscale_delay_s: float
    headroom: float
    burst_memory_s: float
    def __init__(self, min_replicas: _Optional[int] = ..., max_replicas: _Optional[int] = ..., target_utilization: _Optional[float] = ..., ttft_objective_s: _Optional[float] = ..., burst_window_s: _Optional[float] = ..., downscale_delay_s: _Optional[float] = ..., headroom: _Optional[float] = ..., burst_memory_s: _Optional[float] = ...) -> None: ...

class ScaleRecord(_message.Message):
    __slots__ = ("seq", "time_s", "num_before", "num_after", "num_running", "num_starting", "reason", "terms", "replicas", "settings")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    NUM_BEFORE_FIELD_NUMBER: _ClassVar[int]
    NUM_AFTER_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_STARTING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    time_s: float
    num_before: int
    num_after: int
    num_running: int
    num_starting: int
    reason: str
    terms: _containers.RepeatedCompositeFieldContainer[Term]
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaView]
    settings: ScaleSettings
    def __init__(self, seq: _Optional[int] = ..., time_s: _Optional[float] = ..., num_before: _Optional[int] = ..., num_after: _Optional[int] = ..., num_running: _Optional[int] = ..., num_starting: _Optional[int] = ..., reason: _Optional[str] = ..., terms: _Optional[_Iterable[_Union[Term, _Mapping]]] = ..., replicas: _Optional[_Iterable[_Union[ReplicaView, _Mapping]]] = ..., settings: _Optional[_Union[ScaleSettings, _Mapping]] = ...) -> None: ...
