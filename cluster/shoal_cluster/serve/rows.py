"""What a gateway tells of itself and the cluster: the model, replicas, adapters, scaling."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.autoscaling_view import ScaleRecord
from shoal_cluster.policies.columns import Phase
from shoal_cluster.policies.replica_view import ReplicaView
from shoal_cluster.serve.latency_window import LatencySummary
from shoal_cluster.serve.view_tally import ViewQuality
from shoal_replica.stats import ReplicaStats


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
