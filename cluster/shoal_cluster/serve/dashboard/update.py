"""One update for the page: the cluster as it is now, in at most ``MAX_UPDATE_BYTES`` of JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shoal_cluster.policies.route_record import RouteRecord
from shoal_cluster.serve.block_sums import sum_blocks
from shoal_cluster.serve.dashboard.history import Sample
from shoal_cluster.serve.dashboard.meter import Rates
from shoal_cluster.serve.dashboard.roster import Card
from shoal_cluster.serve.dashboard.scaling import Scaling
from shoal_cluster.serve.dashboard.tally import RouteTally, Share, cached_blocks
from shoal_cluster.serve.journal import Event
from shoal_cluster.serve.latency_window import LatencySummary, Quantiles
from shoal_cluster.serve.rows import ClusterRow, ModelRow
from shoal_cluster.shortened import shortened

MAX_UPDATE_BYTES = 10_000
MAX_REASON_CHARS = 160
MAX_NODE_CHARS = 12
NUM_ROUTES = 8
NUM_EVENTS = 6
NUM_MARKS = 2
NUM_MODELS = 16
MAX_NAME_CHARS = 64


class Blocks(msgspec.Struct, frozen=True):
    """The block ledger: total = allocated + free; cached blocks are the free ones that still hold a prefix."""

    allocated: int
    cached: int
    reserved: int
    free: int
    total: int


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """What this gateway's clients saw in the last ``window_s`` seconds; quantiles are (p50, p95, p99) in seconds."""

    window_s: float
    ttft_s: tuple[float, float, float] | None
    inter_token_s: tuple[float, float, float] | None
    num_ttft: int
    attainment: float | None
    num_ended: int
    objective_ttft_s: float
    objective_inter_token_s: float


