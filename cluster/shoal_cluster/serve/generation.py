"""One call's life in the gateway: placed, followed, resumed where a replica is lost, and cancelled when left."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Set
from dataclasses import replace

from shoal_cluster.policies.routing import RouteQuery
from shoal_cluster.serve.call import Chunk, Usage
from shoal_cluster.serve.call_times import CallTimes, LegTimes
from shoal_cluster.serve.explanation import Refusal
from shoal_cluster.serve.gateway_ledger import GatewayLedger
from shoal_cluster.serve.journal import EventKind
from shoal_cluster.serve.leg import Leg, Output, Placement, ReplicaLost, ReplicaUnheard
from shoal_replica.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, ShoalError, Unavailable
from shoal_replica.request import FinishReason, Request, TokenDelta
from shoal_replica.text_stream import TextStream
from shoal_replica.tokenizer import Tokenizer

MAX_RESUMES = 3
MAX_REFUSALS = 4
UNHEARD_S = 0.1  # until a replica is tried again that has no feed to this gateway
GONE_S = 2.0  # in which a replica that could not finish what it took has broken its feed, or is well

Place = Callable[[Request, RouteQuery, float], Placement]  # until when it may take


class Generation:
    """Runs one request. Iterate ``chunks()`` once; close the iterator to cancel.

    ``times`` is told of every token; the deadline counts from its ``arrived_s``.
    """

    def __init__(
        self,
        request: Request,
        query: RouteQuery,
        ledger: GatewayLedger,
        place: Place,
        tokenizer: Tokenizer,
        placement_timeout_s: float,
        times: CallTimes,
    ) -> None:
        self._request = request
        self._query = query
        self._ledger = ledger
        self._place = place
        self._placement_timeout_s = placement_timeout_s
        self._loop = asyncio.get_running_loop()
        params = request.sampling_params
        self._outputs = [Output(TextStream(tokenizer, params.stop, request.prompt_token_ids)) for _ in range(params.n)]
        self._times = times
        self._num_cached_tokens = 0
        self._replica_id = ""
        self._num_legs = 0
        self._deadline_s = math.inf  # on time.monotonic's clock
        self.num_resumes = 0
        self._chunks: deque[Chunk] = deque()
        self._ready = asyncio.Event()
        self._failure: BaseException | None = None
        self._legs: set[asyncio.Task[None]] = set()
        self._gone: set[str] = set()  # replicas that cannot finish what they took

    async def chunks(self, timeout_s: float) -> AsyncIterator[Chunk]:
        """Stream the call's chunks; the last one carries the usage.

        Raises:
            DeadlineExceeded: not finished ``timeout_s`` after its arrival.
            ResourceExhausted, Unavailable: no replica would or could run it.
        """
        error = DeadlineExceeded(f"the request was not finished after {timeout_s:g} s")
        self._deadline_s = self._times.arrived_s + timeout_s
        deadline = self._loop.call_later(self._deadline_s - time.monotonic(), self.fail, error)
        refused_before = self._ledger.routes.refusal_of(self._request.request_id)
        self._start_leg(self._request, range(len(self._outputs)), 0)
        try:
            while True:
                await self._ready.wait()
                self._ready.clear()
                while self._chunks:
                    chunk = self._next_chunk()
                    if not self._chunks and self._is_done:
                        yield replace(chunk, usage=self.usage())
                        return
                    yield chunk
                if self._failure is not None:
                    raise self._failure
        finally:
            deadline.cancel()
            if not self._is_done:  # else their calls are returning: to cancel one would count as its failure
                self._keep_end(refused_before)
                await self._cancel_legs()

    def _keep_end(self, refused_before: Refusal | None) -> None:
        """Why there is no whole answer, for who asks; of a client that has left, where its call was never placed.

        Whoever refuses a call keeps that itself: then there is more than the refusal of a former call of this id. Of a
        call whose id another one has nothing is kept: that is the one who is asked for.
        """
        routes, call_id, error = self._ledger.routes, self._request.request_id, self._failure
        if isinstance(error, InvalidArgument) and error.field == "request_id":
            return
        was_placed = any(leg.replica_id for leg in self._times.legs) or routes.of_call(call_id)
        if error is None and not was_placed:
            error = DeadlineExceeded("its client has left, or that one's deadline has passed, before it was placed")
        if isinstance(error, ShoalError) and routes.refusal_of(call_id) is refused_before:
            terms = (
                ("age_s", time.monotonic() - self._times.arrived_s),
                ("output_tokens", self.usage().num_output_tokens),
                ("resumes", self.num_resumes),
            )
            routes.refuse(Refusal.of(error, time.time(), call_id, terms))

    def _next_chunk(self) -> Chunk:
        """The oldest chunk, together with those of its sequence behind it: a client, or a gateway, that is slower than
        the tokens gets several at once and falls no further behind.
        """
        first = self._chunks.popleft()
        chunks = [first]
        while self._chunks and self._chunks[0].index == first.index:
            chunks.append(self._chunks.popleft())
        if len(chunks) == 1:
            return first
        return Chunk(
            index=first.index,
            text="".join([chunk.text for chunk in chunks]),
            token_ids=tuple([token_id for chunk in chunks for token_id in chunk.token_ids]),
            logprobs=tuple([logprobs for chunk in chunks for logprobs in chunk.logprobs]),
            finish_reason=chunks[-1].finish_reason,
        )

    @property
    def _is_done(self) -> bool:
        return all(output.is_done for output in self._outputs)

    def usage(self) -> Usage:
        """The call's tokens so far."""
        return Usage(
            num_prompt_tokens=self._request.num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=sum(len(o.token_ids) for o in self._outputs),
            replica_id=self._replica_id,
            ttft_s=self._times.ttft_s or 0.0,
            num_resumes=self.num_resumes,
        )

    # Legs: a request to one replica after another, for some of the call's sequences

    def _start_leg(self, request: Request, indexes: range, num_resumes: int) -> None:
        task = self._loop.create_task(self._run_leg(request, indexes, num_resumes))
        self._legs.add(task)
        task.add_done_callback(self._end_leg)

    def _end_leg(self, task: asyncio.Task[None]) -> None:
        self._legs.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def _run_leg(self, request: Request, indexes: range, num_resumes: int) -> None:
        """Place a request until a replica takes it, and see it to its end or hand it on."""
        refused: dict[str, str] = {}
        for _ in range(MAX_REFUSALS):
            try:
                refusal = await self._attempt(request, indexes, await self._excluded(refused))
            except ReplicaUnheard:  # that costs it nothing but time, which its deadline ends
                await asyncio.sleep(UNHEARD_S)
                self._resume(request, indexes, num_resumes)
                return
            except ReplicaLost as error:
                if num_resumes == MAX_RESUMES:
                    raise Unavailable(f"the request was resumed {MAX_RESUMES} times: {error}") from None
                self.num_resumes += 1
                self._ledger.journal.note(
                    EventKind.RESUMED, str(error), replica_id=self._replica_id, request_id=self._request.request_id
                )
                self._resume(request, indexes, num_resumes + 1)
                return
            if refusal is None:
                return
            refused |= [refusal]
            if refusal[0] not in self._ledger.view:
                continue  # Serve has taken it away: another may come in its place
            if not self._ledger.can_place(refused.keys() | self._gone):
                break
        reason = next(reversed(refused.values()))
        raise ResourceExhausted(f"refused by {len(refused)} replicas: {reason}", retry_after_s=1.0)

    async def _excluded(self, refused: dict[str, str]) -> Set[str]:
        """The replicas that are not to have it: who has refused it, and who is gone. One of these may be well (its call
        alone has broken off): where nobody else is, and it stays for ``GONE_S``, it is tried again.
        """
        can_place, gone, ends_s = self._ledger.can_place, self._gone, self._loop.time() + GONE_S
        while gone and not can_place(refused.keys() | gone) and can_place(refused.keys()):
            if self._loop.time() >= ends_s:
                gone.clear()
                break
            await asyncio.sleep(GONE_S / 20)
        return refused.keys() | gone

    async def _attempt(self, request: Request, indexes: range, excluded: Set[str]) -> tuple[str, str] | None:
        """Place a request once and follow it to its end. Returns (replica, reason) if that replica refused it."""
        self._num_legs += 1
        query = self._query
        if self._num_legs > 1:
            request = replace(request, request_id=f"{self._request.request_id}#{self._num_legs}")
            if request.output_token_ids:
                is_caching = bool(query.block_hashes) or query.num_prompt_tokens < query.block_size
                query = RouteQuery.for_request(request, query.block_size, is_caching)
            query = replace(query, request_id=request.request_id, excluded=frozenset(excluded))
        times = self._times.start_leg(time.monotonic())
        leg = Leg({i: self._outputs[i] for i in indexes}, times, self._try_take)
        self._ledger.follow(request.request_id, leg.follower)
        try:
            refusal = await leg.see_through(self._place(request, query, self._deadline_s), self._placement_timeout_s)
            times.end = "" if refusal is None else "refused"
            return None if refusal is None else (leg.replica_id, refusal)
        except ReplicaLost:
            times.end = "lost"
            raise
        finally:
            if leg.is_replica_gone:
                self._gone.add(leg.replica_id)
            self._ledger.unfollow(request.request_id)

    def _resume(self, request: Request, indexes: range, num_resumes: int) -> None:
        """Go on elsewhere after the tokens that the client has, each sequence alone; together when there are none."""
        if not any(self._outputs[index].token_ids for index in indexes):
            self._start_leg(request, indexes, num_resumes)
            return
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
            self._start_leg(alone, range(index, index + 1), num_resumes)

    async def _cancel_legs(self) -> None:
        legs = set(self._legs)
        for task in legs:
            task.cancel()
        if legs:
            await asyncio.wait(legs)

    # Tokens

    def _try_take(self, leg: LegTimes, replica_id: str, delta: TokenDelta) -> None:
        """``_take``; whatever goes wrong is this call's, for its replica's feed carries others."""
        try:
            self._take(leg, replica_id, delta)
        except Exception as error:
            self.fail(error)

    def _take(self, leg: LegTimes, replica_id: str, delta: TokenDelta) -> None:
        """Pass a delta on to the client."""
        output = self._outputs[delta.index]
        self._replica_id = replica_id
        if self._times.first_token_s is None:
            self._num_cached_tokens = delta.num_cached_tokens
        now = time.monotonic()
        leg.take(delta.start, now)
        self._times.take(delta.index, len(delta.token_ids), now)
        output.token_ids.extend(delta.token_ids)
        text, stopped = output.text_stream.push(delta.text_token_ids)
        finish_reason = FinishReason.STOP if stopped else delta.finish_reason
        if stopped and delta.finish_reason is None:
            self._ledger.abort(delta.request_id, delta.index)
        elif finish_reason is not None and not stopped:
            text += output.text_stream.finish()
            finish_reason = FinishReason.STOP if output.text_stream.stopped else finish_reason
        if finish_reason is not None:
            output.is_done = True
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

    def fail(self, error: BaseException) -> None:
        """End the call with ``error``, which ``chunks`` raises; not where it has failed already."""
        if self._failure is None:
            self._failure = error
            if not self._is_done:  # its client may be long in reading: nobody else is to wait for that
                for leg in self._legs:
                    leg.cancel()
        self._ready.set()
