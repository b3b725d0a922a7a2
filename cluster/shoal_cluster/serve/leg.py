"""One placement of a request: where it went, and how it ended there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from shoal_cluster.serve.call_times import LegTimes
from shoal_cluster.serve.feed_messages import Refused
from shoal_cluster.serve.outcome import Outcome
from shoal_cluster.serve.outputs import Output
from shoal_cluster.serve.sent_requests import Follower
from shoal_replica.errors import InvalidArgument, ShoalError, Unavailable
from shoal_replica.request import FinishReason, TokenDelta

GRACE_S = 2.0  # how far apart the end of a call and its last tokens may arrive: they travel separately


class Placement(Protocol):
    """A request on its way to a replica.

    ``sent`` is done when its turn has come and it has been submitted on the feed or, failing that, by Serve's call.
    ``is_called``: Serve's call has been made.
    """

    sent: asyncio.Future[None]
    is_called: bool

    def start(self) -> asyncio.Future[Outcome]:
        """Enter the gateway's queue. Returns the future outcome at a replica."""
        ...

    def cancel(self, *, has_ended: bool = False) -> None:
        """Take the request back, from the queue or from its replica, or only its call, if it ``has_ended`` there."""
        ...


class ReplicaLost(ShoalError):
    """The replica that ran a request has gone, or its feed has broken."""


class ReplicaLeft(ReplicaLost):
    """The replica has handed the running request back, as the gateway has asked because it drains."""


class ReplicaUnheard(ReplicaLost):
    """The replica has no feed to this gateway, which has not noticed yet. It did not run the request but may soon."""


