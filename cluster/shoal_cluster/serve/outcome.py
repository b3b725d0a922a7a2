"""A placed request at its replica: run to its end, or refused.

A request comes twice: at once as a ``Submit`` on its gateway's feed, and a little later as Serve's call, by which Serve
counts, drains and cancels. Whichever comes first starts it; the call waits for its end and takes its outcome.

* A call that comes first, or alone (the feed is down, the request too long for it), runs the request. The ``Submit``
  behind it starts nothing, not even if the request has ended meanwhile.
* A refusal or hand-back before the call is told by the feed: while the replica is full, the call may wait for long.
* The outcome of a request that ends, is refused or handed back before its call comes is kept for the call.
* A gateway that gives a request up says so on the feed, behind its ``Submit``, for the call may never come. A cancelled
  call ends it too; and when a gateway's feed breaks, all its requests are aborted.
* The call goes where the request was submitted and nowhere else. If that replica leaves before, the gateway places the
  request anew, under another id.

What the same messenger brings twice is two requests of one id: the second runs once the first has ended. What only one
of the two has brought is forgotten ``KEPT_S`` after its end: whoever waits longer for a call to be taken
wants it run. So is the oldest when there are more than ``MAX_KEPT``.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from time import monotonic

from shoal_cluster.serve.feed import FeedServer
from shoal_replica.engine import Engine
from shoal_replica.errors import EngineDead, InvalidArgument, ResourceExhausted, Unavailable
from shoal_replica.request import Request

KEPT_S = 10.0
MAX_KEPT = 10_000

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call to a replica ended. A refused request has left no trace there; ``reason`` says why. ``field`` names
    what is wrong with it, where that is why: then no other replica is to run it either. ``is_unheard``: the replica has
    no feed to its gateway now, and may well run it once that is back.
    """

    refused: bool
    reason: str = ""
    field: str = ""
    is_unheard: bool = False


@dataclass(slots=True, eq=False)
class _Run:
    ended: asyncio.Future[Outcome]
    is_submitted: bool = False
    is_called: bool = False


_Key = tuple[str, str]  # gateway, request


class Runs:
    """The requests at a replica, as its feed and Serve bring them. Their tokens go to the gateway that sent them."""

    def __init__(self, engine: Engine, feed: FeedServer) -> None:
        self._engine = engine
        self._feed = feed
        self._runs: dict[_Key, _Run] = {}
        self._kept: dict[_Key, float] = {}  # those that have ended and came once: since when, oldest first
        feed.on_submit = self._submit

    async def call(self, request: Request, gateway_id: str) -> Outcome:
        """Serve's call: see the request to its end; its ``due_s`` counts from now, or from its ``Submit``. Cancelling
        this frees its blocks.

        Raises:
            EngineDead: the engine has failed.
            Exception: what else the engine raised when it was to take it.
        """
        key = (gateway_id, request.request_id)
        run = self._runs.get(key)
        if run is None or (run.is_called and run.ended.done()):
            run = self._start(key, request)
        run.is_called = True
        try:
            await asyncio.wait([run.ended])
        finally:
            if not run.ended.done():
                self._engine.abort(request.request_id)
                self._feed.disown(request.request_id, gateway_id)
            self._settle(key, run)
        return run.ended.result()

    def _submit(self, request: Request, gateway_id: str) -> None:
        key = (gateway_id, request.request_id)
        run = self._runs.get(key)
        if run is None or (run.is_submitted and run.ended.done()):
            run = self._start(key, request)
        run.is_submitted = True
        self._settle(key, run)

    def _start(self, key: _Key, request: Request) -> _Run:
        now = monotonic()
        self._kept.pop(key, None)  # an earlier request's of that id
        self._forget_kept(now)
        gateway_id, request_id = key
        run = self._runs[key] = _Run(asyncio.get_running_loop().create_future())
        try:
            finished = self._engine.add(replace(request, arrival_s=now, due_s=now + request.due_s))
        except (ResourceExhausted, Unavailable) as error:
            run.ended.set_result(Outcome(refused=True, reason=str(error)))
        except InvalidArgument as error:  # another gateway's request may have its id
            run.ended.set_result(Outcome(refused=True, reason=str(error), field=error.field))
        except Exception as error:  # whatever it is, it is this request's: its gateway's feed carries others
            if not isinstance(error, EngineDead):
                _log.exception("the engine could not take request %s", request_id)
            run.ended.set_exception(error)
            run.ended.exception()  # the call raises it, if it comes
        else:
            if self._feed.own(request, gateway_id):
                finished.add_done_callback(lambda finished: self._end(key, run, finished.exception()))
            else:
                self._engine.abort(request_id)
                run.ended.set_result(Outcome(True, "the gateway's feed is not connected", is_unheard=True))
        return run

    def _end(self, key: _Key, run: _Run, error: BaseException | None) -> None:
        gateway_id, request_id = key
        self._feed.disown(request_id, gateway_id)
        try:
            self._engine.check_health()
        except EngineDead as dead:
            run.ended.set_exception(dead)
            run.ended.exception()
        else:  # an error: it was handed back
            run.ended.set_result(Outcome(refused=error is not None, reason="" if error is None else str(error)))
        self._settle(key, run)

    def _settle(self, key: _Key, run: _Run) -> None:
        """Let a run go when it has ended and came twice; keep it for the other when it came once. A call tells its
        gateway of a refusal itself.
        """
        if not run.ended.done():
            return
        if self._runs.get(key) is run:  # else forgotten, or another request has its id now
            self._kept.pop(key, None)
            if run.is_submitted and run.is_called:
                del self._runs[key]
            else:
                self._kept[key] = monotonic()
        if not run.is_called and run.ended.exception() is None and run.ended.result().refused:
            gateway_id, request_id = key
            self._feed.refuse(request_id, gateway_id, run.ended.result().reason, run.ended.result().field)

    def _forget_kept(self, now: float) -> None:
        while self._kept:
            oldest = next(iter(self._kept))
            if len(self._kept) < MAX_KEPT and now - self._kept[oldest] < KEPT_S:
                return
            del self._kept[oldest], self._runs[oldest]
