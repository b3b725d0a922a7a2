"""What one update tells the page: the cluster as it is now, in at most ``MAX_UPDATE_BYTES`` of JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shoal_cluster.policies.routing import CandidateTerms, RouteRecord
from shoal_cluster.serve.call import ClusterRow, ReplicaRow
from shoal_cluster.serve.dashboard.history import Sample
from shoal_cluster.serve.dashboard.meter import Rates
from shoal_cluster.serve.ledger import sum_blocks

MAX_UPDATE_BYTES = 10_000
MAX_REASON_CHARS = 160
MAX_NODE_CHARS = 12
NUM_ROUTES = 10

READY, DRAINING, SILENT, LOST = "ready", "draining", "silent", "not connected"


class Blocks(msgspec.Struct, frozen=True):
    """The block ledger: total = allocated + free; the cached are those of the free that still hold a prefix."""

    allocated: int
    cached: int
    reserved: int
    free: int
    total: int


class Replica(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One card. Sent as a row; the names of its columns are sent once, beside the rows.

    ``age_s`` is the age of everything but ``state``; numbers are those of the last stats, zero before the first.
    """

    replica_id: str
    state: str
    node_id: str
    age_s: float
    blocks: tuple[int, int, int, int, int]
    num_running: int
    max_num_seqs: int
    num_waiting: int
    waiting_tokens: int
    tokens_per_s: float | None
    hit_rate: float
    step_ms: float


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One routing decision, in a line. ``replica_id`` is the first choice, empty when nobody could take it."""

    request_id: str
    time_s: float
    replica_id: str
    num_prompt_tokens: int
    num_cached_blocks: int
    num_prompt_blocks: int
    reason: str


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the page shows but the timelines' past. Rates are None until they are known."""

    time_s: float
    model: str
    requests_per_s: float | None
    tokens_per_s: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    num_ttft: int
    hit_rate: float
    num_running: int
    num_waiting: int
    waiting_tokens: int
    num_requests: int
    num_active: int
    num_shed: int
    num_failed: int
    num_resumes: int
    blocks: Blocks
    replica_columns: tuple[str, ...]
    replicas: tuple[Replica, ...]
    num_replicas_left_out: int
    routes: tuple[Route, ...]
    sample: Sample | None


def build_update(
    cluster: ClusterRow, routes: Sequence[RouteRecord], rates: Rates | None, sample: Sample | None, time_s: float
) -> Update:
    """The update at Unix time ``time_s``. Replicas in trouble come first, the others by id."""
    spoken = [row.stats for row in cluster.replicas if row.stats is not None]
    ledger = sum_blocks(cluster.replicas)
    num_prompt_tokens = sum(stats.num_prompt_tokens for stats in spoken)
    ttft_s = sorted(cluster.recent_ttft_s)
    replicas = [_replica(row, rates) for row in cluster.replicas]
    return Update(
        time_s=round(time_s, 3),
        model=cluster.model,
        requests_per_s=None if rates is None else round(rates.requests_per_s, 3),
        tokens_per_s=None if rates is None else round(rates.tokens_per_s, 1),
        ttft_p50_s=_quantile(ttft_s, 0.5),
        ttft_p95_s=_quantile(ttft_s, 0.95),
        num_ttft=len(ttft_s),
        hit_rate=round(sum(s.num_cached_tokens for s in spoken) / num_prompt_tokens, 4) if num_prompt_tokens else 0.0,
        num_running=sum(stats.num_running for stats in spoken),
        num_waiting=sum(stats.num_waiting for stats in spoken),
        waiting_tokens=sum(stats.num_waiting_tokens for stats in spoken),
        num_requests=cluster.num_requests,
        num_active=cluster.num_active,
        num_shed=cluster.num_shed,
        num_failed=cluster.num_failed,
        num_resumes=cluster.num_resumes,
        blocks=Blocks(
            ledger.num_allocated_blocks,
            ledger.num_cached_blocks,
            sum(row.num_reserved_blocks for row in cluster.replicas),
            ledger.num_free_blocks,
            ledger.num_total_blocks,
        ),
        replica_columns=Replica.__struct_fields__,
        replicas=tuple(sorted(replicas, key=lambda replica: (replica.state == READY, replica.replica_id))),
        num_replicas_left_out=0,
        routes=tuple(_route(record) for record in routes[:NUM_ROUTES]),
        sample=sample,
    )


def encode_update(update: Update, max_bytes: int = MAX_UPDATE_BYTES) -> bytes:
    """JSON of at most ``max_bytes``: replicas at the end, then old routes, are left out where it would be more."""
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


def encode_route(record: RouteRecord) -> dict[str, object]:
    """A decision with every candidate's terms, best first, for the page's full record."""
    rank = {replica_id: place for place, replica_id in enumerate(record.decision.ranked, start=1)}

    def place(candidate: CandidateTerms) -> int:
        return rank.get(candidate.replica_id, len(rank) + 1)

    query = record.query
    return {
        "request_id": query.request_id,
        "time_s": record.time_s,
        "reason": record.decision.reason,
        "num_prompt_tokens": query.num_prompt_tokens,
        "num_prompt_blocks": len(query.block_hashes),
        "num_blocks_needed": query.num_blocks_needed,
        "block_size": query.block_size,
        "excluded": sorted(query.excluded),
        "candidates": [
            {
                "replica_id": candidate.replica_id,
                "rank": rank.get(candidate.replica_id),
                "rejected": candidate.rejected,
                "score": candidate.score,
                "terms": dict(candidate.terms),
            }
            for candidate in sorted(record.decision.candidates, key=place)
        ],
    }


def _replica(row: ReplicaRow, rates: Rates | None) -> Replica:
    stats = row.stats
    if stats is None:
        state = SILENT if row.connected else LOST
    elif not row.connected:
        state = LOST
    else:
        state = DRAINING if stats.draining else READY
    tokens_per_s = None if rates is None else rates.tokens_per_s_of.get(row.replica_id)
    return Replica(
        replica_id=row.replica_id,
        state=state,
        node_id=row.node_id[:MAX_NODE_CHARS],
        age_s=round(row.age_s, 2),
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
        tokens_per_s=None if tokens_per_s is None else round(tokens_per_s, 1),
        hit_rate=round(stats.hit_rate, 4) if stats is not None else 0.0,
        step_ms=round(stats.step_s * 1000, 2) if stats is not None else 0.0,
    )


def _route(record: RouteRecord) -> Route:
    first = record.decision.ranked[0] if record.decision.ranked else ""
    reason = record.decision.reason
    return Route(
        request_id=record.query.request_id,
        time_s=round(record.time_s, 3),
        replica_id=first,
        num_prompt_tokens=record.query.num_prompt_tokens,
        num_cached_blocks=next((r.num_matched_blocks for r in record.replicas.views() if r.replica_id == first), 0),
        num_prompt_blocks=len(record.query.block_hashes),
        reason=reason if len(reason) <= MAX_REASON_CHARS else f"{reason[: MAX_REASON_CHARS - 1]}…",
    )


def _quantile(ordered: list[float], share: float) -> float | None:
    """The same rank that ``/metrics`` uses."""
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4) if ordered else None
