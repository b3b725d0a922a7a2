"""Runs a scheduler's steps on one rank, which holds the sequences, the KV blocks and the model."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable, Sequence
from itertools import accumulate

import torch
from safetensors import SafetensorError
from torch import Tensor

from shoal_replica.adapter import AdapterConfig
from shoal_replica.config import DEFAULT_NUM_SEQS, CacheConfig, ParallelConfig
from shoal_replica.errors import ConfigError
from shoal_replica.executor import (
    BlockPart,
    NewSequence,
    ScheduledSequence,
    SchedulerOutput,
    ScoredTokens,
    StepResult,
    TokenLogprobs,
    finish,
)
from shoal_replica.grammars import Grammars
from shoal_replica.model.decoder import make_decoder
from shoal_replica.model.parallel_group import ParallelGroup
from shoal_replica.model.sampler import Sampler
from shoal_replica.model.sequence_table import SequenceTable
from shoal_replica.model.step_sampler import StepSampler
from shoal_replica.model_config import ModelConfig
from shoal_replica.sampling_params import SamplingParams
from shoal_replica.shard import Shard


class ModelRunner:
    """An ``Executor`` in this process. Its constructor loads the model and allocates the whole block pool.

    As one of several ranks, it must be given every step, and the tokens of each step that another rank has sampled.

    Args:
        shard, group: this rank's part and how it reaches the others; None means the whole model on one rank.
        max_num_seqs: the most sequences of a step.

    Raises:
        NotFound, ConfigError: from ``make_decoder``.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        parallel_config: ParallelConfig,
        shard: Shard | None = None,
        group: ParallelGroup | None = None,
        adapters: Iterable[AdapterConfig] = (),
        max_num_seqs: int = DEFAULT_NUM_SEQS,
    ) -> None:
        torch.set_num_threads(parallel_config.num_threads)
        self._config = model_config
        self._block_size = cache_config.block_size
        self._decoder = make_decoder(model_config, cache_config, parallel_config, shard, group)
        for adapter in adapters:
            finish(self.load_adapter(adapter))
        self._samples = shard is None or shard.samples
        self._sequences = SequenceTable(model_config.max_model_len, self._block_size, max_num_seqs)
        self._grammars = Grammars(model_config)
        self._grammars_thread = threading.Thread(target=self._grammars.load, name="shoal-grammars")  # joined at exit
        self._sampler = Sampler(self._decoder.row_operators, self._grammars, model_config.eos_token_ids)
        self._step_sampler = StepSampler(self._sequences, self._sampler, model_config.eos_token_ids)
        self._forward_s = 0.0  # of the last step
        self._num_scored = 0  # tokens, by the last step
        if self._samples:
            self._grammars_thread.start()

    @property
    def progress(self) -> int:
        """A number that changes as a step progresses. Another thread may read it, until ``close``."""
        return self._decoder.progress + self._sampler.num_changed

    def load_adapter(self, adapter: AdapterConfig) -> Generator[None]:
        """See ``Executor.load_adapter``."""
        try:
            yield from self._decoder.load_adapter(adapter)
        except (OSError, ValueError, RuntimeError, MemoryError, SafetensorError) as error:
            # No memory for it, no such files on this host, or they have changed since they were checked.
            raise ConfigError(f"adapters.{adapter.title}: cannot be loaded: {error}") from None

    def unload_adapter(self, name: str) -> None:
        """Free an adapter that no sequence uses."""
        self._decoder.unload_adapter(name)

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Run one step, in the order that ``SchedulerOutput`` specifies."""
        started = time.perf_counter()
        for seq_id in output.dropped_seq_ids:
            self._sequences.drop(seq_id)
            self._sampler.forget(seq_id)
        for seq_id, token_id in output.chosen_tokens:
            self._sequences.append(seq_id, token_id)
        if output.moves_out:
            self._decoder.move_out(output.moves_out)
        if output.block_copies:
            self._decoder.copy_blocks(output.block_copies)
        if output.moves_in:
            self._decoder.move_in(output.moves_in)
        for new in output.new_sequences:
            self._sequences.add(new)
        for seq_id, first, block_ids in output.block_updates:
            self._sequences.set_blocks(seq_id, first, block_ids)
        if not output.scheduled:
            return StepResult(())
        logits = self._compute(self._sequences, output.scheduled)
        if not self._samples:
            return StepResult(())
        scored = self._score(output.scheduled, logits) if self._num_scored else ()
        shares, maxima = [share for share in output.scheduled if share.samples], self._decoder.maxima
        if self._num_scored:
            logits, maxima = logits[: len(shares)], None
        sampled = self._step_sampler.sample(shares, logits, maxima)
        step_s = time.perf_counter() - started
        drafts = self._step_sampler.find_drafts(sampled, output.num_drafts_wanted) if output.num_drafts_wanted else ()
        return StepResult(sampled, self._forward_s, scored, drafts, step_s)

    def take_sampled(self, tokens: Iterable[tuple[int, int]]) -> None:
        """On a rank that does not sample: append the last step's tokens, pairs of (sequence, token).

        Call it before the next step.
        """
        for seq_id, token_id in tokens:
            if not self._sequences[seq_id].num_candidates:  # else the scheduler chooses one
                self._sequences.append(seq_id, token_id)

    @property
    def copies_beside_steps(self) -> bool:
        return self._decoder.copies_beside_steps

    def read_blocks(self, block_ids: Sequence[int]) -> tuple[BlockPart, ...]:
        """The contents of blocks on this rank, as one part. Raises ConfigError if there is no memory for them."""
        try:
            return (BlockPart(self._decoder.block_layout, self._decoder.read_blocks(block_ids)),)
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(f"blocks: {error}") from None

    def write_blocks(self, block_ids: Sequence[int], parts: Sequence[BlockPart]) -> None:
        """Fill blocks on this rank. Raises ConfigError if the contents are of another kind."""
        here = self._decoder.block_layout
        if [part.layout for part in parts] != [here]:
            raise ConfigError(f"blocks: are of {', '.join(part.layout for part in parts)}; must be of {here}")
        try:
            self._decoder.write_blocks(block_ids, parts[0].contents)
        except (ValueError, RuntimeError, MemoryError) as error:
            raise ConfigError(f"blocks: {error}") from None

    def check_health(self) -> None:
        """Does nothing: a model in this process can fail only within a step."""

    def close(self) -> None:
        """Release weights and KV blocks. No step may follow."""
        if self._grammars_thread.is_alive():
            self._grammars_thread.join()
        self._decoder.close()

    def warm_up(self) -> None:
        """Run a small prefill and a decode in block 0 before any request, so that the first finds everything loaded."""
        num_tokens = min(self._block_size, self._config.max_model_len)
        sequences = SequenceTable(num_tokens, self._block_size, max_num_seqs=1)
        sequences.add(NewSequence(0, (0,) * (num_tokens + 1), num_tokens, 0, (0,), SamplingParams(), 0))
        for computed, new in ((0, num_tokens), (num_tokens - 1, 1)):
            self._compute(sequences, (ScheduledSequence(0, computed, new, True),))

    def _compute(self, sequences: SequenceTable, scheduled: tuple[ScheduledSequence, ...]) -> Tensor:
        """Logits of the scheduled sequences that sample, before each of their drafts too, then of the tokens that are
        scored, float32 [their number, vocab_size]; none if maxima suffice.
        """
        has_drafts = False
        for share in scheduled:
            if share.drafts:
                has_drafts = True
                sequences.propose(share.seq_id, share.drafts)
        ordered = sequences.by_adapter(scheduled)
        step = sequences.arrays(ordered)
        ends = list(accumulate(share.num_new_tokens for share in ordered)) if has_drafts else step.query_start_loc[1:]
        if ordered is not scheduled:
            end_of = {s.seq_id: end for s, end in zip(ordered, ends, strict=True)}
            ends = [end_of[s.seq_id] for s in scheduled]
        rows = [end - 1 for s, end in zip(scheduled, ends, strict=True) if s.samples]
        if has_drafts:
            rows = [row for s, end in zip(scheduled, ends, strict=True) for row in range(end - 1 - len(s.drafts), end)]
        wants_maxima_alone = all(sequences[s.seq_id].takes_likeliest for s in scheduled if s.samples)
        num_samples = len(rows)
        for share, end in zip(scheduled, ends, strict=True):
            if share.num_scored:
                first = end - share.num_new_tokens
                rows += range(first, first + share.num_scored)
        self._num_scored = len(rows) - num_samples
        started = time.perf_counter()
        logits = self._decoder.compute(step, rows, wants_maxima_alone and not self._num_scored)
        self._forward_s = time.perf_counter() - started
        return logits

    def _score(self, scheduled: tuple[ScheduledSequence, ...], logits: Tensor) -> tuple[ScoredTokens, ...]:
        """The log-probabilities of prompt tokens, from the last rows of ``logits``."""
        row, scored = sum(s.samples for s in scheduled), list[ScoredTokens]()
        for share in scheduled:
            if not share.num_scored:
                continue
            rows, after = range(row, row := row + share.num_scored), share.num_computed_tokens
            following = self._sequences.token_ids(share.seq_id)[after + 1 :][: len(rows)].tolist()
            num_top = self._sequences[share.seq_id].sampling_params.prompt_logprobs or 0
            found = self._decoder.row_operators.log_probabilities(logits, rows, following, [num_top] * len(rows))
            logprobs = (TokenLogprobs(token_id, *each) for token_id, each in zip(following, found, strict=True))
            scored.append(ScoredTokens(share.seq_id, after, tuple(logprobs)))
        return tuple(scored)
