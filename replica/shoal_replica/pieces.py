"""Prompts in pieces, for tenants that share a replica: requests of tenants that had less service should not wait for a
long step that computes the prompts of a tenant that had most of it.

A request of the latter *yields* (``Request.yields``), and its prompt is computed in shorter steps. Shorter steps alone
would cost throughput, because each reads all weights once more for its decodes. So decodes, whosever they are, are left
out of some steps. They run as often as they would with whole steps: once for every whole step's worth of prompt tokens;
or for every two steps' worth, while a prompt that does not yield is present.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import islice

from shoal_replica.request import Sequence
from shoal_replica.step_plan import StepPlan
from shoal_replica.waiting_queue import WaitingQueue

PIECES = 8  # per whole step
MIN_PIECE = 64  # fewer tokens do not keep a processor's matrix products busy


class Pieces:
    """Limits each step by the requests that are present. ``whole`` is the largest number of tokens in a step."""

    def __init__(self, whole: int) -> None:
        least = max(1, min(MIN_PIECE, whole // 4))
        self._whole = whole
        self._piece = max(least, whole // PIECES)
        self._piece_with_decodes = max(least, self._piece // 2)
        self._num_since_decodes = 0  # prompt tokens planned since decodes last ran
        self._num_passed = 0  # prompt tokens planned since prompts that yield last got any

    def plan(
        self, level: Items[Sequence], behind: Items[Sequence], waiting: WaitingQueue, room: int
    ) -> tuple[StepPlan, bool]:
        """An empty step plan, and whether the decoding sequences (``level``) are left out of it. They are if some
        sequence yields, the prompts fill a piece, and fewer than a whole step's prompt tokens were computed since
        decodes last ran (two steps' while a prompt that does not yield is present). A piece that decodes join is half
        as large, within the minimum, so that all steps take about as long.

        Args:
            behind: running sequences with prompts to compute.
            room: how many of the waiting sequences may start.
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
        """Record that a step was planned."""
        if stood_back:
            self._num_since_decodes += max(plan.num_prompt_tokens, self._piece)
        else:
            self._num_since_decodes = plan.num_prompt_tokens
        is_put_off = plan.has_put_off and not plan.num_yielding_tokens
        self._num_passed = self._num_passed + plan.num_prompt_tokens if is_put_off else 0
