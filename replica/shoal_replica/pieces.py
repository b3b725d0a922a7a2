"""Prompts in pieces, where tenants share a replica: who had less is not to wait for a long step of who had most.

Shorter steps alone would cost throughput, for each reads the weights for its decodes once more. So decodes stand back,
anybody's, and run along as often as they would with whole steps: once for as many prompt tokens as fill one; or two,
while a prompt of who had less is here.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import islice

from shoal_replica.request import Sequence
from shoal_replica.step_plan import StepPlan
from shoal_replica.waiting_queue import WaitingQueue

PIECES = 8  # of a whole step
MIN_PIECE = 64  # fewer tokens do not keep a processor's products busy


class Pieces:
    """What a step may be, by who is here. ``whole`` is the most tokens of one."""

    def __init__(self, whole: int) -> None:
        least = max(1, min(MIN_PIECE, whole // 4))
        self._whole = whole
        self._piece = max(least, whole // PIECES)
        self._piece_with_decodes = max(least, self._piece // 2)
        self._num_since_decodes = 0  # prompt tokens planned since decodes ran along
        self._num_passed = 0  # and since prompts that yield had any

    def plan(
        self, level: Items[Sequence], behind: Items[Sequence], waiting: WaitingQueue, room: int
    ) -> tuple[StepPlan, bool]:
        """An empty step, and whether the sequences that decode (``level``) stand back: somebody yields, prompts fill a
        piece, and fewer tokens than a whole step's were computed since they last ran; or than two steps', while a
        prompt is here that does not yield. A piece that they go with is half as large, but no smaller than worth
        while: steps are about as long.

        Args:
            room: how many of those that wait may start.
        """
        first = next(iter(waiting), None)
        prompts = [*behind, first] if first is not None else behind
        is_due = self._num_passed >= self._whole
        if level and prompts and any(s.request.yields for s in (*prompts, *level)):
            limit = self._whole if all(s.request.yields for s in prompts) else 2 * self._whole
            num_tokens = sum(s.num_behind for s in behind) + sum(s.num_behind for s in islice(waiting, room))
            if self._num_since_decodes < limit and num_tokens >= self._piece:
                return StepPlan(self._whole, self._piece, is_due), True
        return StepPlan(self._whole, self._piece_with_decodes if level else self._piece, is_due), False

    def note(self, plan: StepPlan, stood_back: bool) -> None:
        """A step was planned."""
        if stood_back:
            self._num_since_decodes += max(plan.num_prompt_tokens, self._piece)
        else:
            self._num_since_decodes = plan.num_prompt_tokens
        is_put_off = plan.has_put_off and not plan.num_yielding_tokens
        self._num_passed = self._num_passed + plan.num_prompt_tokens if is_put_off else 0
