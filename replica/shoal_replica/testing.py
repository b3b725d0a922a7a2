"""Fakes shipped with the product: a model-free executor and short factories for tests, the simulator and demos."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from itertools import pairwise
from zlib import crc32

import msgspec

from shoal_replica.adapter import AdapterConfig
from shoal_replica.beam_search import BeamSearch, num_candidates
from shoal_replica.config import CacheConfig, SchedulerConfig
from shoal_replica.errors import ConfigError
from shoal_replica.executor import (
    MAX_SCORED_TOKENS,
    BlockPart,
    Draft,
    NewSequence,
    SampledToken,
    ScheduledSequence,
    SchedulerOutput,
    ScoredTokens,
    StepResult,
    TokenLogprobs,
)
from shoal_replica.finish_rule import FinishRule
from shoal_replica.partial_reuse import WORTH_A_COPY
from shoal_replica.prefix_cache import BlockHash
from shoal_replica.request import Request
from shoal_replica.sampling_params import SamplingParams
from shoal_replica.scheduler import Scheduler

FAKE_VOCAB_SIZE = 32_000
NUM_ADAPTER_PARTS = 5
_MASK = 2**64 - 1


def mix(state: int, value: int) -> int:
    """One step of a splitmix64 chain: equal in every process, different for every history."""
    state = (state ^ (value + 0x9E3779B97F4A7C15 + (state << 6) + (state >> 2))) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    return state ^ (state >> 31)


def _begin(adapter: str) -> int:
    """The state before a text's first token: an adapter changes what the model makes of all of them."""
    return mix(0, crc32(adapter.encode())) if adapter else 0


def expected_tokens(token_ids: Sequence[int], count: int, index: int = 0, adapter: str = "") -> list[int]:
    """The ``count`` tokens FakeExecutor generates after ``token_ids``, computed without blocks or batches."""
    state, output = _begin(adapter), []
    for token_id in token_ids:
        state = mix(state, token_id)
    for _ in range(count):
        output.append(_draw(state, index))
        state = mix(state, output[-1])
    return output


def expected_prompt_logprobs(token_ids: Sequence[int], num_top: int, adapter: str = "") -> list[TokenLogprobs]:
    """What FakeExecutor scores of a prompt: all its tokens but the first."""
    state, scored = _begin(adapter), []
    for token_id, following in pairwise(token_ids):
        state = mix(state, token_id)
        scored.append(_score(state, following, num_top))
    return scored


def expected_beams(request: Request, finish: FinishRule) -> list[list[int]]:
    """The answers of a beam search on FakeExecutor's model, best first, computed without blocks or batches."""
    search, count = BeamSearch(request, finish), num_candidates(request, finish)
    while not search.is_done:
        tops = []
        for beam in search.beams:
            state = _begin(request.adapter)
            for token_id in (*request.prompt_token_ids, *beam.token_ids):
                state = mix(state, token_id)
            tops.append(_likeliest(state, count))
        search.advance(tops)
    return [list(found.beam.token_ids) for found in search.finished[: request.sampling_params.n]]


def _likeliest(state: int, count: int) -> TokenLogprobs:
    """``count`` tokens of a small vocabulary, with log-probabilities that depend on all tokens before."""
    scored = sorted(((_logprob(state, token_id), token_id) for token_id in range(count)), reverse=True)
    top = tuple((token_id, logprob) for logprob, token_id in scored)
    return TokenLogprobs(*top[0], top)


def _score(state: int, token_id: int, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, _logprob(state, token_id), _likeliest(state, 1 + num_top).top[:num_top])


def _logprob(state: int, token_id: int) -> float:
    return -(1 + mix(state, token_id) % 4093) / 512


def _draw(state: int, index: int) -> int:
    return mix(state, index) % FAKE_VOCAB_SIZE


