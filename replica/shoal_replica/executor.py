"""The messages between scheduler and model. Nothing else of a step is sent to the ranks.

A sequence is sent in full once (``NewSequence``); later steps carry only what has changed. Messages are msgspec
structs, encoded in a step's frame as plain arrays.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from shoal_replica.adapter import AdapterConfig
from shoal_replica.sampling_params import SamplingParams

T = TypeVar("T")

MAX_SCORED_TOKENS = 64
"""Most prompt tokens of a step whose log-probabilities are found. Each takes a row of logits, a float per token of the
vocabulary, and so many keep a processor's matrix products busy.
"""


MAX_DRAFT_TOKENS = MAX_SCORED_TOKENS
"""Most drafts of a step. They take the place of scored tokens: a step has either."""


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that the executor does not hold: a new one, or one that resumes after preemption."""

    seq_id: int
    token_ids: tuple[int, ...]  # prompt, then tokens generated so far
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    sampling_params: SamplingParams
    index: int  # with the seed, selects the random stream
    num_candidates: int = 0  # above 0: sampling finds so many of the likeliest tokens, and appends none
    adapter: str = ""  # name of its LoRA adapter


class ScheduledSequence(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's share of a step.

    The executor computes tokens ``[num_computed_tokens, num_computed_tokens + num_new_tokens)`` and, only if
    ``samples`` is set, samples one more token and appends it to its own copy. After each of the first ``num_scored`` it
    finds the log-probability of the prompt's next token.

    The last of the tokens may be ``drafts``, which the sequence does not have yet. A token is then sampled before each
    of them too, and up to the first that differs from its draft all are appended. Such a step computes no prompts.
    """

    seq_id: int
    num_computed_tokens: int
    num_new_tokens: int
    samples: bool
    num_scored: int = 0
    drafts: tuple[int, ...] = ()


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True):
    """One step.

    Order of execution: drop ``dropped_seq_ids``; append ``chosen_tokens``; copy ``moves_out`` (block, row of host
    memory); apply ``block_copies`` (source, destination; every source is read as it was before all of them); copy
    ``moves_in`` (row, block); add ``new_sequences``; apply ``block_updates``; compute ``scheduled``.
    """

    step: int
    scheduled: tuple[ScheduledSequence, ...]
    new_sequences: tuple[NewSequence, ...] = ()
    block_updates: tuple[tuple[int, int, tuple[int, ...]], ...] = ()  # (seq_id, first index, block ids from there on)
    block_copies: tuple[tuple[int, int], ...] = ()
    dropped_seq_ids: tuple[int, ...] = ()  # finished or preempted
    moves_out: tuple[tuple[int, int], ...] = ()
    moves_in: tuple[tuple[int, int], ...] = ()
    chosen_tokens: tuple[tuple[int, int], ...] = ()  # (seq_id, token), of sequences with ``num_candidates``
    num_drafts_wanted: int = 0  # most draft tokens to find for each sequence after the step

    @property
    def num_tokens(self) -> int:
        return sum(s.num_new_tokens for s in self.scheduled)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of a sampled token and of the likeliest tokens: natural log, before temperature."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """The token of a sequence. With ``num_candidates`` it is only the likeliest, and the others are in
    ``logprobs.top``. ``is_cut``: the sequence cannot go on in the form that it must have.
    """

    seq_id: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    is_cut: bool = False


class ScoredTokens(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of consecutive prompt tokens of a sequence, of which the first comes after token ``after``."""

    seq_id: int
    after: int
    logprobs: tuple[TokenLogprobs, ...]


class Draft(msgspec.Struct, frozen=True, array_like=True):
    """Draft tokens, which may follow the ``num_tokens`` tokens of a sequence. The last ``num_matched`` of these have
    been followed by them before.
    """

    seq_id: int
    num_tokens: int
    num_matched: int
    token_ids: tuple[int, ...]


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """One sampled token for each scheduled sequence with ``samples``, and one more for each of its drafts that was
    right; what was scored of each with ``num_scored``; and what may follow. All in the order of the sequences.

    ``step_s`` is how many seconds the step took until its tokens were known, ``forward_s`` the model's part of them.
    """

    sampled: tuple[SampledToken, ...]
    forward_s: float = 0.0
    scored: tuple[ScoredTokens, ...] = ()
    drafts: tuple[Draft, ...] = ()
    step_s: float = 0.0

    def by_sequence(self) -> dict[int, list[SampledToken]]:
        """The sampled tokens, by sequence."""
        tokens: dict[int, list[SampledToken]] = {}
        for token in self.sampled:
            tokens.setdefault(token.seq_id, []).append(token)
        return tokens


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The time of one step: ``seconds`` from scheduling it to its last token, of which ``forward_s`` in the model."""

    output: SchedulerOutput
    seconds: float
    forward_s: float


class BlockPart(msgspec.Struct, frozen=True, array_like=True):
    """What one rank holds of some blocks. ``layout`` says of what kind and shape the contents are: only a rank with the
    same can take them over.
    """

    layout: str
    contents: memoryview


class Executor(Protocol):
    """Runs steps. ``execute`` blocks until the step is done and raises if the model failed."""

    def execute(self, output: SchedulerOutput) -> StepResult: ...

    def check_health(self) -> None:
        """Raise if the model can run no more steps. Called between steps."""
        ...

    def load_adapter(self, adapter: AdapterConfig) -> Generator[None]:
        """Load an adapter, part by part: each is loaded when the next item is taken, between steps. Steps may use it at
        the end. Raises ConfigError; then, and if it is closed before, nothing has changed.
        """
        ...

    def unload_adapter(self, name: str) -> None:
        """Free an adapter that no sequence uses. Called between steps."""
        ...

    @property
    def copies_beside_steps(self) -> bool:
        """Whether another thread may read and write blocks that no step uses while one runs."""
        ...

    def read_blocks(self, block_ids: Sequence[int]) -> tuple[BlockPart, ...]:
        """The contents of blocks, one part for each rank. Unless it ``copies_beside_steps``, called between steps.
        Raises ConfigError if there is no memory for them.
        """
        ...

    def write_blocks(self, block_ids: Sequence[int], parts: Sequence[BlockPart]) -> None:
        """Fill blocks with what ``read_blocks`` of an executor of the same kind has returned. Called like that. Raises
        ConfigError if they are of another kind; the contents of the blocks are then undefined.
        """
        ...

    def close(self) -> None: ...


def finish(parts: Generator[None, None, T]) -> T:
    """Do all parts of some work, one right after the other. Returns its result."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: T = end.value
            return result
