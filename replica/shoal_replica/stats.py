"""A replica's own statistics, with a timestamp and safe to send to other processes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

DUE_WITHIN_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, math.inf)


@dataclass(slots=True)
class Totals:
    """Counters of a scheduler's work since it was created."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_host_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    num_refused: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_blocks_given: int = 0
    num_blocks_taken: int = 0

    def note_drafts(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count draft tokens that a step has computed, and those that were right."""
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens

    def note_start(self, num_prompt_tokens: int, num_cached_tokens: int, num_from_host: int) -> None:
        """Count a prompt that has started; ``num_from_host`` of its cached tokens were matched in host memory."""
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += num_cached_tokens
        self.num_host_cached_tokens += min(num_cached_tokens, num_from_host)

    def as_dict(self) -> dict[str, int]:
        """By name, for ``ReplicaStats``. Written out for speed, as it is called after every step."""
        return {
            "num_steps": self.num_steps,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_host_cached_tokens": self.num_host_cached_tokens,
            "num_generated_tokens": self.num_generated_tokens,
            "num_finished": self.num_finished,
            "num_preemptions": self.num_preemptions,
            "num_refused": self.num_refused,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_blocks_given": self.num_blocks_given,
            "num_blocks_taken": self.num_blocks_taken,
        }


class ReplicaStats(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The block ledger and load of one replica, as of ``time_s``. Owner: the replica's scheduler, after each step.

    Blocks are counted once: ``num_total_blocks = num_allocated_blocks + num_free_blocks``; of the free ones
    ``num_cached_blocks`` still hold a prefix that a new request may reuse (they are evicted last).

    Attributes:
        time_s: wall-clock time of the count (``time.time()`` of the replica's host).
        num_waiting_tokens: tokens still to compute for waiting and running sequences, minus those that a waiting one is
            expected to find cached when its turn comes.
        num_host_blocks, num_host_cached_blocks: rows of host memory, and how many of them hold a prefix (which the
            device may hold as well).
        num_blocks_out, num_blocks_in: blocks moved to host memory and back; totals since the replica started.
        step_s, busy_s: duration of the last step, and of all steps since the replica started, in seconds.
        token_s: seconds per prompt token, a moving mean over steps that were mostly prefill; 0 before the first.
        full_token_s: the same for the fastest of the recent full steps, to compare replicas by; 0 if there were none.
        by_due: whether the ``deadline`` policy is used: a later arrival that is due sooner still goes first.
        due_tokens: see ``due_profile``.
        num_prompt_tokens, num_cached_tokens, num_generated_tokens, num_finished, num_preemptions, num_refused,
            num_steps: totals since the replica started. Of a request that began at another replica only the prompt's
            tokens count that had to be computed again; one that goes on elsewhere has not finished.
        num_draft_tokens, num_accepted_tokens: totals of the draft tokens that steps computed, and of those that were
            right.
        num_host_cached_tokens: of ``num_cached_tokens``, those that came back from host memory.
        num_blocks_given, num_blocks_taken: cached blocks copied to other replicas and from them; totals.
    """

    time_s: float
    block_size: int
    num_total_blocks: int
    num_free_blocks: int
    num_allocated_blocks: int
    num_cached_blocks: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    step_s: float = 0.0
    token_s: float = 0.0
    full_token_s: float = 0.0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    num_refused: int = 0
    busy_s: float = 0.0
    draining: bool = False
    by_due: bool = False
    due_tokens: tuple[int, ...] = ()
    num_host_blocks: int = 0
    num_host_cached_blocks: int = 0
    num_host_cached_tokens: int = 0
    num_blocks_out: int = 0
    num_blocks_in: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_blocks_given: int = 0
    num_blocks_taken: int = 0

    @property
    def utilization(self) -> float:
        """Share of blocks that running sequences hold, in [0, 1]."""
        return self.num_allocated_blocks / self.num_total_blocks if self.num_total_blocks else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in the prefix cache, in [0, 1]."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0