class Leg(Follower):
    """Follows a placed request, for the sequences in ``outputs`` (by index), to its end on one replica.

    Args:
        times: notes when a replica has taken the request.
        take: called with ``times``, the replica's id and each delta that continues the client's tokens.
        go_on: called with this leg and the replica's id when that one has computed what it was asked for and sequences
            have not ended.
    """

    def __init__(
        self,
        outputs: Mapping[int, Output],
        times: LegTimes,
        take: Callable[[LegTimes, str, TokenDelta], None],
        go_on: Callable[[Leg, str], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.replica_id = ""
        self.is_replica_gone = False  # the replica cannot finish what it took, be it this request or another
        self.end = ""  # as in ``LegTimes``, of a leg that is done
        self._sent_s: float | None = None  # when the request went to ``replica_id``
        self._refusal: Outcome | None = None  # why that replica does not run it
        self._is_handed_back = False  # it had begun there
        self._failure = ""  # the error by which that replica does not run it
        self._prefilled: set[int] = set()  # sequences that have their first token and go on elsewhere
        self._taken: asyncio.Future[None] = loop.create_future()  # done when a replica has taken the request
        self._ended: asyncio.Future[None] = loop.create_future()  # done when it has finished, or is refused or lost
        self._outputs = outputs
        self.times = times
        self._pass_on = take
        self._go_on = go_on

    @property
    def is_done(self) -> bool:
        return all(output.is_done or index in self._prefilled for index, output in self._outputs.items())

    async def see_through(self, placement: Placement, placement_timeout_s: float) -> Outcome | None:
        """Wait for the end. Returns the outcome if the replica refused the request, None when its sequences are done.

        Raises:
            ReplicaLost: the replica did not finish the request. ReplicaLeft: because it drains. ReplicaUnheard: it has
                no feed to this gateway.
            InvalidArgument: the replica found the request invalid: no other replica should run it.
            Unavailable: no replica confirmed within ``placement_timeout_s`` of its turn that it had taken it.
        """
        outcome = placement.start()
        outcome.add_done_callback(_error)  # nobody else retrieves the error of a cancelled call
        try:
            await self._until_taken(outcome, placement.sent, placement_timeout_s)
            await _first(outcome, self._ended)
            if (refusal := self._refusal or self._refused_by(outcome)) is not None:
                return _for_others(refusal)
            why_lost = await self._last_words(outcome, placement.is_called)
            if self.is_done:
                return None
            if self._is_handed_back:
                raise ReplicaLeft(f"replica {self.replica_id} has handed it back")
            raise ReplicaLost(why_lost)
        finally:
            if not outcome.done():
                placement.cancel(has_ended=self.is_done)

    async def _until_taken(
        self, outcome: asyncio.Future[Outcome], sent: asyncio.Future[None], placement_timeout_s: float
    ) -> None:
        """Wait until a replica has taken the request, or the leg has ended before that."""
        await _first(outcome, self._taken, self._ended, sent)
        if outcome.done() and not sent.done():
            outcome.result()  # it was never sent; the client is told why
        await _first(outcome, self._taken, self._ended, timeout_s=placement_timeout_s)
        if not (outcome.done() or self._taken.done() or self._ended.done()):
            raise Unavailable(f"no replica could take the request within {placement_timeout_s:g} s")

    def _refused_by(self, outcome: asyncio.Future[Outcome]) -> Outcome | None:
        """The outcome of a call that is over, if the replica refused the request instead of running it."""
        if self._has_begun or not outcome.done() or _error(outcome) is not None:
            return None
        return outcome.result() if outcome.result().refused else None

    async def _last_words(self, outcome: asyncio.Future[Outcome], is_called: bool) -> str:
        """Wait for what still travels behind the first sign of the end. Returns why the request is lost if sequences
        are not done by then.
        """
        if not outcome.done():
            if self.is_done and is_called:  # cancelling a call that is returning would count as a failure
                await _first(outcome, timeout_s=GRACE_S)
            return self._failure or f"the feed of replica {self.replica_id} broke"
        if (error := _error(outcome)) is not None:
            self.is_replica_gone = True
            return f"replica {self.replica_id}: {type(error).__name__}"
        self._is_handed_back = outcome.result().refused
        if not self._is_handed_back:
            await _first(self._ended, timeout_s=GRACE_S)
        return f"replica {self.replica_id} ended the request early"

    # As a Follower

    def sent_to(self, replica_id: str) -> None:
        if replica_id != self.replica_id or self._sent_s is None:
            self._sent_s = time.monotonic()
        self.replica_id = self.times.replica_id = replica_id

    def taken_by(self, replica_id: str) -> None:
        self.sent_to(replica_id)
        if not self._taken.done():
            self.times.routed_s = self._sent_s
            self._taken.set_result(None)

    def take(self, replica_id: str, delta: TokenDelta) -> None:
        if not self._taken.done():
            self.taken_by(replica_id)
        output = self._outputs.get(delta.index)
        if output is None or output.is_done:
            return
        if delta.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            self.is_replica_gone = True  # the call goes on elsewhere
            why = "stops" if delta.finish_reason is FinishReason.ABORT else "has failed"
            self._failure = f"the engine of replica {replica_id} {why}"
            self._finish()
        elif delta.position != len(output.token_ids):
            self._finish()
        else:
            if delta.finish_reason is FinishReason.PREFILLED:
                self._prefilled.add(delta.index)
                delta = msgspec.structs.replace(delta, finish_reason=None)
            self._pass_on(self.times, replica_id, delta)
            if self.is_done and not self._ended.done():
                self._finish()
                if any(not self._outputs[index].is_done for index in self._prefilled):
                    self.end = "prefilled"
                    self._go_on(self, replica_id)

    def refused(self, replica_id: str, refused: Refused) -> None:
        self.replica_id = replica_id
        if refused.is_failed:
            self.is_replica_gone, self._failure = True, f"replica {replica_id}: {refused.reason}"
        elif self._has_begun:
            self._is_handed_back = True
        else:
            self._refusal = Outcome(True, refused.reason, refused.field, is_full=refused.is_full)
        self._finish()

    def lost(self, replica_id: str) -> None:
        self.sent_to(replica_id)
        self._finish()

    @property
    def _has_begun(self) -> bool:
        return self.times.first_token_s is not None

    def _finish(self) -> None:
        """Nothing more comes from this replica."""
        if not self._ended.done():
            self._ended.set_result(None)


async def _first(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Return when one of ``futures`` is done, or after ``timeout_s``."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def _for_others(refusal: Outcome) -> Outcome:
    """``refusal``, if others should run the request. Raises InvalidArgument: none should; ReplicaUnheard: this may."""
    if refusal.is_unheard:
        raise ReplicaUnheard(refusal.reason)
    if refusal.field:
        raise InvalidArgument.retold(refusal.field, refusal.reason)
    return refusal


def _error(outcome: asyncio.Future[Outcome]) -> BaseException | None:
    """The error of a call that is over, if it failed."""
    return asyncio.CancelledError() if outcome.cancelled() else outcome.exception()
