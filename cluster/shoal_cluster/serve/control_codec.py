"""`shoal.v1.Control`: proto to domain and back. Only a cluster's ``latency`` and ``devices`` are not sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import cast

import numpy as np

from shoal_cluster.policies.baselines import NamedRule, Routing
from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import PHASES, Phase
from shoal_cluster.policies.memory import Recollection
from shoal_cluster.policies.replica_view import ReplicaView
from shoal_cluster.policies.route_decision import CandidateTerms, RouteDecision
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.policies.route_record import RouteRecord, Rule
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.serve.block_sums import BlockLedger, sum_blocks
from shoal_cluster.serve.rows import ClusterRow, ModelRow, ReplicaRow
from shoal_cluster.serve.view_tally import ViewQuality
from shoal_protos import control_pb2 as pb
from shoal_replica.prefix_cache import BlockHash
from shoal_replica.stats import ReplicaStats

_STATS_SCALARS = (  # fields of ReplicaStats with the same names in the proto; its blocks are a message of their own
    "time_s",
    "block_size",
    "num_running",
    "num_waiting",
    "num_waiting_tokens",
    "max_num_seqs",
    "max_num_batched_tokens",
    "step_s",
    "token_s",
    "full_token_s",
    "num_steps",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_generated_tokens",
    "num_finished",
    "num_preemptions",
    "num_refused",
    "busy_s",
    "draining",
    "by_due",
    "num_host_blocks",
    "num_host_cached_blocks",
    "num_host_cached_tokens",
    "num_blocks_out",
    "num_blocks_in",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_blocks_given",
    "num_blocks_taken",
)
_VIEW_SCALARS = (
    "replica_id",
    "node_id",
    "age_s",
    "connected",
    "stalled",
    "slowness",
    "role",
    "num_reserved",
    "num_reserved_blocks",
    "num_reserved_tokens",
    "num_matched_blocks",
)


def cluster_to_proto(cluster: ClusterRow) -> pb.Cluster:
    """The cluster, with its replicas' block ledgers summed."""
    return pb.Cluster(
        model=cluster.model,
        replicas=map(_replica_to_proto, cluster.replicas),
        blocks=_ledger_to_proto(sum_blocks(cluster.replicas)),
        num_requests=cluster.num_requests,
        num_active=cluster.num_active,
        num_shed=cluster.num_shed,
        num_failed=cluster.num_failed,
        num_resumes=cluster.num_resumes,
        recent_ttft_s=cluster.recent_ttft_s,
        quality=pb.ViewQuality(**asdict(cluster.quality)),
        models=[pb.ModelUse(**asdict(row)) for row in cluster.models],
    )


def cluster_from_proto(cluster: pb.Cluster) -> ClusterRow:
    return ClusterRow(
        model=cluster.model,
        replicas=tuple(map(_replica_from_proto, cluster.replicas)),
        num_requests=cluster.num_requests,
        num_active=cluster.num_active,
        num_shed=cluster.num_shed,
        num_failed=cluster.num_failed,
        num_resumes=cluster.num_resumes,
        recent_ttft_s=tuple(cluster.recent_ttft_s),
        quality=ViewQuality(**{field.name: getattr(cluster.quality, field.name) for field in fields(ViewQuality)}),
        models=tuple(ModelRow(**{f.name: getattr(row, f.name) for f in fields(ModelRow)}) for row in cluster.models),
    )


def query_to_proto(query: RouteQuery) -> pb.RouteQuery:
    return pb.RouteQuery(
        request_id=query.request_id,
        block_hashes=query.block_hashes,
        num_prompt_tokens=query.num_prompt_tokens,
        num_blocks_needed=query.num_blocks_needed,
        block_size=query.block_size,
        excluded=sorted(query.excluded),
        decode_steps=query.decode_steps,
        passed=dict(query.passed),
        num_known_blocks=query.num_known_blocks,
        num_alike=query.num_alike,
        num_holders=query.num_holders,
        phase=query.phase,
        patience_tokens=query.patience_tokens,
    )


def query_from_proto(query: pb.RouteQuery) -> RouteQuery:
    return RouteQuery(
        request_id=query.request_id,
        block_hashes=tuple(map(BlockHash, query.block_hashes)),
        num_prompt_tokens=query.num_prompt_tokens,
        num_blocks_needed=query.num_blocks_needed,
        block_size=query.block_size,
        excluded=frozenset(query.excluded),
        decode_steps=query.decode_steps,
        passed=tuple(sorted(query.passed.items())),
        num_known_blocks=query.num_known_blocks,
        num_alike=max(1, query.num_alike),
        num_holders=query.num_holders,
        phase=_phase(query.phase),
        patience_tokens=query.patience_tokens if query.HasField("patience_tokens") else None,
    )


def _phase(name: str) -> Phase:
    """A phase that a client knows; of a gateway that is newer there may be others."""
    return next((phase for phase in PHASES if phase == name), "")


def route_record_to_proto(record: RouteRecord) -> pb.RouteRecord:
    weights, decision = record.weights, record.decision
    return pb.RouteRecord(
        time_s=record.time_s,
        query=query_to_proto(record.query),
        replicas=map(view_to_proto, record.replicas.views()),
        weights=pb.RouteWeights(
            prefill_price=weights.prefill_price,
            decode_price=weights.decode_price,
        ),
        seed=record.seed,
        decision=pb.RouteDecision(
            ranked=decision.ranked,
            reason=decision.reason,
            candidates=map(_candidate_to_proto, decision.candidates),
        ),
        rule=None if record.rule is None else _rule_to_proto(record.rule),
    )


