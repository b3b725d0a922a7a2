"""Request (what was asked for), Sequence (how far it has got), and the table of allowed status transitions."""

from __future__ import annotations

import math
from collections.abc import MutableSequence
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple

import msgspec

from shoal_replica.executor import SampledToken, ScheduledSequence, TokenLogprobs
from shoal_replica.partial_reuse import Tokens
from shoal_replica.prefix_cache import BlockHash, extend_block_hashes
from shoal_replica.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a sequence ended. Every sequence ends with exactly one."""

    STOP = "stop"  # an end-of-sequence token, a stop token id or a stop string
    LENGTH = "length"  # max_tokens or the model's context is used up, or a structured answer cannot be completed
    ABORT = "abort"  # the caller cancelled it, or the engine was stopped
    ERROR = "error"  # the engine failed
    PREFILLED = "prefilled"  # its prompt is computed, and that was all that was asked for here
    MOVED = "moved"  # it was handed back, to go on elsewhere


GOES_ON = frozenset({FinishReason.PREFILLED, FinishReason.MOVED})
"""Ends at one replica of what goes on at another: no client is told of them."""


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again; its blocks were freed, its tokens kept
    FINISHED = "finished"


TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.RUNNING: frozenset({SequenceStatus.PREEMPTED, SequenceStatus.FINISHED}),
    SequenceStatus.PREEMPTED: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generate call, tokenised.

    Attributes:
        request_id: unique in the cluster.
        prompt_token_ids: at least one token; never modified.
        sampling_params: with ``seed`` resolved, so that a resumed request draws the same tokens.
        output_token_ids: tokens already emitted by another replica; generation continues after them.
        index: number of the first sequence; a resumed sequence of an ``n > 1`` request keeps its own.
        priority: lower runs first, except under the ``fcfs`` policy.
        arrival_s: arrival time, on the engine's clock.
        due_s: when its first token is due, on the same clock; under the ``deadline`` policy the earliest runs first.
        cache_salt: separates the prefix caches of tenants.
        adapter: name of the LoRA adapter that computes it; "" for the model alone.
        tenant: whose request it is.
        yields: its tenant had most of the service lately, so its prompt is computed in pieces: a request that arrives
            meanwhile then does not wait for a long step.
        block_hashes: hashes of the full blocks of its tokens, if already known; missing ones are computed on arrival.
        is_prefill_only: each of its sequences ends here with its first token, and goes on elsewhere.
    """

    request_id: str
    prompt_token_ids: Items[int]
    sampling_params: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    index: int = 0
    priority: int = 0
    arrival_s: float = 0.0
    due_s: float = math.inf
    cache_salt: str = ""
    adapter: str = ""
    tenant: str = ""
    yields: bool = False
    block_hashes: tuple[BlockHash, ...] = ()
    is_prefill_only: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of its prompt are asked for."""
        return self.sampling_params.prompt_logprobs is not None

    @property
    def uses_prefix_cache(self) -> bool:
        """Whether its blocks may come from the prefix cache and enter it."""
        return not self.is_scored  # what is found there cannot be scored

    def known_token_ids(self) -> MutableSequence[int]:
        """The tokens with which a sequence of this request starts."""
        return [*self.prompt_token_ids, *self.output_token_ids]


@dataclass(slots=True, eq=False)  # one sequence is one object: queues find it by identity
class Sequence:
    """Progress of one sequence of a request. Only the scheduler writes it.

    ``num_computed_tokens`` counts tokens whose KV is in blocks. All that the engine does is raise it to ``num_tokens``;
    then one more token is sampled.
    """

    seq_id: int
    request: Request
    index: int
    token_ids: MutableSequence[int]
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache when it first ran
    num_preemptions: int = 0
    first_scheduled_s: float | None = None
    finish_reason: FinishReason | None = None
    block_hashes: list[BlockHash] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt's tokens from the second on
    order: int = -1  # its place among those of equal rank: its seq_id, but of a beam that of the request's first
    is_scored: bool = field(init=False)  # whether it is the sequence of its request whose prompt is scored

    def __post_init__(self) -> None:
        self.is_scored = self.request.is_scored and self.index == self.request.index
        if self.order < 0:
            self.order = self.seq_id

    @property
    def tokens(self) -> Tokens | None:
        """As the prefix cache knows them; None if it is not to know them."""
        if not self.request.uses_prefix_cache:
            return None
        return Tokens(self.token_ids, self.request.cache_salt, self.request.adapter)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_behind(self) -> int:
        """Tokens still to compute; 1 while it decodes."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return self.request.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def unstarted_indexes(self) -> range:
        """Indexes of the sibling sequences that this one starts when it samples its first token."""
        params = self.request.sampling_params
        if self.index != self.request.index or self.num_output_tokens or params.is_beam_search:
            return range(0)
        return range(self.request.index + 1, self.request.index + params.n)

    def move(self, status: SequenceStatus) -> None:
        """Change status along TRANSITIONS; anything else is a bug."""
        if status not in TRANSITIONS[self.status]:
            raise RuntimeError(f"sequence {self.seq_id}: {self.status.value} cannot become {status.value}")
        self.status = status

    def start(self, now: float) -> None:
        """The sequence runs for the first time; its ``num_computed_tokens`` are those found in the cache."""
        self.first_scheduled_s = now
        self.num_cached_tokens = min(self.num_computed_tokens, self.num_prompt_tokens)

    def advance(self, share: ScheduledSequence, num_accepted: int) -> int:
        """A step has computed ``share`` of it, of whose drafts the first were right and become its tokens. Returns its
        number of computed tokens.
        """
        if num_accepted:
            self.token_ids.extend(share.drafts[:num_accepted])
        num_computed = share.num_computed_tokens + share.num_new_tokens - len(share.drafts) + num_accepted
        self.num_computed_tokens = num_computed
        return num_computed

    def preempt(self) -> None:
        """The sequence has lost its blocks and waits again."""
        self.move(SequenceStatus.PREEMPTED)
        self.num_computed_tokens = 0
        self.num_preemptions += 1

    def extend_hashes(self, block_size: int) -> None:
        """Hash the blocks that ``token_ids`` has filled since the last call."""
        request = self.request
        if request.uses_prefix_cache:
            extend_block_hashes(self.block_hashes, self.token_ids, block_size, request.cache_salt, request.adapter)

    def num_scored(self, start: int, end: int) -> int:
        """How many of the tokens ``[start, end)``, which are to be computed, are followed by a prompt token whose
        log-probability is asked for.
        """
        if not self.is_scored or self.num_output_tokens:
            return 0  # with the first token it has been told
        return max(0, min(end, self.num_prompt_tokens - 1) - start)

    def delta(
        self, index: int, tokens: Items[SampledToken], finish_reason: FinishReason | None, now: float = 0.0
    ) -> TokenDelta:
        """The delta for the client: ``tokens``, which were appended last and sampled at ``now``, or an end without any.

        ``index`` is the sequence's own, or that of a sibling that ends without having started.
        """
        request, start, first_s = self.request, None, self.first_scheduled_s
        position = len(self.token_ids) - len(request.prompt_token_ids) - len(tokens)
        is_first = len(tokens) > 0 and position == len(request.output_token_ids) and index == request.index
        if is_first and first_s is not None:
            start = StartTimes(first_s - request.arrival_s, max(0.0, now - first_s))
        scored = tuple(self.prompt_logprobs) if is_first else ()
        if scored:
            self.prompt_logprobs = []  # they are told once
        return TokenDelta(
            request_id=request.request_id,
            index=index,
            position=position,
            token_ids=tuple(token.token_id for token in tokens),
            num_cached_tokens=self.num_cached_tokens,
            start=start,
            logprobs=tuple(token.logprobs for token in tokens if token.logprobs is not None),
            finish_reason=finish_reason,
            prompt_logprobs=scored,
        )


