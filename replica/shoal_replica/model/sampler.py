"""From logits to tokens: one row per sequence, each with its own parameters and random stream."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal_kernels import ops
from shoal_kernels.draws import Draw, RowOperators
from shoal_kernels.native_buffers import RowMaxima
from shoal_replica.executor import TokenLogprobs
from shoal_replica.grammars import Grammars, Matcher
from shoal_replica.model.token_choice import TokenChoice
from shoal_replica.model.token_counts import TokenCounts
from shoal_replica.sampling_params import SamplingParams
from shoal_replica.structured_output import StructuredOutput

UNIFORM_BITS = 52


@dataclass(frozen=True, slots=True)
class SamplerRow:
    """The sequence of one row of logits.

    Attributes:
        token_ids: int64, prompt then generated tokens; their number is the next token's position.
        index: number of the sequence within its request; with the seed, it selects the random stream.
        num_candidates: how many of the likeliest tokens to return, whether or not the request asks for any.
    """

    seq_id: int
    params: SamplingParams
    index: int
    num_prompt_tokens: int
    token_ids: NDArray[np.int64]
    num_candidates: int = 0

    @property
    def num_top(self) -> int | None:
        """How many of the likeliest tokens to return with their log-probabilities; None for no log-probabilities."""
        asked = self.params.logprobs
        return max(asked or 0, self.num_candidates) if self.num_candidates else asked


@dataclass(frozen=True, slots=True)
class Sample:
    """``is_cut``: a structured answer cannot go on, and ends with this token."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    is_cut: bool = False


