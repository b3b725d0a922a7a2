"""Full records of decisions, as the page shows them when a decision is opened."""

from __future__ import annotations

from shoal_cluster.policies.route_decision import CandidateTerms
from shoal_cluster.policies.route_record import RouteRecord
from shoal_cluster.serve.explanation import Explanation, HeldRequest, Refusal, SentBy


def encode_explanation(explanation: Explanation) -> list[dict[str, object]]:
    """The routing records, then a text for each refusal, look and held request, and for what was left off."""
    said: tuple[Refusal | SentBy | HeldRequest, ...] = (*explanation.refusals, *explanation.looks, *explanation.held)
    texts: list[dict[str, object]] = [{"text": each.text} for each in said]
    if explanation.left_off:
        texts.append({"text": explanation.left_off})
    return [*map(encode_route, explanation.records), *texts]


def encode_route(record: RouteRecord) -> dict[str, object]:
    """A routing decision with every candidate's terms, best first."""
    rank = {replica_id: place for place, replica_id in enumerate(record.decision.ranked, start=1)}

    def place(candidate: CandidateTerms) -> int:
        return rank.get(candidate.replica_id, len(rank) + 1)

    query, ages_s = record.query, record.ages_s()
    return {
        "request_id": query.request_id,
        "time_s": record.time_s,
        "reason": record.decision.reason,
        "by": record.by,
        "num_prompt_tokens": query.num_prompt_tokens,
        "num_prompt_blocks": len(query.block_hashes),
        "num_blocks_needed": query.num_blocks_needed,
        "block_size": query.block_size,
        "excluded": sorted(query.excluded),
        "phase": query.phase,
        "candidates": [
            {
                "replica_id": candidate.replica_id,
                "rank": rank.get(candidate.replica_id),
                "rejected": candidate.rejected,
                "score": candidate.score,
                "terms": dict(candidate.terms),
                "age_s": ages_s.get(candidate.replica_id),
            }
            for candidate in sorted(record.decision.candidates, key=place)
        ],
    }