class StartTimes(NamedTuple):
    """A request's times at a replica, in seconds: from arrival to its first step, and from there to its first token."""

    queue_s: float
    prefill_s: float


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one sequence. ``position`` counts the output tokens before these.

    ``start`` is set for the first token of a request at a replica, and with it come ``prompt_logprobs``, if asked for.
    Of a beam search it comes by itself, without tokens, once the prompt is computed.
    """

    request_id: str
    index: int
    position: int
    token_ids: tuple[int, ...]
    num_cached_tokens: int
    start: StartTimes | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    def pieces(self, size: int) -> list[TokenDelta]:
        """The same in deltas of at most ``size`` tokens; a single one where that is enough."""
        if len(self.token_ids) <= size:
            return [self]
        starts = range(0, len(self.token_ids), size)
        return [
            msgspec.structs.replace(
                self,
                position=self.position + start,
                token_ids=self.token_ids[start : start + size],
                start=None if start else self.start,
                logprobs=self.logprobs[start : start + size],
                finish_reason=self.finish_reason if start == starts[-1] else None,
                prompt_logprobs=() if start else self.prompt_logprobs,
            )
            for start in starts
        ]

    def stopped_after(self, num_tokens: int) -> TokenDelta:
        """The same, ended by a stop string that the first ``num_tokens`` of its tokens complete."""
        return msgspec.structs.replace(
            self,
            token_ids=self.token_ids[:num_tokens],
            logprobs=self.logprobs[:num_tokens],
            finish_reason=FinishReason.STOP,
        )

    def text_token_ids(self, includes_stop: bool = False) -> tuple[int, ...]:
        """The tokens whose text is part of the answer: all but an end-of-sequence or stop token that ends it, unless
        that is asked for.
        """
        is_ended = self.finish_reason is FinishReason.STOP and not includes_stop
        return self.token_ids[:-1] if is_ended else self.token_ids