class Replica(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One card. It is sent as a row; the names of the columns are sent once, beside the rows.

    ``role`` is the phase of requests that the replica is for, "" for both. ``age_s`` is the age of everything else but
    ``state``; it is None before the first stats, when the numbers are 0.
    ``routed`` is the replica's share of the last decisions, ``route_hits`` the share of their prompts' full blocks that
    it had cached; both in [0, 1].
    """

    replica_id: str
    state: str
    role: str
    node_id: str
    started_s: float | None
    age_s: float | None
    blocks: tuple[int, int, int, int, int]
    num_running: int
    max_num_seqs: int
    num_waiting: int
    waiting_tokens: int
    tokens_per_s: float | None
    hit_rate: float
    step_ms: float
    routed: float
    route_hits: float


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One routing decision, in a line. ``replica_id`` is the first choice, empty if no replica could take it."""

    request_id: str
    time_s: float
    replica_id: str
    num_prompt_tokens: int
    num_cached_blocks: int
    num_prompt_blocks: int
    reason: str


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the page shows, except the past. Rates are None until they are known.

    ``models`` has a row for the model and for those adapters that are asked for most: name, replicas that have it,
    requests, and tokens of prompts, cached and generated. ``events`` and ``scaling.marks`` are the newest few, oldest
    first: a page that has missed some sees a gap in the numbers and asks for the rest.
    """

    time_s: float
    model: str
    devices: str
    requests_per_s: float | None
    tokens_per_s: float | None
    latency: Latency | None
    hit_rate: float | None
    num_running: int
    num_waiting: int
    waiting_tokens: int
    num_requests: int
    num_active: int
    num_shed: int
    num_failed: int
    num_resumes: int
    num_routed: int
    blocks: Blocks
    replica_columns: tuple[str, ...]
    replicas: tuple[Replica, ...]
    num_replicas_left_out: int
    models: tuple[tuple[str, int, int, int, int, int], ...]
    num_models_left_out: int
    routes: tuple[Route, ...]
    scaling: Scaling
    events: tuple[Event, ...]
    sample: Sample | None


def build_update(
    cluster: ClusterRow,
    cards: Sequence[Card],
    routes: Sequence[RouteRecord],
    tally: RouteTally,
    rates: Rates | None,
    hit_rate: float | None,
    scaling: Scaling,
    events: Sequence[Event],
    sample: Sample | None,
    time_s: float,
) -> Update:
    """The update at Unix time ``time_s``. Replicas in trouble come first, the others by id."""
    spoken = [row.stats for row in cluster.replicas if row.stats is not None]
    ledger = sum_blocks(cluster.replicas)
    shares = tally.shares()
    return Update(
        time_s=round(time_s, 3),
        model=cluster.model,
        devices=cluster.devices,
        requests_per_s=_rounded(rates.requests_per_s if rates is not None else None, 3),
        tokens_per_s=_rounded(rates.tokens_per_s if rates is not None else None, 1),
        latency=None if cluster.latency is None else _latency(cluster.latency),
        hit_rate=_rounded(hit_rate, 4),
        num_running=sum(stats.num_running for stats in spoken),
        num_waiting=sum(stats.num_waiting for stats in spoken),
        waiting_tokens=sum(stats.num_waiting_tokens for stats in spoken),
        num_requests=cluster.num_requests,
        num_active=cluster.num_active,
        num_shed=cluster.num_shed,
        num_failed=cluster.num_failed,
        num_resumes=cluster.num_resumes,
        num_routed=tally.num_decisions,
        blocks=Blocks(
            ledger.num_allocated_blocks,
            ledger.num_cached_blocks,
            sum(row.num_reserved_blocks for row in cluster.replicas),
            ledger.num_free_blocks,
            ledger.num_total_blocks,
        ),
        replica_columns=Replica.__struct_fields__,
        replicas=tuple(_replica(card, rates, shares.get(card.row.replica_id), tally.num_decisions) for card in cards),
        num_replicas_left_out=0,
        models=_models(cluster.models),
        num_models_left_out=max(0, len(cluster.models) - NUM_MODELS),
        routes=tuple(_route(record) for record in routes[:NUM_ROUTES]),
        scaling=scaling,
        events=tuple(events),
        sample=None if sample is None else rounded_sample(sample),
    )


def encode_update(update: Update, max_bytes: int = MAX_UPDATE_BYTES) -> bytes:
    """JSON of at most ``max_bytes``. If it would be more, the last replicas, then the oldest routes are left out."""
    body = msgspec.json.encode(update)
    while len(body) > max_bytes and (update.replicas or update.routes):
        num_kept = len(update.replicas) * max_bytes // (len(body) + 1)
        update = msgspec.structs.replace(
            update,
            replicas=update.replicas[:num_kept],
            num_replicas_left_out=update.num_replicas_left_out + len(update.replicas) - num_kept,
            routes=update.routes if update.replicas else update.routes[:-1],
        )
        body = msgspec.json.encode(update)
    return body


def rounded_sample(sample: Sample) -> Sample:
    """``sample`` without the digits that nobody sees."""
    values = {name: _rounded(getattr(sample, name), 4) for name in Sample.__struct_fields__}
    return Sample(**values)  # type: ignore[arg-type]


def _replica(card: Card, rates: Rates | None, share: Share | None, num_decisions: int) -> Replica:
    row, stats = card.row, card.row.stats
    tokens_per_s = None if rates is None else rates.tokens_per_s_of.get(row.replica_id)
    hits = share.num_cached_blocks / share.num_prompt_blocks if share is not None and share.num_prompt_blocks else 0.0
    return Replica(
        replica_id=row.replica_id,
        state=card.state,
        role=row.role,
        node_id=row.node_id[:MAX_NODE_CHARS],
        started_s=_rounded(card.started_s, 0),
        age_s=None if stats is None else round(row.age_s, 2),
        blocks=(
            (
                stats.num_allocated_blocks,
                stats.num_cached_blocks,
                row.num_reserved_blocks,
                stats.num_free_blocks,
                stats.num_total_blocks,
            )
            if stats is not None
            else (0, 0, row.num_reserved_blocks, 0, 0)
        ),
        num_running=stats.num_running if stats is not None else 0,
        max_num_seqs=stats.max_num_seqs if stats is not None else 0,
        num_waiting=stats.num_waiting if stats is not None else 0,
        waiting_tokens=stats.num_waiting_tokens if stats is not None else 0,
        tokens_per_s=_rounded(tokens_per_s, 1),
        hit_rate=round(stats.hit_rate, 4) if stats is not None else 0.0,
        step_ms=round(stats.step_s * 1000, 2) if stats is not None else 0.0,
        routed=round(share.num_decisions / num_decisions, 4) if share is not None else 0.0,
        route_hits=round(hits, 4),
    )


def _models(rows: Sequence[ModelRow]) -> tuple[tuple[str, int, int, int, int, int], ...]:
    adapters = sorted(rows[1:], key=lambda row: (-row.num_requests, row.name))
    kept = [*rows[:1], *adapters][:NUM_MODELS]
    return tuple(
        (
            row.name[:MAX_NAME_CHARS],
            row.num_replicas,
            row.num_requests,
            row.num_prompt_tokens,
            row.num_cached_tokens,
            row.num_output_tokens,
        )
        for row in kept
    )


def _route(record: RouteRecord) -> Route:
    num_cached, num_blocks = cached_blocks(record)
    return Route(
        request_id=record.query.request_id,
        time_s=round(record.time_s, 3),
        replica_id=record.decision.best,
        num_prompt_tokens=record.query.num_prompt_tokens,
        num_cached_blocks=num_cached,
        num_prompt_blocks=num_blocks,
        reason=shortened(record.decision.reason, MAX_REASON_CHARS),
    )


def _latency(summary: LatencySummary) -> Latency:
    return Latency(
        window_s=summary.window_s,
        ttft_s=_quantiles(summary.ttft),
        inter_token_s=_quantiles(summary.inter_token),
        num_ttft=summary.ttft.num if summary.ttft is not None else 0,
        attainment=_rounded(summary.attainment, 4),
        num_ended=summary.num_requests,
        objective_ttft_s=summary.objective.ttft_s,
        objective_inter_token_s=summary.objective.inter_token_s,
    )


def _quantiles(found: Quantiles | None) -> tuple[float, float, float] | None:
    return None if found is None else (round(found.p50_s, 5), round(found.p95_s, 5), round(found.p99_s, 5))


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
