"""Which phase of a request a placement is for, where replicas have roles."""

from __future__ import annotations

import time
from dataclasses import replace

from shoal_cluster.policies.columns import Phase
from shoal_cluster.policies.roles import phase_at_arrival
from shoal_cluster.policies.routing import RouteQuery
from shoal_cluster.policies.view import ClusterView
from shoal_replica.request import Request


def in_phase(request: Request, query: RouteQuery, view: ClusterView) -> tuple[Request, RouteQuery]:
    """The request and its query as they are placed next: for its prompt alone, or for what follows. One that has been
    refused or lost before, or lacks an adapter somewhere, may go to any replica. A beam search, and a prompt that is
    scored, have nothing that another replica could go on with: they stay where they decode.
    """
    if query.excluded:
        return request, query
    phase = _phase(request, query, view)
    if phase == "prefill" and request.sampling_params.max_tokens != 1:
        return replace(request, is_prefill_only=True), replace(query, phase=phase, decode_steps=1)
    return request, replace(query, phase=phase) if phase else query


def _phase(request: Request, query: RouteQuery, view: ClusterView) -> Phase:
    if not view.has_roles:
        return ""
    params = request.sampling_params
    if request.output_token_ids or params.is_beam_search or not request.is_cached:
        return "decode"
    if params.max_tokens == 1:
        return "prefill"
    return phase_at_arrival(query, view.candidates(query.block_hashes, time.monotonic()))
