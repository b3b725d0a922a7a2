"""One call's life in the gateway: placed, followed, resumed where a replica is lost, and cancelled when left."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from shoal_cluster.policies.routing import RouteQuery
from shoal_cluster.serve.call import Chunk, Usage
from shoal_cluster.serve.gateway_ledger import Follower, GatewayLedger
from shoal_cluster.serve.replica_server import Outcome
from shoal_replica.errors import DeadlineExceeded, ResourceExhausted, ShoalError, Unavailable
from shoal_replica.request import FinishReason, Request, TokenDelta
from shoal_replica.text_stream import TextStream
from shoal_replica.tokenizer import Tokenizer

MAX_RESUMES = 3
FEED_GRACE_S = 2.0


class Placement(Protocol):
    """A request handed to Serve: its outcome, and the way to take it back."""

    def outcome(self) -> asyncio.Future[Outcome]: ...

    def cancel(self) -> None: ...


Place = Callable[[Request, RouteQuery], Placement]


class ReplicaLost(ShoalError):
    """The replica that ran a request is gone, or its feed is."""


@dataclass(slots=True)
class _Output:
    """One sequence of the call as far as the client has it."""

    text_stream: TextStream
    done: asyncio.Future[None]
    token_ids: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.done.done()


class _Leg:
    """One placement of a request: where it went, and whether that replica was lost."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[str, TokenDelta], bool]) -> None:
        self.replica_id = ""
        self.routed: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()
        self._take = take
        self.follower = Follower(self._on_routed, self._on_delta, self._on_lost)

    def _on_routed(self, replica_id: str) -> None:
        self.replica_id = replica_id
        if not self.routed.done():
            self.routed.set_result(None)

    def _on_delta(self, replica_id: str, delta: TokenDelta) -> None:
        if not self._take(replica_id, delta):
            self._on_lost()

    def _on_lost(self) -> None:
        if not self.lost.done():
            self.lost.set_result(None)