class Sampler:
    """Chooses tokens: penalties and biases, then what ``min_tokens``, allowed and bad tokens and structured answers
    leave, then temperature, then min-p, top-k and top-p, then one draw.

    A row's draw takes one uniform number, a function of (seed, index, position) alone, and inverts the cumulative
    distribution in token-id order, so it does not depend on batch, step or replica. Greedy rows take the likeliest
    token.

    Args:
        operators: draw, and find log-probabilities.
        grammars: those of the model; None if no row has structured output.
        eos_token_ids: the model's end-of-sequence tokens.
    """

    def __init__(
        self, operators: RowOperators = ops, grammars: Grammars | None = None, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._operators = operators
        self._grammars = grammars
        self._matchers: dict[int, Matcher] = {}
        self._counts: dict[int, TokenCounts] = {}
        self._choices: dict[int, TokenChoice] = {}
        self.num_changed = 0  # rows so far, read as progress: to compile many forms at once may make a step long

    def forget(self, seq_id: int) -> None:
        """Drop what is known of a sequence; it is counted and matched anew if it comes back."""
        self._counts.pop(seq_id, None)
        self._matchers.pop(seq_id, None)
        self._choices.pop(seq_id, None)

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SamplerRow], maxima: RowMaxima | None = None) -> list[Sample]:
        """Choose a token for each row of ``logits``, float32 [len(rows), vocab_size].

        Args:
            maxima: the maxima of the rows, if already known.

        Raises:
            FloatingPointError: a row holds NaN or infinity as its largest logit.
        """
        if not rows:
            return []
        token_ids = likeliest(maxima or _maxima(logits))
        self._draw(logits, {i: row for i, row in enumerate(rows) if not row.params.changes_logits}, token_ids)
        cut: set[int] = set()
        if changed := [i for i, row in enumerate(rows) if row.params.changes_logits]:
            own = logits[torch.tensor(changed).to(logits.device)]  # a copy: the logits stay as they are
            for number, i in enumerate(changed):
                if not self._change(own[number], rows[i]):
                    cut.add(i)
            chosen = _maxima(own).places
            self._draw(own, {number: rows[i] for number, i in enumerate(changed)}, chosen)
            for i, token_id in zip(changed, chosen, strict=True):
                token_ids[i] = token_id
        samples = [Sample(token_id, None, i in cut) for i, token_id in enumerate(token_ids)]
        if wanted := [(i, count) for i, row in enumerate(rows) if (count := row.num_top) is not None]:
            places, counts = zip(*wanted, strict=True)
            sampled = [token_ids[i] for i in places]
            found = self._operators.log_probabilities(logits, places, sampled, counts)
            for i, token_id, (logprob, top) in zip(places, sampled, found, strict=True):
                samples[i] = Sample(token_id, TokenLogprobs(token_id, logprob, top), i in cut)
        return samples

    def _draw(self, logits: Tensor, rows: Mapping[int, SamplerRow], token_ids: list[int]) -> None:
        """Put draws into ``token_ids`` for those rows, by number, that are not greedy."""
        drawn = [i for i, row in rows.items() if not row.params.is_greedy]
        if drawn:
            found = self._operators.draw(logits, drawn, [_how(rows[i]) for i in drawn])
            for i, token_id in zip(drawn, found, strict=True):
                token_ids[i] = token_id

    def _change(self, logits: Tensor, row: SamplerRow) -> bool:
        """Change one row in place, by whatever its parameters ask for. False if no token may follow but those that end
        it, although the answer is not complete.
        """
        params = row.params
        self.num_changed += 1
        if params.has_penalties:
            self._penalise(logits, row)
        if params.logit_bias:
            token_ids, biases = zip(*params.logit_bias, strict=True)
            logits.index_add_(0, _on(logits, token_ids, torch.int64), _on(logits, biases, logits.dtype))
        if len(row.token_ids) - row.num_prompt_tokens < params.min_tokens:
            ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
            logits[_on(logits, [end for end in ends if end < len(logits)], torch.int64)] = -torch.inf
        if params.restricts_choice:
            choice = self._choices.get(row.seq_id)
            if choice is None:
                choice = self._choices[row.seq_id] = TokenChoice(params, logits.device)
            choice.restrict(logits, row.token_ids[row.num_prompt_tokens :])
        if params.structured_output is not None and not self._restrict(logits, row, params.structured_output):
            return False
        if params.restricts_choice and logits.max() == -torch.inf:
            self._leave_ends(logits)
            return False
        return True

    def _leave_ends(self, logits: Tensor) -> None:
        """Leave only the tokens that end a sequence, in place."""
        known = [end for end in self._eos_token_ids if end < len(logits)]
        ends = _on(logits, known or [0], torch.int64)
        kept = logits[ends].nan_to_num()
        logits.fill_(-torch.inf)
        logits[ends] = kept

    def _restrict(self, logits: Tensor, row: SamplerRow, structure: StructuredOutput) -> bool:
        """Leave only the tokens that a structured answer allows, in place; where there are none, those that end it, and
        return False.
        """
        matcher = self._matchers.get(row.seq_id)
        if matcher is None:
            assert self._grammars is not None
            matcher = self._matchers[row.seq_id] = self._grammars.begin(structure)
        allowed = matcher.allowed(row.token_ids[row.num_prompt_tokens :])
        if allowed is None:
            self._leave_ends(logits)
            return False
        logits.masked_fill_(~torch.from_numpy(allowed).to(logits.device), -torch.inf)
        return True

    def _penalise(self, logits: Tensor, row: SamplerRow) -> None:
        """Change one row in place: CTRL's repetition penalty (Keskar et al. 2019), then OpenAI's two."""
        counts = self._counts.setdefault(row.seq_id, TokenCounts())
        counts.extend(row.token_ids, row.num_prompt_tokens)
        token_ids, generated = counts.on(logits.device)
        params, seen = row.params, logits[token_ids]
        if params.repetition_penalty != 1.0:
            penalty = params.repetition_penalty
            # A penalty beyond float32's range gives inf, or NaN for a logit of 0; the draw needs finite numbers.
            seen = torch.where(seen > 0, seen / penalty, seen * penalty).nan_to_num(nan=0.0)
        seen -= params.frequency_penalty * generated
        seen -= params.presence_penalty * (generated > 0)
        logits[token_ids] = seen


def _on(logits: Tensor, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=logits.device)


def likeliest(maxima: RowMaxima) -> list[int]:
    """The tokens of greedy rows whose parameters need nothing else.

    Raises:
        FloatingPointError: a row holds NaN or infinity as its largest logit.
    """
    if not all(map(isfinite, maxima.largest)):
        raise FloatingPointError("the model's logits are not finite")
    return maxima.places


def uniform(seed: int | None, index: int, position: int) -> float:
    """The number in [0, 1) by which the token at ``position`` of sequence ``index`` of a request is drawn."""
    digest = blake2b(struct.pack("<QQQ", seed or 0, index, position), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> (64 - UNIFORM_BITS)) / float(1 << UNIFORM_BITS)


def _how(row: SamplerRow) -> Draw:
    params = row.params
    number = uniform(params.seed, row.index, len(row.token_ids))
    return Draw(params.temperature, params.min_p, params.top_k, params.top_p, number)


def _maxima(logits: Tensor) -> RowMaxima:
    return RowMaxima(*(part.tolist() for part in ops.row_maxima(logits)))
