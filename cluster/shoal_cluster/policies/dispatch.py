"""A held request's turn."""

from __future__ import annotations

from typing import NamedTuple

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.held import PendingRequest
from shoal_cluster.policies.look import Look
from shoal_cluster.policies.ranking import RouteDecision
from shoal_cluster.policies.routing import Rule


class Dispatch(NamedTuple):
    """A request to send now, to ``replica_id``; ``route`` with these candidates and ``seed`` decides the same again.

    Attributes:
        candidates: what the decision saw. Promised there: also what more urgent requests, still held, will take.
        due_s: when its first token is due; sooner, if that is after what it went before here; later, if its tenant has
            had more than others lately. The replica's ``deadline`` policy goes by it, so that it keeps the order of the
            queue, shares of tenants included.
        look: what was considered before it and held, and why this one is next; None under a ``rule``.
        yields: see ``Request``.
    """

    pending: PendingRequest
    replica_id: str
    due_s: float
    candidates: Candidates
    seed: int
    decision: RouteDecision
    look: Look | None
    rule: Rule | None = None
    yields: bool = False
