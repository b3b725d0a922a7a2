"""A request whose turn has come."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.considered import Considered
from shoal_cluster.policies.look import Look, Sent
from shoal_cluster.policies.pending_request import RESUMED_PRIORITY, PendingRequest
from shoal_cluster.policies.route_decision import RouteDecision
from shoal_cluster.policies.route_record import Rule


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

    @classmethod
    def of(
        cls, pending: PendingRequest, considered: Considered, sent: Sent, look: Look, yields: bool, now: float
    ) -> Dispatch:
        """The request that a look has sent, as that one ``considered`` it."""
        query = considered.query
        return cls(
            pending=pending if pending.query is query else replace(pending, query=query),
            due_s=now if pending.priority == RESUMED_PRIORITY else considered.due_s,  # its client is in mid-answer
            candidates=sent.candidates,
            seed=sent.seed,
            decision=sent.decision,
            look=look,
            yields=yields,
        )
