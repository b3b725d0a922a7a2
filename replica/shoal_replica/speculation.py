"""Speculative decoding: which draft tokens a step computes beside those that are known (Leviathan et al., ICML '23).

A step that decodes few sequences waits for weights, and computes some tokens more in little more time. The draft
tokens of a sequence are looked up in its own text. The model then chooses a token before each; a draft that it has
chosen itself saves a step, and the others cost what they took. The tokens are the same as without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Items
from heapq import heapify, heappop, heapreplace

from shoal_replica.draft_odds import DraftOdds
from shoal_replica.executor import MAX_DRAFT_TOKENS, Draft, SchedulerOutput, StepResult
from shoal_replica.finish_rule import FinishRule
from shoal_replica.kv_cache import KVCacheManager
from shoal_replica.request import Sequence
from shoal_replica.stats import Totals
from shoal_replica.step_costs import StepCosts
from shoal_replica.step_plan import StepPlan


class Speculation:
    """Keeps the drafts that the executor offers after a step, and chooses those of the next step.

    Args:
        max_drafts: for a sequence and step; 0 for no speculation.
        kv: allocates blocks for them.
        by_id: the live sequences.
        finish: decides when a sequence ends.
        totals: the scheduler's own.
    """

    def __init__(
        self,
        max_drafts: int,
        kv: KVCacheManager,
        by_id: Mapping[int, Sequence],
        finish: FinishRule,
        totals: Totals,
    ) -> None:
        self._max_drafts = max_drafts
        self._kv = kv
        self._by_id = by_id
        self._finish = finish
        self._totals = totals
        self._costs = StepCosts()
        self._odds = {True: DraftOdds(), False: DraftOdds()}  # of sequences that are greedy, and that draw
        self._offers: dict[int, Draft] = {}

    def num_wanted(self, num_sequences: int) -> int:
        """How many drafts the executor is to find for each sequence of a step of so many decodes: none where even right
        ones would gain little.
        """
        if not self._max_drafts or num_sequences >= MAX_DRAFT_TOKENS:
            return 0
        seconds = self._costs.of_decodes(num_sequences, 2 * num_sequences)
        return self._max_drafts if seconds and seconds[-1] < 1.5 * seconds[0] else 0

    def take(self, output: SchedulerOutput, result: StepResult) -> None:
        """Learn from a step, and keep what is offered for the next. To be called before its tokens are appended."""
        if not self._max_drafts:
            return
        self._costs.take(output, result.step_s)
        if self._offers:
            self._learn(output, result)
        self._offers = {draft.seq_id: draft for draft in result.drafts}

    def _learn(self, output: SchedulerOutput, result: StepResult) -> None:
        """Of an offer that was not computed, too, the step has told whether its first draft was right."""
        sampled = result.by_sequence()
        for share in output.scheduled:
            offer, sequence = self._offers.get(share.seq_id), self._by_id.get(share.seq_id)
            if offer is None or sequence is None or not share.samples:
                continue
            num_tried, num_right = len(share.drafts), len(sampled[share.seq_id]) - 1
            if share.drafts:
                self._totals.note_drafts(num_tried, num_right)
            elif share.num_computed_tokens + share.num_new_tokens == offer.num_tokens:
                num_tried, num_right = 1, int(sampled[share.seq_id][0].token_id == offer.token_ids[0])
            self._odds_of(sequence).take(offer.num_matched, num_tried, num_right)

    def extend(self, plan: StepPlan, level: Items[Sequence]) -> None:
        """Add drafts to a step in which the sequences of ``level`` decode, unless it has others or blocks run out."""
        if not self._offers or plan.num_sequences != len(level) or not all(map(plan.includes, level)):
            return
        offers = [
            offer
            for sequence in level
            if (offer := self._offers.get(sequence.seq_id)) is not None and offer.num_tokens == sequence.num_tokens
        ]
        for seq_id, drafts in self.choose(offers, len(level), plan.budget).items():
            sequence, count = self._by_id[seq_id], len(drafts)
            start = plan.planned_end(sequence)
            needed = self._kv.num_blocks_to_append(seq_id, start, start + count)
            if needed and self._kv.pool.num_free < needed + len(level):
                continue  # the others may need what is left for tokens that are no drafts
            if (change := self._kv.append(seq_id, start, start + count)) is not None:
                plan.update_blocks(sequence, change)
            plan.add_drafts(sequence, drafts)

    def choose(self, offers: Items[Draft], num_sequences: int, budget: int) -> dict[int, tuple[int, ...]]:
        """Which drafts to compute, by sequence, in a step of so many decodes: of the likeliest the number, at most
        ``budget``, with which the step should yield the most tokens per second. Changes nothing; any thread may ask.
        """
        if not offers:
            return {}
        seconds = self._costs.of_decodes(num_sequences, num_sequences + min(budget, MAX_DRAFT_TOKENS))
        likeliest: list[tuple[float, int, int, int, DraftOdds]] = []
        for offer in offers:
            sequence = self._by_id.get(offer.seq_id)
            if sequence is None:
                continue
            odds, left = self._odds_of(sequence), self._finish.num_left(sequence.request, offer.num_tokens) - 1
            if (left := min(left, len(offer.token_ids))) > 0:
                likeliest.append((-odds[offer.num_matched], offer.seq_id, offer.num_matched, left, odds))
        if not likeliest or not seconds:
            return {}
        heapify(likeliest)
        order, expected = list[int](), float(num_sequences)
        best, num_best = expected / seconds[0], 0
        while likeliest and len(order) + 1 < len(seconds):
            negative, seq_id, num_matched, left, odds = likeliest[0]
            order.append(seq_id)
            expected -= negative
            if (rate := expected / seconds[len(order)]) > best:
                best, num_best = rate, len(order)
            if left > 1:
                following = (negative * odds[num_matched + 1], seq_id, num_matched + 1, left - 1, odds)
                heapreplace(likeliest, following)
            else:
                heappop(likeliest)
        counts = Counter(order[:num_best])
        return {offer.seq_id: offer.token_ids[: counts[offer.seq_id]] for offer in offers if offer.seq_id in counts}

    def _odds_of(self, sequence: Sequence) -> DraftOdds:
        return self._odds[sequence.request.sampling_params.is_greedy]
