"""The tokens of a step: one for each sequence that samples, and one more for each of its drafts that is right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shoal_kernels.native_buffers import RowMaxima
from shoal_replica.executor import Draft, SampledToken, ScheduledSequence
from shoal_replica.model.sampler import Sampler, SamplerRow, likeliest
from shoal_replica.model.sequence_table import RunnerSequence, SequenceTable
from shoal_replica.prompt_lookup import look_up


class StepSampler:
    """Samples from a step's logits and appends what it has sampled.

    After a draft the model is asked only if it has chosen that draft itself, so every token is sampled once, with the
    parameters and the random number of its position: it is the one that a step without drafts would have sampled.

    Args:
        ends: tokens that end sequences; no draft goes beyond them.
    """

    def __init__(self, sequences: SequenceTable, sampler: Sampler, ends: Iterable[int]) -> None:
        self._sequences = sequences
        self._sampler = sampler
        self._ends = frozenset(ends)

    def sample(
        self, shares: Sequence[ScheduledSequence], logits: Tensor, maxima: RowMaxima | None
    ) -> tuple[SampledToken, ...]:
        """The tokens of ``shares``, which all sample, in their order.

        Args:
            logits: a row for the last token of each share, before it one for each token before its drafts; none if
                ``maxima`` suffice.
            maxima: those of the rows, if already known.
        """
        held = [self._held(share) for share in shares]
        if any(share.drafts for share in shares):
            return self._verify(shares, held, logits, maxima)
        if maxima is not None and all(h.takes_likeliest for h in held):  # more would show in a small model's step
            sampled = tuple(map(SampledToken, [s.seq_id for s in shares], likeliest(maxima)))
        else:
            sampled = self._choose(shares, held, logits, maxima)
        for h, token in zip(held, sampled, strict=True):
            if not h.num_candidates:  # else the scheduler chooses one
                self._sequences.append(token.seq_id, token.token_id)
        return sampled

    def find_drafts(self, sampled: Sequence[SampledToken], num_wanted: int) -> tuple[Draft, ...]:
        """What may follow each sequence that has sampled: at most so many tokens."""
        found: list[Draft] = []
        for seq_id in dict.fromkeys(token.seq_id for token in sampled):
            held = self._sequences[seq_id]
            if held.num_candidates:
                continue
            num_matched, drafts = look_up(self._sequences.token_ids(seq_id), num_wanted, self._ends)
            if drafts:
                found.append(Draft(seq_id, held.num_tokens, num_matched, drafts))
        return tuple(found)

    def _verify(
        self,
        shares: Sequence[ScheduledSequence],
        held: Sequence[RunnerSequence],
        logits: Tensor,
        maxima: RowMaxima | None,
    ) -> tuple[SampledToken, ...]:
        """Sample after the known tokens of all shares, then after the first draft where it is what was sampled, ..."""
        firsts, row = list[int](), 0
        for share in shares:
            firsts.append(row)
            row += 1 + len(share.drafts)
        chosen: list[list[SampledToken]] = [[] for _ in shares]
        going, number = list(range(len(shares))), 0
        while going:
            rows = [firsts[i] + number for i in going]
            known = (
                None
                if maxima is None
                else RowMaxima([maxima.largest[r] for r in rows], [maxima.places[r] for r in rows])
            )
            if known is not None and all(held[i].takes_likeliest for i in going):
                tokens = tuple(map(SampledToken, [shares[i].seq_id for i in going], likeliest(known)))
            else:
                own = logits[torch.tensor(rows).to(logits.device)]
                tokens = self._choose([shares[i] for i in going], [held[i] for i in going], own, known, number)
            for i, token in zip(going, tokens, strict=True):
                chosen[i].append(token)
            going = [
                i
                for i, token in zip(going, tokens, strict=True)
                if shares[i].drafts[number : number + 1] == (token.token_id,) and not token.is_cut
            ]
            number += 1
        sampled = tuple(token for tokens in chosen for token in tokens)
        for token in sampled:
            self._sequences.append(token.seq_id, token.token_id)
        return sampled

    def _choose(
        self,
        shares: Sequence[ScheduledSequence],
        held: Sequence[RunnerSequence],
        logits: Tensor,
        maxima: RowMaxima | None,
        num_drafts: int = 0,
    ) -> tuple[SampledToken, ...]:
        """A token for each of ``shares``, after its own tokens and its first ``num_drafts`` drafts."""
        rows = [
            SamplerRow(
                share.seq_id,
                h.sampling_params,
                h.index,
                h.num_prompt_tokens,
                self._sequences.token_ids(share.seq_id, num_drafts),
                h.num_candidates,
            )
            for share, h in zip(shares, held, strict=True)
        ]
        samples = self._sampler.sample(logits, rows, maxima)
        return tuple(
            SampledToken(share.seq_id, sample.token_id, sample.logprobs, sample.is_cut)
            for share, sample in zip(shares, samples, strict=True)
        )

    def _held(self, share: ScheduledSequence) -> RunnerSequence:
        held, end = self._sequences[share.seq_id], share.num_computed_tokens + share.num_new_tokens - len(share.drafts)
        if end != held.num_tokens:
            raise RuntimeError(f"sequence {share.seq_id} samples after {end} of {held.num_tokens} tokens")
        return held