class FakeExecutor:
    """An executor whose "KV" is a hash of all tokens so far, kept in real block slots.

    A step reads what its sequence left in the blocks, as attention does, and checks it: a wrong block table, a missed
    copy or a block given out twice fails an assertion.

    With ``drafts`` it offers some where they are wanted, of which the first are right, and tells times by which some
    are worth computing.
    """

    def __init__(self, cache_config: CacheConfig, drafts: bool = False) -> None:
        self._offers_drafts = drafts
        self._block_size = cache_config.block_size
        self._slots = [[0] * cache_config.block_size for _ in range(cache_config.num_blocks)]
        self._rows = [[0] * cache_config.block_size for _ in range(cache_config.num_host_blocks)]
        self._sequences: dict[int, NewSequence] = {}
        self._tokens: dict[int, list[int]] = {}
        self._tables: dict[int, list[int]] = {}
        self.is_closed = False
        self.layout = "fake"
        self.copies_beside_steps = False
        self.adapters: dict[str, AdapterConfig] = {}
        self._gone: set[str] = set()  # adapters that have been unloaded

    def load_adapter(self, adapter: AdapterConfig) -> Generator[None]:
        if adapter.folder == "refuse":
            raise ConfigError(f"adapters.{adapter.name}: is refused")
        for _ in range(NUM_ADAPTER_PARTS):
            yield
        self._gone.discard(adapter.name)
        self.adapters[adapter.name] = adapter

    def unload_adapter(self, name: str) -> None:
        del self.adapters[name]
        self._gone.add(name)

    def execute(self, output: SchedulerOutput) -> StepResult:
        for seq_id in output.dropped_seq_ids:
            del self._sequences[seq_id], self._tokens[seq_id], self._tables[seq_id]
        for seq_id, token_id in output.chosen_tokens:
            self._tokens[seq_id].append(token_id)
        for block_id, row in output.moves_out:
            self._rows[row][:] = self._slots[block_id]
        copied = [(destination, [*self._slots[source]]) for source, destination in output.block_copies]
        for destination, slots in copied:
            self._slots[destination][:] = slots
        for row, block_id in output.moves_in:
            self._slots[block_id][:] = self._rows[row]
        for new in output.new_sequences:
            self._sequences[new.seq_id] = new
            self._tokens[new.seq_id] = list(new.token_ids)
            self._tables[new.seq_id] = list(new.block_ids)
        for seq_id, first_index, block_ids in output.block_updates:
            self._tables[seq_id][first_index:] = block_ids
        self._scored: list[ScoredTokens] = []
        sampled = tuple(token for s in output.scheduled for token in self._compute(s))
        assert sum(len(scored.logprobs) for scored in self._scored) <= MAX_SCORED_TOKENS
        if not self._offers_drafts:
            return StepResult(sampled, scored=tuple(self._scored))
        seconds = 1.0 + output.num_tokens / (64 if output.num_tokens > 2 * len(output.scheduled) else 8)
        drafts = self._find_drafts(sampled, output.num_drafts_wanted)
        return StepResult(sampled, scored=tuple(self._scored), drafts=drafts, step_s=seconds)

    def _find_drafts(self, sampled: Sequence[SampledToken], num_wanted: int) -> tuple[Draft, ...]:
        """Up to ``num_wanted`` tokens that follow each sequence, the first few of them right."""
        drafts: list[Draft] = []
        for seq_id in dict.fromkeys(token.seq_id for token in sampled):
            sequence, tokens = self._sequences[seq_id], self._tokens[seq_id]
            lot = mix(len(tokens), seq_id)
            if num_wanted and not sequence.num_candidates and lot % 3:
                right = expected_tokens(tokens, 1 + lot % num_wanted, sequence.index, sequence.adapter)
                right[lot % 7 % len(right) :] = [0]
                drafts.append(Draft(seq_id, len(tokens), 1 + lot % 9, tuple(right)))
        return tuple(drafts)

    def _compute(self, scheduled: ScheduledSequence) -> list[SampledToken]:
        adapter = self._sequences[scheduled.seq_id].adapter
        assert adapter not in self._gone
        tokens, table = self._tokens[scheduled.seq_id], self._tables[scheduled.seq_id]
        tokens, own = [*tokens, *scheduled.drafts], tokens
        sampled: list[SampledToken] = []
        start, end = scheduled.num_computed_tokens, scheduled.num_computed_tokens + scheduled.num_new_tokens
        state = self._check_read(_begin(adapter), tokens[:start], table)
        scored: list[TokenLogprobs] = []
        for position in range(start, end):
            state = mix(state, tokens[position])
            if position < start + scheduled.num_scored:
                num_top = self._sequences[scheduled.seq_id].sampling_params.prompt_logprobs
                assert num_top is not None
                scored.append(_score(state, tokens[position + 1], num_top))
            self._slots[table[position // self._block_size]][position % self._block_size] = state
            if scheduled.samples and own == tokens[: position + 1]:  # else a draft was wrong
                sampled.append(self._sample(scheduled.seq_id, state))
        if scored:
            self._scored.append(ScoredTokens(scheduled.seq_id, start, tuple(scored)))
        return sampled

    def _sample(self, seq_id: int, state: int) -> SampledToken:
        sequence = self._sequences[seq_id]
        if sequence.num_candidates:
            found = _likeliest(state, sequence.num_candidates)
            return SampledToken(seq_id, found.token_id, found)
        token_id = _draw(state, sequence.index)
        self._tokens[seq_id].append(token_id)
        return SampledToken(seq_id, token_id)

    def _check_read(self, state: int, tokens: Sequence[int], table: list[int]) -> int:
        """Check all tokens before those of the step: attention reads every one of them, not just the last. Returns the
        state after them.
        """
        for position, token_id in enumerate(tokens):
            state = mix(state, token_id)
            held = self._slots[table[position // self._block_size]][position % self._block_size]
            assert held == state, f"position {position} holds another sequence's"
        return state

    def read_blocks(self, block_ids: Sequence[int]) -> tuple[BlockPart, ...]:
        return (BlockPart(self.layout, memoryview(msgspec.msgpack.encode([self._slots[i] for i in block_ids]))),)

    def write_blocks(self, block_ids: Sequence[int], parts: Sequence[BlockPart]) -> None:
        if [part.layout for part in parts] != [self.layout]:
            raise ConfigError(f"blocks: are of {parts[0].layout}; must be of {self.layout}")
        contents = msgspec.msgpack.decode(parts[0].contents, type=list[list[int]])
        for block_id, slots in zip(block_ids, contents, strict=True):
            self._slots[block_id][:] = slots

    def check_health(self) -> None:
        """Never fails."""

    def close(self) -> None:
        self.is_closed = True


def make_request(
    request_id: str = "request",
    prompt_token_ids: Sequence[int] = (1, 2, 3),
    *,
    max_tokens: int = 4,
    n: int = 1,
    beam_width: int = 1,
    arrival_s: float = 0.0,
    due_s: float = math.inf,
    priority: int = 0,
    output_token_ids: Sequence[int] = (),
    tenant: str = "",
    yields: bool = False,
    block_hashes: Sequence[BlockHash] = (),
    cache_salt: str = "",
    adapter: str = "",
    prompt_logprobs: int | None = None,
) -> Request:
    """A greedy request that ignores end-of-sequence tokens."""
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt_token_ids),
        sampling_params=SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            n=n,
            seed=0,
            ignore_eos=True,
            beam_width=beam_width,
            prompt_logprobs=prompt_logprobs,
        ),
        output_token_ids=tuple(output_token_ids),
        arrival_s=arrival_s,
        due_s=due_s,
        priority=priority,
        tenant=tenant,
        yields=yields,
        block_hashes=tuple(block_hashes),
        cache_salt=cache_salt,
        adapter=adapter,
    )


def num_reused_tokens(num_prompt_tokens: int, num_drawn: int, block_size: int) -> int:
    """Tokens that a prompt finds cached if only the same prompt ran before, with ``num_drawn`` tokens sampled."""
    num_whole = (num_prompt_tokens - 1) // block_size * block_size
    num_filled = (num_prompt_tokens + num_drawn - 1) // block_size * block_size  # the last sampled one is not computed
    part = num_prompt_tokens - 1 - num_whole
    return num_whole + (part if num_filled > num_whole and part * WORTH_A_COPY >= block_size else 0)


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_model_len: int = 128,
    enable_prefix_caching: bool = True,
    policy: str = "fcfs",
    num_host_blocks: int = 0,
    adapters: Sequence[str] = (),
    num_speculative_tokens: int = 0,
) -> tuple[Scheduler, FakeExecutor]:
    """A small scheduler and the fake executor that fits it."""
    cache = CacheConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
        num_host_blocks=num_host_blocks,
    )
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        policy=policy,
        num_speculative_tokens=num_speculative_tokens,
    )
    scheduler = Scheduler(config, cache, min(max_model_len, num_blocks * block_size), (), adapters)
    return scheduler, FakeExecutor(cache, drafts=num_speculative_tokens > 0)