class Generation:
    """Runs one request. Iterate ``chunks()`` once; close the iterator to cancel."""

    def __init__(
        self,
        request: Request,
        query: RouteQuery,
        ledger: GatewayLedger,
        place: Place,
        tokenizer: Tokenizer,
        placement_timeout_s: float,
    ) -> None:
        self._request = request
        self._query = query
        self._ledger = ledger
        self._place = place
        self._placement_timeout_s = placement_timeout_s
        self._loop = asyncio.get_running_loop()
        params = request.sampling_params
        self._outputs = [
            _Output(TextStream(tokenizer, params.stop), self._loop.create_future()) for _ in range(params.n)
        ]
        self._arrived_s = time.monotonic()
        self._first_token_s: float | None = None
        self._num_cached_tokens = 0
        self._replica_id = ""
        self._num_legs = 0
        self.num_resumes = 0
        self._chunks: deque[Chunk] = deque()
        self._ready = asyncio.Event()
        self._failure: ShoalError | None = None
        self._legs: set[asyncio.Task[None]] = set()

    async def chunks(self, timeout_s: float) -> AsyncIterator[Chunk]:
        """Stream the call's chunks; the last one carries the usage.

        Raises:
            DeadlineExceeded: not finished after ``timeout_s``.
            ResourceExhausted, Unavailable: no replica would or could run it.
        """
        error = DeadlineExceeded(f"the request was not finished after {timeout_s:g} s")
        deadline = self._loop.call_later(timeout_s, self._fail, error)
        self._start_leg(self._request, range(len(self._outputs)))
        try:
            while True:
                await self._ready.wait()
                self._ready.clear()
                while self._chunks:
                    chunk = self._chunks.popleft()
                    if not self._chunks and self._is_done:
                        yield replace(chunk, usage=self._usage())
                        return
                    yield chunk
                if self._failure is not None:
                    raise self._failure
        finally:
            deadline.cancel()
            await self._end_legs()

    @property
    def _is_done(self) -> bool:
        return all(output.is_done for output in self._outputs)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the call's arrival to its first token, once there is one."""
        return None if self._first_token_s is None else self._first_token_s - self._arrived_s

    def _usage(self) -> Usage:
        return Usage(
            num_prompt_tokens=self._request.num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=sum(len(o.token_ids) for o in self._outputs),
            replica_id=self._replica_id,
            ttft_s=self.ttft_s or 0.0,
            num_resumes=self.num_resumes,
        )

    # Legs: a request to one replica after another, for some of the call's sequences

    def _start_leg(self, request: Request, indexes: range) -> None:
        task = self._loop.create_task(self._run_leg(request, indexes))
        self._legs.add(task)
        task.add_done_callback(self._legs.discard)

    async def _run_leg(self, request: Request, indexes: range) -> None:
        excluded: frozenset[str] = frozenset()
        reason = ""
        try:
            for _ in range(MAX_RESUMES + 1):
                try:
                    refused_by = await self._attempt(request, indexes, excluded)
                except ReplicaLost as error:
                    if self.num_resumes >= MAX_RESUMES:
                        raise Unavailable(f"the request was resumed {MAX_RESUMES} times: {error}") from None
                    self.num_resumes += 1
                    self._resume(request, indexes)
                    return
                if refused_by is None:
                    return
                replica_id, reason = refused_by
                excluded |= {replica_id}
            raise ResourceExhausted(f"refused by {len(excluded)} replicas: {reason}", retry_after_s=1.0)
        except ShoalError as error:
            self._fail(error)

    async def _attempt(self, request: Request, indexes: range, excluded: frozenset[str]) -> tuple[str, str] | None:
        """Place a request once and follow it to its end. Returns (replica, reason) if that replica refused it."""
        self._num_legs += 1
        suffix = f"#{self._num_legs}" if self._num_legs > 1 else ""
        request = replace(request, request_id=self._request.request_id + suffix)
        query = replace(self._query, request_id=request.request_id, excluded=self._query.excluded | excluded)
        leg = _Leg(self._loop, self._take)
        self._ledger.follow(request.request_id, leg.follower)
        placement = self._place(request, query)
        outcome = placement.outcome()
        try:
            routed: list[asyncio.Future[Any]] = [outcome, leg.routed]
            await asyncio.wait(routed, timeout=self._placement_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not (outcome.done() or leg.routed.done()):
                raise Unavailable(f"no replica could take the request within {self._placement_timeout_s:g} s")
            ended: list[asyncio.Future[Any]] = [outcome, leg.lost]
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            if not outcome.done():
                raise ReplicaLost(f"the feed of replica {leg.replica_id} broke")
            if (error := outcome.exception()) is not None:
                raise ReplicaLost(f"replica {leg.replica_id}: {type(error).__name__}")
            if outcome.result().refused:
                return leg.replica_id, outcome.result().reason
            # The call's end may overtake the last tokens, which come by the feed.
            ends = [self._outputs[i].done for i in indexes]
            _, pending = await asyncio.wait(ends, timeout=FEED_GRACE_S)
            if pending:
                raise ReplicaLost(f"replica {leg.replica_id} ended the request early")
            return None
        finally:
            if not outcome.done():
                placement.cancel()
            self._ledger.unfollow(request.request_id)

    def _resume(self, request: Request, indexes: range) -> None:
        """Go on elsewhere after the tokens that the client has; sequences that have any go on alone."""
        for index in indexes:
            output = self._outputs[index]
            if output.is_done:
                continue
            alone = replace(
                request,
                sampling_params=replace(request.sampling_params, n=1),
                output_token_ids=tuple(output.token_ids),
                index=index,
            )
            self._start_leg(alone, range(index, index + 1))

    async def _end_legs(self) -> None:
        for task in self._legs:
            task.cancel()
        if self._legs:
            await asyncio.wait(self._legs)

    # Tokens

    def _take(self, replica_id: str, delta: TokenDelta) -> bool:
        """Pass a delta on to the client. False if it does not follow what the client has."""
        output = self._outputs[delta.index]
        if output.is_done or delta.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            return True  # an end that the replica chose is not the call's: the leg resumes
        if delta.position != len(output.token_ids):
            return False
        self._replica_id = replica_id
        if self._first_token_s is None:
            self._first_token_s = time.monotonic()
            self._num_cached_tokens = delta.num_cached_tokens
        output.token_ids.extend(delta.token_ids)
        text, stopped = output.text_stream.push(delta.token_ids)
        finish_reason = FinishReason.STOP if stopped else delta.finish_reason
        if stopped and delta.finish_reason is None:
            self._ledger.abort(delta.request_id, delta.index)
        elif finish_reason is not None and not stopped:
            text += output.text_stream.finish()
            finish_reason = FinishReason.STOP if output.text_stream.stopped else finish_reason
        if finish_reason is not None:
            output.done.set_result(None)
        self._chunks.append(
            Chunk(
                index=delta.index,
                text=text,
                token_ids=delta.token_ids,
                logprobs=delta.logprobs,
                finish_reason=finish_reason,
            )
        )
        self._ready.set()
        return True

    def _fail(self, error: ShoalError) -> None:
        if self._failure is None:
            self._failure = error
        self._ready.set()
