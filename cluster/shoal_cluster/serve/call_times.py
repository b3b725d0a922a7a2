"""When one call's tokens came, as its client saw them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shoal_replica.request import StartTimes

HANDOVER_REASONS = ("prefilled", "moved")
"""A leg's ``end`` where another replica goes on with its blocks."""


class TokenWatch(Protocol):
    """Counts waiting times as they happen. Called for every chunk: it must cost no more than a microsecond."""

    def add_first_token(self, seconds: float, now: float) -> None:
        """A call's first token came ``seconds`` after the call."""
        ...

    def add_tokens(self, seconds: float, num_tokens: int, now: float) -> None:
        """``num_tokens`` of one sequence came, each ``seconds`` after the one before it."""
        ...


@dataclass(slots=True)
class LegTimes:
    """One placement of a call, on the gateway's monotonic clock. None for what has not happened.

    Attributes:
        placed_s: when the placement began: the request entered the gateway's queue.
        routed_s: when it went to the replica that took it.
        queue_s, prefill_s: how long it waited there for its first step, and from then for its first token, by the
            replica's own clock.
        first_token_s, last_token_s: of the tokens that went on to the client.
        ended_s: when it was over there, however it ended.
        end: why it did not finish there: one of ``HANDOVER_REASONS``, refused or lost; empty if it did, still runs, or
            ended with the call.
    """

    placed_s: float
    replica_id: str = ""
    routed_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    end: str = ""

    def take(self, start: StartTimes | None, now: float) -> None:
        """Note tokens that came, with ``start`` if they are the placement's first."""
        self.last_token_s = now
        if self.first_token_s is None:
            self.first_token_s = now
        if start is not None:
            self.queue_s, self.prefill_s = start


class CallTimes:
    """One call, in seconds on the gateway's monotonic clock. A resume is part of the token gap in which it happens."""

    __slots__ = ("_last_s", "_num_gaps", "_sum_gaps_s", "_watch", "arrived_s", "first_token_s", "legs")

    def __init__(self, arrived_s: float, num_sequences: int, watch: TokenWatch) -> None:
        self.arrived_s = arrived_s
        self.first_token_s: float | None = None
        self.legs: list[LegTimes] = []
        self._last_s: list[float | None] = [None] * num_sequences
        self._sum_gaps_s = 0.0
        self._num_gaps = 0
        self._watch = watch

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the call's arrival to its first token, once there is one."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    @property
    def inter_token_s(self) -> float:
        """Mean seconds between the tokens of a sequence, over all sequences; 0 before any has two."""
        return self._sum_gaps_s / self._num_gaps if self._num_gaps else 0.0

    def start_leg(self, now: float) -> LegTimes:
        """Begin another placement of the call."""
        self.legs.append(LegTimes(now))
        return self.legs[-1]

    def take(self, index: int, num_tokens: int, now: float, has_started: bool = False) -> None:
        """``num_tokens`` of sequence ``index`` came at ``now``. Of a beam search, whose tokens come at its end, the
        replica tells when it has computed the first (``has_started``).
        """
        if not num_tokens:
            if has_started and self.first_token_s is None:
                self._note_first(now)
            return
        last_s = self._last_s[index]
        self._last_s[index] = now
        if last_s is not None:
            self._sum_gaps_s += now - last_s
            self._num_gaps += num_tokens
            self._watch.add_tokens((now - last_s) / num_tokens, num_tokens, now)
        elif self.first_token_s is None:
            self._note_first(now)

    def _note_first(self, now: float) -> None:
        self.first_token_s = now
        self._watch.add_first_token(now - self.arrived_s, now)
