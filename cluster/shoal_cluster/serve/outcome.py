"""A placed request at its replica: run to its end, or refused."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_cluster.serve.feed import FeedServer
from shoal_replica.engine import Engine
from shoal_replica.errors import ResourceExhausted, Unavailable
from shoal_replica.request import Request


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call to a replica ended. A refused request has left no trace there; ``reason`` says why."""

    refused: bool
    reason: str = ""


async def run_to_end(engine: Engine, feed: FeedServer, request: Request, gateway_id: str) -> Outcome:
    """Run a request, its tokens going to ``gateway_id``, until it has ended. Cancelling this frees its blocks.

    Raises:
        EngineDead: the engine has failed.
    """
    try:
        finished = engine.add(request)
    except (ResourceExhausted, Unavailable) as error:
        return Outcome(refused=True, reason=str(error))
    try:
        if not feed.own(request.request_id, gateway_id):
            return Outcome(refused=True, reason="the gateway's feed is not connected")
        await finished
    except Unavailable as error:  # it was handed back
        return Outcome(refused=True, reason=str(error))
    finally:
        engine.abort(request.request_id)
        feed.disown(request.request_id, gateway_id)
    engine.check_health()
    return Outcome(refused=False)
