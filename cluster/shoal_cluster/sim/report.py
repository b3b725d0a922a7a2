"""The results of a run, as a plain record with deterministic JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

PERCENTILES = (50, 90, 99)


def to_json(found: Mapping[str, object]) -> str:
    """JSON with sorted keys and floats at full precision: equal runs give equal bytes."""
    return json.dumps(found, indent=2, sort_keys=True, allow_nan=False)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean, nearest-rank percentiles and maximum, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        """The distribution of ``values``; all zeros if there are none."""
        ordered = sorted(values) or [0.0]
        p50, p90, p99 = (ordered[-(-len(ordered) * p // 100) - 1] for p in PERCENTILES)
        return cls(sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class SimReport:
    """The results of a run.

    Attributes:
        goodput: share of all requests, refused ones included, that finished with the first token within the objective.
        hit_rate, predicted_hit_rate: share of the finished requests' prompt tokens that replicas found cached, and that
            gateways expected to be cached.
        host_hit_rate: share of prompt tokens that came back from host memory. A request that resumes elsewhere counts
            again.
        transfer_rate: tokens whose blocks were copied from other replicas, per prompt token.
        inter_token_s: each finished request's mean time between tokens, of those that have several.
        num_resumes: how often requests were resumed elsewhere, or held for that, because their replica crashed or
            drained for too long.
        imbalance: busy time of the busiest replica over the mean of all replicas that existed.
        utilization: busy time over lifetime, averaged over replicas.
        decisions_per_s: placement decisions per second of simulated time.
        replica_s: seconds that replicas served or drained, summed, up to the last token.
        duration_s: simulated time from the first arrival to the last token.
    """

    routing: str
    num_requests: int
    num_finished: int
    num_shed: int
    num_prompt_tokens: int
    num_output_tokens: int
    decisions_per_s: float
    num_preemptions: int
    num_resumes: int
    num_replicas_peak: int
    replica_s: float
    ttft_s: Distribution
    latency_s: Distribution
    inter_token_s: Distribution
    goodput: float
    hit_rate: float
    predicted_hit_rate: float
    host_hit_rate: float
    transfer_rate: float
    imbalance: float
    utilization: float
    duration_s: float
    output_tokens_per_s: float
    busy_s: dict[str, float]

    def to_json(self) -> str:
        """See ``to_json``."""
        return to_json(asdict(self))

    def summary(self) -> str:
        """A few lines for people to read."""
        ttft, latency, between = self.ttft_s, self.latency_s, self.inter_token_s
        from_host = f", {self.host_hit_rate:.1%} from host memory" if self.host_hit_rate else ""
        if self.transfer_rate:
            from_host += f", {self.transfer_rate:.1%} copied from other replicas"
        rows = (
            ("requests", f"{self.num_finished} finished, {self.num_shed} shed, of {self.num_requests}"),
            ("first token", f"p50 {ttft.p50:.2f} s, p90 {ttft.p90:.2f} s, p99 {ttft.p99:.2f} s"),
            ("latency", f"p50 {latency.p50:.2f} s, p90 {latency.p90:.2f} s, p99 {latency.p99:.2f} s"),
            ("inter-token", f"p50 {between.p50:.3f} s, p90 {between.p90:.3f} s, p99 {between.p99:.3f} s"),
            ("goodput", f"{self.goodput:.1%} within the objective"),
            ("hit rate", f"{self.hit_rate:.1%} ({self.predicted_hit_rate:.1%} predicted){from_host}"),
            ("imbalance", f"{self.imbalance:.3f} busiest over mean; {self.utilization:.1%} busy"),
            ("preemptions", f"{self.num_preemptions}; {self.num_resumes} times resumed elsewhere"),
            ("decisions", f"{self.decisions_per_s:.1f} a second; {self.replica_s:.0f} replica-seconds"),
            ("output", f"{self.output_tokens_per_s:.0f} tokens/s over {self.duration_s:.0f} s"),
        )
        return "\n".join(f"{name:<12} {text}" for name, text in rows)
