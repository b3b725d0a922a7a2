"""One call's life in the gateway: placed, followed, resumed if its replica is lost, cancelled if its client leaves."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Set
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.serve.avoided import Avoided
from shoal_cluster.serve.call import Chunk, PromptRead, Usage
from shoal_cluster.serve.call_times import CallTimes, LegTimes
from shoal_cluster.serve.explanation import Refusal
from shoal_cluster.serve.gateway_ledger import GatewayLedger
from shoal_cluster.serve.journal import EventKind
from shoal_cluster.serve.leg import Leg, Placement, ReplicaLeft, ReplicaLost, ReplicaUnheard
from shoal_cluster.serve.outcome import Outcome
from shoal_cluster.serve.outputs import Outputs
from shoal_cluster.serve.request_id import leg_id
from shoal_cluster.serve.served_adapters import ServedAdapters
from shoal_replica.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, ShoalError, Unavailable
from shoal_replica.request import Request, TokenDelta
from shoal_replica.text_stream import TextStream
from shoal_replica.tokenizer import Tokenizer

MAX_RESUMES = 3
MAX_REFUSALS = 4
UNHEARD_S = 0.1  # pause before retrying a replica that has no feed to this gateway

Place = Callable[[Request, RouteQuery, float], Placement]  # the float is the call's deadline


class _Part(NamedTuple):
    """What a leg is for: sequences of the call, in a request that asks for them alone. ``num_resumes`` led to it."""

    request: Request
    indexes: range
    num_resumes: int


class Generation:
    """Runs one request. Iterate ``chunks()`` once; close the iterator to cancel.

    ``make_query`` says what places a request. ``times`` is notified of every token; the deadline counts from its
    ``arrived_s``. ``shown`` are special tokens that are text.
    """

    def __init__(
        self,
        request: Request,
        make_query: Callable[[Request], RouteQuery],
        ledger: GatewayLedger,
        place: Place,
        tokenizer: Tokenizer,
        placement_timeout_s: float,
        times: CallTimes,
        adapters: ServedAdapters | None = None,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._avoided = Avoided(ledger, adapters, request.adapter, placement_timeout_s)
        self._request = request
        self._make_query = make_query
        self._query = make_query(request)
        self._ledger = ledger
        self._place = place
        self._placement_timeout_s = placement_timeout_s
        self._loop = asyncio.get_running_loop()
        params = request.sampling_params
        texts = (TextStream.of(tokenizer, params, request.prompt_token_ids, shown) for _ in range(params.n))
        self._outputs = Outputs(texts)
        self._times = times
        self._num_cached_tokens = 0
        self._replica_id = ""
        self._num_legs = 0
        self._deadline_s = math.inf  # on time.monotonic's clock
        self.num_resumes = 0
        self._ready = asyncio.Event()
        self._failure: BaseException | None = None
        self._legs: set[asyncio.Task[None]] = set()
        self._is_over = False  # no more legs

    async def chunks(self, timeout_s: float) -> AsyncIterator[Chunk]:
        """Stream the call's chunks; the first one carries the prompt, the last one the usage.

        Raises:
            DeadlineExceeded: it was not finished ``timeout_s`` after its arrival, or could not be.
            InvalidArgument: it fits no replica, a replica found it invalid, or its id is that of a running request.
            ResourceExhausted, Unavailable: no replica would or could run it.
        """
        error = DeadlineExceeded(f"the request was not finished after {timeout_s:g} s")
        self._deadline_s = self._times.arrived_s + timeout_s
        deadline = self._loop.call_later(self._deadline_s - time.monotonic(), self.fail, error)
        refused_before = self._ledger.routes.refusal_of(self._request.request_id)
        self._start_leg(_Part(self._request, range(len(self._outputs.sequences)), num_resumes=0))
        is_first = True
        try:
            while True:
                await self._ready.wait()
                self._ready.clear()
                while self._outputs.has_chunks:
                    chunk = self._outputs.next_chunk()
                    if is_first:
                        prompt = PromptRead(tuple(self._request.prompt_token_ids), self._num_cached_tokens)
                        chunk, is_first = replace(chunk, prompt=prompt), False
                    if not self._outputs.has_chunks and self._outputs.is_done:
                        yield replace(chunk, usage=self.usage())
                        return
                    yield chunk
                if self._failure is not None:
                    raise self._failure
        finally:
            deadline.cancel()
            self._is_over = True
            if not self._outputs.is_done:  # else its calls are returning: cancelling one would count as a failure
                self._keep_end(refused_before)
                await self._cancel_legs()

    def _keep_end(self, refused_before: Refusal | None) -> None:
        """Record why there is no complete answer, for later explanation; for a client that left, only if its call was
        never placed.

        A refusal that the dispatcher has recorded meanwhile stands; it differs from ``refused_before``, which is that
        of an earlier call with this id. If the id is that of another running call, nothing is recorded: explanations
        by this id are about that call.
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

    def usage(self) -> Usage:
        """The call's token usage so far."""
        return Usage(
            num_prompt_tokens=self._request.num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=self._outputs.num_tokens,
            replica_id=self._replica_id,
            ttft_s=self._times.ttft_s or 0.0,
            num_resumes=self.num_resumes,
        )

    # Legs: a leg places a request until a replica runs it, for some or all of the call's sequences

    def _start_leg(self, part: _Part) -> None:
        if self._is_over or self._failure is not None:
            return  # a handover that comes just when its client has left
        task = self._loop.create_task(self._run_leg(part))
        self._legs.add(task)
        task.add_done_callback(self._end_leg)

    def _end_leg(self, task: asyncio.Task[None]) -> None:
        self._legs.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def _run_leg(self, part: _Part) -> None:
        """Place a part until a replica takes it, and follow it to its end or to the leg that resumes it."""
        full: dict[str, Outcome] = {}
        while len(full) < MAX_REFUSALS:
            try:
                refusal = await self._attempt(part, await self._avoided.once_there_is_another(full.keys()))
            except ReplicaLeft as error:  # not counted as a resume: little is computed again
                self._note_resume(f"moved: {error}")
                self._resume(part)
                return
            except ReplicaUnheard:  # nor is this one: it costs only time, which the deadline limits
                await asyncio.sleep(UNHEARD_S)
                self._resume(part)
                return
            except ReplicaLost as error:
                if part.num_resumes == MAX_RESUMES:
                    raise Unavailable(f"the request was resumed {MAX_RESUMES} times: {error}") from None
                self.num_resumes += 1
                self._note_resume(str(error))
                self._resume(part._replace(num_resumes=part.num_resumes + 1))
                return
            if refusal is None:
                return
            replica_id, outcome = refusal
            if not outcome.is_full or replica_id not in self._ledger.view:
                self._avoided.turn_from(replica_id)  # it leaves: another may come in its place
                continue
            full[replica_id] = outcome
            if not self._ledger.can_place(self._avoided.beside(full.keys())):
                break
        reason = next(reversed(full.values())).reason
        raise ResourceExhausted(f"refused by {len(full)} replicas: {reason}", retry_after_s=1.0)

    async def _attempt(self, part: _Part, excluded: Set[str]) -> tuple[str, Outcome] | None:
        """Place a part once and follow it to its end. Returns (replica, outcome) if that replica refused it."""
        self._num_legs += 1
        sent, query = self._as_sent(part.request, excluded)
        times = self._times.start_leg(time.monotonic())
        outputs = {index: self._outputs.sequences[index] for index in part.indexes}
        leg = Leg(outputs, times, self._try_take, partial(self._go_on, part, sent.request_id))
        self._ledger.follow(sent.request_id, leg)
        try:
            refusal = await leg.see_through(self._place(sent, query, self._deadline_s), self._placement_timeout_s)
            times.end = leg.end if refusal is None else "refused"
            return None if refusal is None else (leg.replica_id, refusal)
        except ReplicaLost as error:
            times.end = "moved" if isinstance(error, ReplicaLeft) else "lost"
            raise
        finally:
            times.ended_s = time.monotonic()
            if leg.is_replica_gone:
                self._avoided.add(leg.replica_id)
            self._ledger.unfollow(sent.request_id)

    def _as_sent(self, request: Request, excluded: Set[str]) -> tuple[Request, RouteQuery]:
        """A request under the id of its leg, and what places it elsewhere than on the ``excluded`` replicas."""
        query = self._query
        if self._num_legs > 1:
            request = replace(request, request_id=leg_id(self._request.request_id, self._num_legs))
            if request.output_token_ids:
                query = self._make_query(request)
            query = self._ledger.sources.with_blocks(replace(query, request_id=request.request_id))
        return request, replace(query, excluded=frozenset(excluded)) if excluded else query

    def _go_on(self, part: _Part, sent_id: str, leg: Leg, replica_id: str) -> None:
        """A replica has computed what it was asked for of a part, sent as ``sent_id``: others go on with the rest."""
        leg.times.end = leg.end
        self._ledger.phases.forget(sent_id)
        num_blocks = len(self._query.block_hashes)
        self._ledger.sources.note_left(self._request.request_id, replica_id, num_blocks, time.monotonic())
        self._resume(part)

    def _note_resume(self, why: str) -> None:
        request_id = self._request.request_id
        self._ledger.journal.note(EventKind.RESUMED, why, replica_id=self._replica_id, request_id=request_id)

    def _resume(self, part: _Part) -> None:
        """Go on elsewhere after the tokens that the client has: each sequence in its own leg, or, while there are no
        tokens, all in one. A beam search gives its tokens at its end, and would give the same ones again.
        """
        params = part.request.sampling_params
        if params.is_beam_search or not any(self._outputs.sequences[index].token_ids for index in part.indexes):
            self._start_leg(part)
            return
        for index in part.indexes:
            output = self._outputs.sequences[index]
            if output.is_done:
                continue
            alone = replace(
                part.request,
                sampling_params=replace(params, n=1, prompt_logprobs=None),
                output_token_ids=tuple(output.token_ids),
                index=index,
            )
            self._start_leg(_Part(alone, range(index, index + 1), part.num_resumes))

    async def _cancel_legs(self) -> None:
        legs = set(self._legs)
        for task in legs:
            task.cancel()
        if legs:
            await asyncio.wait(legs)

    # Tokens

    def _try_take(self, leg: LegTimes, replica_id: str, delta: TokenDelta) -> None:
        """``_take``, with any error made this call's failure: its replica's feed also carries other calls."""
        try:
            self._take(leg, replica_id, delta)
        except Exception as error:
            self.fail(error)

    def _take(self, leg: LegTimes, replica_id: str, delta: TokenDelta) -> None:
        """Count and time a delta, and pass it on to the client."""
        self._replica_id = replica_id
        if self._times.first_token_s is None:
            self._num_cached_tokens = delta.num_cached_tokens
        now = time.monotonic()
        leg.take(delta.start, now)
        self._times.take(delta.index, len(delta.token_ids), now, delta.start is not None)
        if self._outputs.take(delta):
            self._ledger.abort(delta.request_id, delta.index)
        if self._outputs.has_chunks:
            self._ready.set()

    def fail(self, error: BaseException) -> None:
        """End the call with ``error``, which ``chunks`` raises; not where it has failed already."""
        if self._failure is None:
            self._failure = error
            if not self._outputs.is_done:
                for leg in self._legs:  # at once: a slow client may not read the error for long, others need the room
                    leg.cancel()
        self._ready.set()