def route_record_from_proto(record: pb.RouteRecord) -> RouteRecord:
    weights, decision = record.weights, record.decision
    return RouteRecord(
        time_s=record.time_s,
        query=query_from_proto(record.query),
        replicas=Candidates.of(map(view_from_proto, record.replicas)),
        weights=RouteWeights(
            prefill_price=weights.prefill_price,
            decode_price=weights.decode_price,
        ),
        seed=record.seed,
        decision=RouteDecision(
            ranked=tuple(decision.ranked),
            reason=decision.reason,
            candidates=tuple(map(_candidate_from_proto, decision.candidates)),
        ),
        rule=_rule_from_proto(record.rule) if record.HasField("rule") else None,
    )


def _rule_to_proto(rule: Rule) -> pb.NamedRule:
    assert isinstance(rule, NamedRule)
    memory = rule.memory
    return pb.NamedRule(
        routing=rule.routing,
        turn=memory.turn,
        num_sent_blocks=memory.num_sent_blocks.tolist(),
        num_remembered_blocks=memory.num_remembered_blocks.tolist(),
    )


def _rule_from_proto(rule: pb.NamedRule) -> NamedRule:
    sent, remembered = (np.array(row, np.int64) for row in (rule.num_sent_blocks, rule.num_remembered_blocks))
    return NamedRule(cast("Routing", rule.routing), Recollection(rule.turn, sent, remembered))


def _candidate_to_proto(candidate: CandidateTerms) -> pb.Candidate:
    return pb.Candidate(
        replica_id=candidate.replica_id,
        eligible=candidate.eligible,
        rejected=candidate.rejected,
        score=candidate.score,
        terms=terms_to_proto(candidate.terms),
    )


def _candidate_from_proto(candidate: pb.Candidate) -> CandidateTerms:
    return CandidateTerms(
        replica_id=candidate.replica_id,
        eligible=candidate.eligible,
        rejected=candidate.rejected,
        score=candidate.score,
        terms=terms_from_proto(candidate.terms),
    )


def terms_to_proto(terms: Iterable[tuple[str, float]]) -> list[pb.Term]:
    return [pb.Term(name=name, value=value) for name, value in terms]


def terms_from_proto(terms: Iterable[pb.Term]) -> tuple[tuple[str, float], ...]:
    return tuple((term.name, term.value) for term in terms)


def view_to_proto(view: ReplicaView) -> pb.ReplicaView:
    stats = None if view.stats is None else _stats_to_proto(view.stats)
    return pb.ReplicaView(stats=stats, **{name: getattr(view, name) for name in _VIEW_SCALARS})


def view_from_proto(view: pb.ReplicaView) -> ReplicaView:
    stats = _stats_from_proto(view.stats) if view.HasField("stats") else None
    scalars = {name: getattr(view, name) for name in _VIEW_SCALARS}
    scalars["role"], scalars["slowness"] = _phase(view.role), view.slowness or 1.0
    return ReplicaView(stats=stats, **scalars)


def _replica_to_proto(row: ReplicaRow) -> pb.Replica:
    return pb.Replica(
        replica_id=row.replica_id,
        node_id=row.node_id,
        stats=None if row.stats is None else _stats_to_proto(row.stats),
        age_s=row.age_s,
        num_reserved_blocks=row.num_reserved_blocks,
        connected=row.connected,
        stalled=row.stalled,
        slowness=row.slowness,
        role=row.role,
        start_report=row.start_report,
    )


def _replica_from_proto(replica: pb.Replica) -> ReplicaRow:
    return ReplicaRow(
        replica_id=replica.replica_id,
        node_id=replica.node_id,
        stats=_stats_from_proto(replica.stats) if replica.HasField("stats") else None,
        age_s=replica.age_s,
        num_reserved_blocks=replica.num_reserved_blocks,
        connected=replica.connected,
        stalled=replica.stalled,
        slowness=replica.slowness or 1.0,
        role=_phase(replica.role),
        start_report=replica.start_report,
    )


def _ledger_to_proto(ledger: BlockLedger | ReplicaStats) -> pb.BlockLedger:
    return pb.BlockLedger(
        num_allocated_blocks=ledger.num_allocated_blocks,
        num_cached_blocks=ledger.num_cached_blocks,
        num_free_blocks=ledger.num_free_blocks,
        num_total_blocks=ledger.num_total_blocks,
        utilization=ledger.utilization,
    )


def _stats_to_proto(stats: ReplicaStats) -> pb.ReplicaStats:
    scalars = {name: getattr(stats, name) for name in _STATS_SCALARS}
    return pb.ReplicaStats(blocks=_ledger_to_proto(stats), due_tokens=stats.due_tokens, **scalars)


def _stats_from_proto(stats: pb.ReplicaStats) -> ReplicaStats:
    return ReplicaStats(
        num_allocated_blocks=stats.blocks.num_allocated_blocks,
        num_cached_blocks=stats.blocks.num_cached_blocks,
        num_free_blocks=stats.blocks.num_free_blocks,
        num_total_blocks=stats.blocks.num_total_blocks,
        due_tokens=tuple(stats.due_tokens),
        **{name: getattr(stats, name) for name in _STATS_SCALARS},
    )
