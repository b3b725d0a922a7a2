"""A request whose turn has come."""

from __future__ import annotations

from typing import NamedTuple

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.held import PendingRequest
from shoal_cluster.policies.look import Look
from shoal_cluster.policies.route_decision import RouteDecision
from shoal_cluster.policies.routing import Rule


class Dispatch(NamedTuple):
    """A request to send to ``decision.best`` now; ``route`` with these candidates and ``seed`` decides the same again.

    Attributes:
        candidates: what the decision saw. Its promises include what more urgent requests, still held, will take.
        due_s: when its first token is due; earlier if a request behind it in the queue is due earlier; later if its
            tenant has had far more than others lately. The replica's ``deadline`` policy goes by it and so keeps the
            order of the queue, tenants' shares included.
        look: what was considered before it and is still held, and why this request is next; None under a ``rule``.
        yields: see ``Request``.
    """

    pending: PendingRequest
    due_s: float
    candidates: Candidates
    seed: int
    decision: RouteDecision
    look: Look | None
    rule: Rule | None = None
    yields: bool = False
