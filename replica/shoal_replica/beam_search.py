"""Beam search: the best continuations of a prompt by the sum of their tokens' log-probabilities.

The rules, and so the answers, are those of ``generate(num_beams=...)`` in Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from heapq import merge
from typing import NamedTuple

from shoal_replica.executor import TokenLogprobs
from shoal_replica.finish_rule import FinishRule
from shoal_replica.request import FinishReason, Request


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
    rank: int  # of its token among the likeliest of that beam


class BeamSearch:
    """The beams of one request. Knows no blocks and no scheduler.

    Continuations are considered from the best on, until ``beam_width`` of them go on. Only the best ``beam_width`` of
    them may finish.

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

    def advance(self, tops: Items[TokenLogprobs]) -> list[int]:
        """Replace ``beams`` by their best continuations. Returns the place of the beam that each of them continues.

        Args:
            tops: for each beam its likeliest next tokens, ``num_candidates`` of them if the vocabulary has so many.
        """
        width, num_tokens = self._params.beam_width, len(self.beams[0].token_ids) + 1
        kept: list[_Continuation] = []
        ended: list[Hypothesis] = []
        for number, continuation in enumerate(self._best_first(tops)):
            if len(kept) == width and number >= width:
                break
            token_id, _ = tops[continuation.place].top[continuation.rank]
            num_known = self._request.num_prompt_tokens + num_tokens
            reason = self._finish.reason(self._request, token_id, num_known)
            if reason is None:
                kept.append(continuation)
            elif number < width:
                rank_score = self._rank_score(continuation.score, num_tokens)
                ended.append(Hypothesis(rank_score, self._extended(continuation, tops), reason))
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

    def _best_first(self, tops: Items[TokenLogprobs]) -> Iterator[_Continuation]:
        """The continuations of all beams, best first; of equals, those of the better beam."""
        by_beam = (
            _continuations(beam.score, place, top)
            for place, (beam, top) in enumerate(zip(self.beams, tops, strict=True))
        )
        return merge(*by_beam, key=lambda continuation: -continuation.score)

    def _extended(self, continuation: _Continuation, tops: Items[TokenLogprobs]) -> Beam:
        beam, top, wanted = self.beams[continuation.place], tops[continuation.place].top, self._params.logprobs
        token_id, logprob = top[continuation.rank]
        logprobs = beam.logprobs
        if wanted is not None:
            logprobs = (*logprobs, TokenLogprobs(token_id, logprob, top[:wanted]))
        return Beam((*beam.token_ids, token_id), continuation.score, logprobs)

    def _rank_score(self, score: float, num_tokens: int) -> float:
        return float(score / num_tokens**self._params.length_penalty)


def _continuations(score: float, place: int, top: TokenLogprobs) -> Iterator[_Continuation]:
    """Those of one beam, best first. Most of them are never asked for."""
    for rank, (_, logprob) in enumerate(top.top):
        yield _Continuation(score + logprob, place, rank)


def num_candidates(request: Request, finish: FinishRule) -> int:
    """How many of the likeliest next tokens ``BeamSearch`` needs of each beam: all that may end it, and one for each
    beam to come. 0 if the request is no beam search.
    """
    params = request.sampling_params
    return params.beam_width + finish.num_end_tokens(params) if params.is_beam_search else 0
