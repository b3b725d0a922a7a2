"""What a replica says of itself: dated numbers, safe to send."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

DUE_WITHIN_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, math.inf)


@dataclass(slots=True)
class Totals:
    """What a scheduler has done since it was made."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_host_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    num_refused: int = 0

    def note_start(self, num_prompt_tokens: int, num_cached_tokens: int, num_from_host: int) -> None:
        """A prompt has started, so much of it found cached; in host memory there was so much of the same."""
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += num_cached_tokens
        self.num_host_cached_tokens += min(num_cached_tokens, num_from_host)

    def as_dict(self) -> dict[str, int]:
        """By name, for ``ReplicaStats``. Written out: it is taken after every step."""
        return {
            "num_steps": self.num_steps,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_host_cached_tokens": self.num_host_cached_tokens,
            "num_generated_tokens": self.num_generated_tokens,
            "num_finished": self.num_finished,
            "num_preemptions": self.num_preemptions,
            "num_refused": self.num_refused,
        }


class ReplicaStats(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The block ledger and load of one replica, as of ``time_s``. Owner: the replica's scheduler, after each step.

    Blocks are counted once: ``num_total_blocks = num_allocated_blocks + num_free_blocks``; of the free ones
    ``num_cached_blocks`` still hold a prefix that a new request may reuse (they are evicted last).

    Attributes:
        time_s: wall-clock time of the count (``time.time()`` of the replica's host).
        num_waiting_tokens: tokens of known prompts that steps have still to compute, of waiting and running requests,
            less what a waiting one is expected to find cached when its turn comes.
        num_host_blocks, num_host_cached_blocks: rows of host memory, and those of them that hold a prefix, which the
            device may hold, too.
        num_blocks_out, num_blocks_in: blocks moved to host memory and back, totals since the replica started.
        step_s, busy_s: length of the last step, and of all since the replica started, seconds.
        token_s: seconds that a prompt token takes, a mean over steps that were mostly prefill; 0 until one was.
        full_token_s: the same of the fastest of the last full steps, to compare replicas by; 0 if none was lately.
        by_due: it goes by due dates (``deadline``): what comes later and is due sooner still goes first.
        num_prompt_tokens, num_cached_tokens, num_generated_tokens, num_finished, num_preemptions, num_steps: totals
            since the replica started.
        num_host_cached_tokens: of ``num_cached_tokens``, those that came back from host memory.
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

    @property
    def utilization(self) -> float:
        """Share of blocks that running sequences hold, in [0, 1]."""
        return self.num_allocated_blocks / self.num_total_blocks if self.num_total_blocks else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in the prefix cache, in [0, 1]."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0
