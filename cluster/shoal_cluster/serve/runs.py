"""Runs the requests that come to a replica: each to its end, or refused.

A request arrives at once as a ``Submit`` on its gateway's feed and, if it still runs a second later, as Serve's call,
too, by which Serve counts, drains and cancels. Whichever comes first starts it; the call waits for its end and returns
its outcome.

* A call that comes first, or alone (the feed is down, or the request too long for it), runs the request. The ``Submit``
  behind it starts nothing, even if the request has ended meanwhile.
* A refusal, hand-back or error before the call comes is told on the feed: there may be no call for long.
* If a request ends, is refused or is handed back before its call comes, the outcome is kept for the call.
* A gateway that gives a request up says so on the feed, behind its ``Submit``, since the call may never come. A
  cancelled call ends the request too; and when a gateway's feed breaks, all its requests are aborted.
* The call goes where the request was submitted and nowhere else. If Serve stops that replica first, there is no call,
  and the request goes on to its end there.

An id that is submitted again is a new request: its gateway has given up the one before. An id that is called again is
one if the first has ended, and a duplicate otherwise. A request that arrived by one route only is remembered for
``KEPT_S`` after its end, and the oldest such request is forgotten when there are more than ``MAX_KEPT``. A call that
arrives later than that runs the request again.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from time import monotonic

from shoal_cluster.serve.block_fetcher import BlockFetcher
from shoal_cluster.serve.feed import FeedServer
from shoal_cluster.serve.feed_messages import BlockSource, Refused
from shoal_cluster.serve.logs import error_fields, fields
from shoal_cluster.serve.outcome import Outcome
from shoal_replica.engine import Engine
from shoal_replica.errors import EngineDead, InvalidArgument, ResourceExhausted, Unavailable
from shoal_replica.request import Request

KEPT_S = 10.0
MAX_KEPT = 10_000

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Run:
    ended: asyncio.Future[Outcome]
    is_submitted: bool = False
    is_called: bool = False


_Key = tuple[str, str]  # gateway id, request id


class Runs:
    """The requests at a replica, as its feed and Serve bring them. Tokens go to the gateway that sent the request.

    ``fetcher`` fetches blocks that other replicas have; without it they are computed.
    """

    def __init__(self, engine: Engine, feed: FeedServer, fetcher: BlockFetcher | None = None) -> None:
        self._engine = engine
        self._feed = feed
        self._fetcher = fetcher
        self._runs: dict[_Key, _Run] = {}
        self._kept: dict[_Key, float] = {}  # ended, but came one way only: when kept, oldest first
        feed.on_submit = self._submit

    async def call(self, request: Request, gateway_id: str, source: BlockSource | None = None) -> Outcome:
        """Serve's call: run the request to its end. Its ``due_s`` counts from now, or from its ``Submit``. Cancelling
        this frees its blocks. ``source`` has more of its blocks.

        Raises:
            EngineDead: the engine has failed.
            Exception: any other error of the engine in taking the request.
        """
        key = (gateway_id, request.request_id)
        run = self._runs.get(key)
        if run is None or (run.is_called and run.ended.done()):
            run = self._start(key, request, source)
        run.is_called = True
        try:
            await asyncio.wait([run.ended])
        finally:
            if not run.ended.done():
                self._engine.abort(request.request_id)
                self._feed.disown(request.request_id, gateway_id)
            self._settle(key, run)
        return run.ended.result()

    def _submit(self, request: Request, gateway_id: str, source: BlockSource | None) -> None:
        key = (gateway_id, request.request_id)
        run = self._runs.get(key)
        if run is None or run.is_submitted:  # a gateway that submits an id again has given up the request before
            run = self._start(key, request, source)
        run.is_submitted = True
        self._settle(key, run)

    def _start(self, key: _Key, request: Request, source: BlockSource | None) -> _Run:
        now = monotonic()
        self._kept.pop(key, None)  # of an earlier request with that id
        self._forget_kept(now)
        gateway_id, request_id = key
        run = self._runs[key] = _Run(asyncio.get_running_loop().create_future())
        try:
            request = replace(request, arrival_s=now, due_s=now + request.due_s)
            num_coming_blocks = 0 if self._fetcher is None else self._fetcher.num_coming(request, source)
            finished = self._engine.add(request, num_coming_blocks)
        except (ResourceExhausted, Unavailable) as error:
            is_full = isinstance(error, ResourceExhausted)
            run.ended.set_result(Outcome(refused=True, reason=str(error), is_full=is_full))
        except InvalidArgument as error:  # another gateway's request may have its id
            run.ended.set_result(Outcome(refused=True, reason=str(error), field=error.field))
        except Exception as error:  # any error is this request's alone: its gateway's feed carries others
            if not isinstance(error, EngineDead):
                log_fields = fields(request_id=request_id, **error_fields(error))
                logger.error("the engine could not take a request", extra=log_fields)
            run.ended.set_exception(error)
            run.ended.exception()  # counts as retrieved: the call raises it, if one comes
        else:
            if self._fetcher is not None and source is not None and num_coming_blocks:
                self._fetcher.fetch(request, source, finished)
            if self._feed.own(request, gateway_id):
                finished.add_done_callback(lambda finished: self._end(key, run, finished.exception()))
            else:
                self._engine.abort(request_id)
                run.ended.set_result(Outcome(True, "the gateway's feed is not connected", is_unheard=True))
        return run

    def _end(self, key: _Key, run: _Run, error: BaseException | None) -> None:
        gateway_id, request_id = key
        if self._runs.get(key) is run:
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
        """Drop a run that has ended and came both ways; keep it for the other way if it came one way only. If the call
        has not come, tell the gateway of a refusal or an error on the feed.
        """
        if not run.ended.done():
            return
        if self._runs.get(key) is run:  # else forgotten, or another request has its id now
            self._kept.pop(key, None)
            if run.is_submitted and run.is_called:
                del self._runs[key]
            else:
                self._kept[key] = monotonic()
        if run.is_called:
            return
        gateway_id, request_id = key
        if (error := run.ended.exception()) is not None:
            self._feed.refuse(gateway_id, Refused(request_id, type(error).__name__, is_failed=True))
        elif (outcome := run.ended.result()).refused:
            self._feed.refuse(gateway_id, Refused(request_id, outcome.reason, outcome.field, outcome.is_full))

    def _forget_kept(self, now: float) -> None:
        while self._kept:
            oldest = next(iter(self._kept))
            if len(self._kept) < MAX_KEPT and now - self._kept[oldest] < KEPT_S:
                return
            del self._kept[oldest], self._runs[oldest]
