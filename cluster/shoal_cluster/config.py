"""The cluster's configuration, as given under ``args`` in the Serve YAML. Unknown keys are errors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, NonNegativeFloat, ValidationError, model_validator

from shoal_cluster.gateway_settings import GatewaySettings
from shoal_cluster.policies.autoscaling_config import LIMITS, ScaleConfig, Schedule
from shoal_cluster.settings import Settings
from shoal_replica.adapter import NAME_PATTERN
from shoal_replica.config import DEFAULT_BLOCK_SIZES, MAX_THREADS, ParallelConfig, SchedulerConfig
from shoal_replica.errors import ConfigError, shown
from shoal_replica.sampling_defaults import sampling_defaults

GIB = 2**30


def _feed_host(value: str) -> str:
    if value in ("", "0.0.0.0", "::"):
        raise ValueError(f"got {value!r}; must be an address that gateways can dial, or 'node' for the node's own")
    return value


AdapterName = Annotated[str, Field(pattern=NAME_PATTERN)]


def _absolute(value: str) -> str:
    """A folder by its whole path: other processes run in other folders, and would take it for a hub id."""
    try:
        folder = Path(value).expanduser()
    except RuntimeError as error:  # no such user
        raise ValueError(f"got {value!r}; {error}") from None
    return str(folder.resolve()) if folder.is_dir() else value


MAX_ADAPTERS = 4096
MAX_MODEL_NAME = 256  # characters: any file's name is shorter
AdapterSource = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_absolute)]
FeedHost = Annotated[str, AfterValidator(_feed_host)]


class ReplicaSettings(Settings):
    """Settings of a replica: its engine, and the resources that it takes on a node."""

    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="type of weights, activations and KV; `auto`: the checkpoint's, on NPUs bfloat16"
    )
    quantization: Literal["none", "int8", "int4", "w8a8", "w4a8"] = Field(
        "none", description="rounds weights when they are loaded; `a8`: also activations, to 8 bits, for faster prompts"
    )
    max_model_len: int | None = Field(None, ge=1, description="maximum prompt + answer tokens. Default: the model's")
    block_size: int = Field(DEFAULT_BLOCK_SIZES["cpu"], ge=1, description="tokens per KV block; on NPUs 128")
    num_blocks: int | None = Field(
        None,
        ge=1,
        description="KV blocks. Default: on CPUs room for max_num_seqs sequences of 1 024 tokens, or for one of full "
        "length if that is more, within free memory; on NPUs all free memory",
    )
    enable_prefix_caching: bool = Field(True, description="reuse KV blocks of prompts that begin alike")
    kv_transfer: bool = Field(
        True, description="copy cached blocks from another replica where that is faster than recomputing them"
    )
    num_host_blocks: int = Field(0, ge=0, description="KV blocks in host memory for prefixes evicted from the device")
    max_num_seqs: int = Field(64, ge=1, description="maximum sequences running at once")
    max_num_batched_tokens: int = Field(
        512, ge=1, description="maximum tokens per step, of prompts and answers together"
    )
    max_num_waiting: int = Field(
        1024, ge=1, description="requests that may wait per replica, there and at the gateways"
    )
    policy: Literal["fcfs", "priority", "deadline"] = Field(
        "deadline",
        description="queue order: `deadline` = priority, then due date; `priority` = priority, then arrival; "
        "`fcfs` = arrival only",
    )
    num_speculative_tokens: int | None = Field(
        None,
        ge=0,
        le=64,
        description="maximum draft tokens per sequence and step; 0 for none. Default: 8 on CPUs, 0 on NPUs",
    )
    device: Literal["cpu", "npu"] = Field("cpu", description="device that computes")
    graph_sizes: tuple[int, ...] | None = Field(
        None, description="batch sizes for which an NPU keeps decode graphs; [] for none. Default: by max_num_seqs"
    )
    device_memory_gib: float | None = Field(
        None, gt=0, description="NPU memory that a rank may use. Default: what the device reports as free"
    )
    num_threads: int = Field(1, ge=1, le=MAX_THREADS, description="CPU threads per rank")
    tensor_parallel_size: int = Field(1, ge=1, le=64, description="ranks that share each layer")
    pipeline_parallel_size: int = Field(
        1, ge=1, le=64, description="stages of whole layers, each of tensor_parallel_size ranks"
    )
    rank_timeout_s: float = Field(
        3.5, ge=1, description="seconds without a sign of life or progress after which a rank counts as hung"
    )
    placement_strategy: Literal["STRICT_PACK", "PACK"] = Field(
        "STRICT_PACK", description="all ranks on one node, or on several if need be"
    )
    num_cpus: float = Field(1.0, ge=0, description="CPUs reserved in Ray per rank")
    engine_num_cpus: float = Field(
        0.5, ge=0, description="CPUs reserved in Ray for the engine's own process, where there are several ranks"
    )
    resources: dict[str, NonNegativeFloat] = Field(
        default_factory=dict, description="additional Ray resources per replica"
    )
    max_replicas_per_node: int | None = Field(
        None, ge=1, le=100, description="maximum replicas per node, of one rank each. Default: as many as fit"
    )
    feed_host: FeedHost = Field(
        "127.0.0.1", description="address at which gateways reach this replica; `node`: the node's own"
    )
    drain_timeout_s: float = Field(60.0, gt=0, description="seconds that answers may continue on a draining replica")

    def scheduler_config(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_waiting=self.max_num_waiting,
            policy=self.policy,
            num_speculative_tokens=self.num_speculative_tokens,
        )

    @property
    def devices(self) -> str:
        """The devices that compute, in words."""
        ranks = f"{self.num_ranks} × " if self.num_ranks > 1 else ""
        if self.device == "npu":
            return f"{ranks}npu"
        return f"{ranks}{self.device} × {self.num_threads} thread{'s' if self.num_threads > 1 else ''}"

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def max_ongoing(self) -> int:
        """Requests that a replica takes: those that run and those that wait there."""
        return self.max_num_seqs + self.max_num_waiting

    def parallel_config(self) -> ParallelConfig:
        return ParallelConfig(
            device=self.device,
            num_threads=self.num_threads,
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            rank_timeout_s=self.rank_timeout_s,
            is_one_host=self.placement_strategy == "STRICT_PACK" or self.num_ranks == 1,
            graph_sizes=self.graph_sizes,
            device_memory_bytes=None if self.device_memory_gib is None else int(self.device_memory_gib * GIB),
        )

    @model_validator(mode="before")
    @classmethod
    def _block_size_of_device(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "block_size" in data or data.get("device") not in DEFAULT_BLOCK_SIZES:
            return data
        return data | {"block_size": DEFAULT_BLOCK_SIZES[data["device"]]}

    @model_validator(mode="after")
    def _placeable(self) -> Self:
        if self.num_ranks > 1 and self.max_replicas_per_node is not None:
            raise ValueError(
                f"max_replicas_per_node ({self.max_replicas_per_node}) is for replicas of one rank; Ray places the "
                f"{self.num_ranks} ranks as a group, by their resources"
            )
        return self


class ScheduleSettings(Settings):
    """A scheduled minimum of replicas; see policies.autoscaling_config.Schedule."""

    cron: str
    duration_s: float
    min_replicas: int
    timezone: str = "UTC"


class ScalingSettings(Settings):
    """Bounds of the number of replicas, and when to scale within them; see policies.autoscaling_config.ScaleConfig."""

    min_replicas: int = Field(1, description="minimum replicas; 0 allows scaling to zero when idle")
    max_replicas: int = Field(1, description="maximum replicas; above the minimum, the count follows the load")
    target_utilization: float = Field(0.7, description="share of blocks, slots and compute that the load may take")
    burst_window_s: float = Field(5.0, description="seconds over which bursts of arrivals are averaged; 1 to 60")
    downscale_delay_s: float = Field(300.0, description="seconds that a lower count must suffice before scaling down")
    headroom: float = Field(
        5.0,
        description="spare replicas for a jump in load, as a multiple of the square root of the replicas that the load "
        "fills",
    )
    burst_memory_s: float = Field(3600.0, description="seconds to stay ready for the return of a past peak")
    schedules: tuple[ScheduleSettings, ...] = Field(
        (), description='minimums at set times; see "Scaling" in deploy/README.md'
    )


class ObjectiveSettings(Settings):
    """The latency objective. A request meets it if it meets both times. For the order of the queue and for
    ``shed_late``, a first token is due later by twice the request's own prefill time, since long prompts take longer.
    """

    ttft_s: float = Field(
        2.0,
        ge=LIMITS["ttft_objective_s"][0],
        le=LIMITS["ttft_objective_s"][1],
        description="seconds from a request's arrival to its first token; in the queue, plus twice its own prefill",
    )
    inter_token_s: float = Field(0.2, gt=0, description="mean seconds between a sequence's tokens")


class LogSettings(Settings):
    """Settings of the log that gateways and replicas write to standard error: a line per request, and errors."""

    format: Literal["json", "text"] = Field("json", description="format of the lines on standard error")
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="minimum level")


class TraceSettings(Settings):
    """OpenTelemetry tracing. Without an endpoint nothing is traced, at no cost."""

    otlp_endpoint: str | None = Field(
        None, pattern=r"https?://\S+", description="OTLP/HTTP collector, e.g. http://collector:4318. Default: no traces"
    )
    sampled_share: float = Field(
        1.0, ge=0, le=1, description="share of requests traced, where the caller has not decided"
    )


class ClusterConfig(Settings):
    """Everything under ``args``."""

    model: str = Field(min_length=1, description="Hugging Face folder, hub id, or the demo model's name")
    served_model_name: str | None = Field(
        None, max_length=MAX_MODEL_NAME, description="name clients use. Default: last part of the model's path"
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="source of defaults for sampling parameters that a request omits: the checkpoint's (`auto`) or "
        "OpenAI's (`none`)",
    )
    adapters: dict[AdapterName, AdapterSource] = Field(
        default_factory=dict,
        max_length=MAX_ADAPTERS,
        description="LoRA adapters: names that clients use, each with a folder or hub id",
    )
    replica: ReplicaSettings = ReplicaSettings()
    scaling: ScalingSettings = ScalingSettings()
    gateway: GatewaySettings = GatewaySettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    logs: LogSettings = LogSettings()
    traces: TraceSettings = TraceSettings()

    @classmethod
    def from_args(cls, args: dict[str, Any]) -> ClusterConfig:
        """Validate ``args``. Raises ConfigError: one line that names each wrong key, its value and the limit."""
        try:
            config = cls.model_validate(args)
        except ValidationError as error:
            raise ConfigError("; ".join(error_line(e) for e in error.errors())) from None
        for section, check in (("replica", config.replica.scheduler_config), ("scaling", config.scale_config)):
            try:
                check()
            except ConfigError as error:
                raise ConfigError(f"{section}.{error}") from None
        return config

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        if self.name in self.adapters:
            raise ValueError(f"adapters has {self.name!r}, which is the name of the model itself")
        return self

    def scale_config(self) -> ScaleConfig:
        """The settings for the autoscaler. Raises ConfigError: a value is outside its limits.

        A schedule above ``max_replicas`` is refused only here: a maximum that is lowered at run time caps it.
        """
        fields = self.scaling.model_dump(exclude={"schedules"})
        schedules = tuple(Schedule(**s.model_dump()) for s in self.scaling.schedules)
        config = ScaleConfig(ttft_objective_s=self.objective.ttft_s, schedules=schedules, **fields)
        most, scheduled = config.max_replicas, max((s.min_replicas for s in schedules), default=0)
        if scheduled > most:
            raise ConfigError(f"schedules: got min_replicas {scheduled}; must be at most max_replicas ({most})")
        return config

    def sampling_defaults(self, folder: Path) -> dict[str, Any]:
        """Of requests to the model in ``folder``. Raises ConfigError for a file with values out of their limits."""
        return sampling_defaults(folder) if self.generation_config == "auto" else {}

    def with_scaling(self, changes: dict[str, Any]) -> ClusterConfig:
        """A copy with some keys of ``scaling`` changed. Raises ConfigError as ``from_args`` does."""
        return ClusterConfig.from_args(self.model_dump() | {"scaling": self.scaling.model_dump() | changes})

    @property
    def name(self) -> str:
        """The name that clients use for the model: ``served_model_name``, else the last part of the model's path."""
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]


def error_line(error: Any, *section: str) -> str:
    """One of pydantic's errors, in that section: the key, what was given, and what is allowed."""
    key = ".".join(str(part) for part in (*section, *error["loc"])) or "args"
    if error["type"] == "extra_forbidden":
        return f"{key}: unknown key"
    if error["type"] == "missing":
        return f"{key}: required"
    if error["type"] == "value_error":  # our own message, which includes the value
        return f"{key}: {error['ctx']['error']}"
    told = "a secret" if {"api_keys", "admin_key"} & {*error["loc"]} else shown(error["input"])
    return f"{key}: got {told}; {error['msg'][0].lower()}{error['msg'][1:]}"
