"""Beam search: the best continuations of a prompt by the sum of their tokens' log-probabilities.

The rules, and so the answers, are those of ``generate(num_beams=...)`` in Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from typing import NamedTuple

from shoal_replica.executor import TokenLogprobs
from shoal_replica.request import FinishReason, FinishRule, Request


@dataclass(frozen=True, slots=True)
class Beam:
    """Output tokens and the sum of their log-probabilities. ``logprobs`` are kept only for requests that want them."""

    token_ids: tuple[int, ...] = ()
    score: float = 0.0
    logprobs: tuple[TokenLogprobs, ...] = ()


class Hypothesis(NamedTuple):
    """A finished beam. ``rank_score`` is its score with the length penalty."""

    rank_score: float
    beam: Beam
    finish_reason: FinishReason


class _Continuation(NamedTuple):
    score: float
    place: int  # of the beam that it continues
    token_id: int
    logprob: float


class BeamSearch:
    """The beams of one request. Knows no blocks and no scheduler.

    From all continuations of the beams, the best ``2 * beam_width`` or more are considered, so that ``beam_width``
    remain even if each beam's likeliest token ends it. Only the best ``beam_width`` of them may finish.

    Attributes:
        beams: those that go on, best first; at first an empty one.
        finished: the best ``beam_width`` finished ones, best first.
    """

    def __init__(self, request: Request, finish: FinishRule) -> None:
        self.beams: list[Beam] = [Beam()]
        self.finished: list[Hypothesis] = []
        self._request = request
        self._params = request.sampling_params
        self._finish = finish
        self._num_considered = num_candidates(request, finish)

    def advance(self, tops: Items[TokenLogprobs]) -> list[int]:
        """Replace ``beams`` by their best continuations. Returns the place of the beam that each of them continues.

        Args:
            tops: for each beam its likeliest next tokens, ``num_candidates`` of them if the vocabulary has so many.
        """
        width = self._params.beam_width
        num_tokens = len(self.beams[0].token_ids) + 1
        kept: list[_Continuation] = []
        ended: list[Hypothesis] = []
        for position, continuation in enumerate(self._best(tops)):
            reason = self._finish.reason(
                self._request, continuation.token_id, self._request.num_prompt_tokens + num_tokens
            )
            if reason is None:
                kept.append(continuation)
            elif position < width:
                beam = self._extended(continuation, tops)
                ended.append(Hypothesis(self._rank_score(beam.score, num_tokens), beam, reason))
        kept = kept[:width]
        self.beams = [self._extended(continuation, tops) for continuation in kept]
        # Of equals the earlier one stays first.
        self.finished = sorted((*self.finished, *ended), key=lambda hypothesis: -hypothesis.rank_score)[:width]
        return [continuation.place for continuation in kept]

    @property
    def is_done(self) -> bool:
        """Whether no beam can go on, or none that does is expected to be among the best."""
        if not self.beams:
            return True
        if len(self.finished) < self._params.beam_width:
            return False
        if self._params.early_stopping:
            return True
        best = self.beams[0]
        return self._rank_score(best.score, len(best.token_ids)) <= self.finished[-1].rank_score

    def _best(self, tops: Items[TokenLogprobs]) -> list[_Continuation]:
        """The best continuations of all beams, best first; of equals, those of the better beam."""
        continuations = (
            _Continuation(beam.score + logprob, place, token_id, logprob)
            for place, (beam, top) in enumerate(zip(self.beams, tops, strict=True))
            for token_id, logprob in islice(top.top, self._num_considered)
        )
        return nlargest(self._num_considered, continuations, key=lambda continuation: continuation.score)

    def _extended(self, continuation: _Continuation, tops: Items[TokenLogprobs]) -> Beam:
        score, place, token_id, logprob = continuation
        beam, wanted = self.beams[place], self._params.logprobs
        logprobs = beam.logprobs
        if wanted is not None:
            logprobs = (*logprobs, TokenLogprobs(token_id, logprob, tops[place].top[:wanted]))
        return Beam((*beam.token_ids, token_id), score, logprobs)

    def _rank_score(self, score: float, num_tokens: int) -> float:
        return float(score / num_tokens**self._params.length_penalty)


def num_candidates(request: Request, finish: FinishRule) -> int:
    """How many of the likeliest next tokens ``BeamSearch`` needs of each beam; 0 if the request is no beam search."""
    params = request.sampling_params
    if not params.is_beam_search:
        return 0
    return max(2, 1 + finish.num_end_tokens(params)) * params.beam_width
