"""From logits to tokens: one row per sequence, each with its own parameters and random stream."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal_kernels import ops
from shoal_kernels.native_buffers import RowMaxima
from shoal_replica.executor import TokenLogprobs
from shoal_replica.sampling_params import SamplingParams

UNIFORM_BITS = 52
# The largest draw, as a share of the sum of probabilities: their product must stay below the sum in the sum's dtype.
# Accelerators lack doubles.
LARGEST = {torch.float64: 1 - 2.0**-52, torch.float32: 1 - 2.0**-23}
MIN_TEMPERATURE = 1e-30  # must not become 0 in float32


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
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class TokenCounts:
    """The token counts of a sequence that penalties need, updated token by token."""

    output_counts: Tensor  # float32 [vocab_size], how often each token was generated
    seen: Tensor  # bool [vocab_size], in the prompt or generated
    num_counted: int = 0

    def extend(self, row: SamplerRow) -> None:
        """Count the tokens of the row that have not been counted yet."""
        new = torch.from_numpy(row.token_ids[self.num_counted :]).to(self.seen.device)
        self.seen[new] = True
        generated = new[max(0, row.num_prompt_tokens - self.num_counted) :]
        self.output_counts.index_add_(0, generated, torch.ones(len(generated)).to(self.seen.device))
        self.num_counted = len(row.token_ids)


class Sampler:
    """Chooses tokens: penalties, then temperature, then min-p, top-k and top-p, then one draw.

    A row's draw takes one uniform number, a function of (seed, index, position) alone, and inverts the cumulative
    distribution in token-id order, so it does not depend on batch, step or replica. Greedy rows take the likeliest
    token.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._counts: dict[int, TokenCounts] = {}

    def forget(self, seq_id: int) -> None:
        """Drop a sequence's counts; it is counted anew if it comes back."""
        self._counts.pop(seq_id, None)

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
        token_ids = likeliest(maxima or RowMaxima(*(part.tolist() for part in ops.row_maxima(logits))))
        logprobs = _Logprobs.of(logits, rows)
        penalised = [i for i, row in enumerate(rows) if row.params.has_penalties]
        if penalised:
            logits = logits.clone()
            for i in penalised:
                self._penalise(logits[i], rows[i])
            token_ids = logits.argmax(dim=-1).tolist()
        drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy]
        if drawn:
            picked = logits if len(drawn) == len(rows) else logits[torch.tensor(drawn).to(logits.device)]
            for i, token_id in zip(drawn, _draw(picked, [rows[i] for i in drawn]), strict=True):
                token_ids[i] = token_id
        return [Sample(token_id, logprobs.row(i, token_id)) for i, token_id in enumerate(token_ids)]

    def _penalise(self, logits: Tensor, row: SamplerRow) -> None:
        """Change one row in place: CTRL's repetition penalty (Keskar et al. 2019), then OpenAI's two."""
        counts = self._counts.get(row.seq_id)
        if counts is None:
            counts = self._counts[row.seq_id] = TokenCounts(
                torch.zeros(self._vocab_size, device=logits.device),
                torch.zeros(self._vocab_size, dtype=torch.bool, device=logits.device),
            )
        counts.extend(row)
        params = row.params
        if params.repetition_penalty != 1.0:
            penalty = params.repetition_penalty
            changed = torch.where(logits > 0, logits / penalty, logits * penalty)
            # A penalty beyond float32's range gives inf, or NaN for a logit of 0; the draw needs finite numbers.
            logits.copy_(torch.where(counts.seen, changed.nan_to_num(nan=0.0), logits))
        logits -= params.frequency_penalty * counts.output_counts
        logits -= params.presence_penalty * (counts.output_counts > 0)


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


def _draw(logits: Tensor, rows: Sequence[SamplerRow]) -> list[int]:
    """Draw one token per row; none of the rows is greedy."""
    device = logits.device
    temperatures = torch.tensor([max(row.params.temperature, MIN_TEMPERATURE) for row in rows]).unsqueeze(1)
    # Shifted to a maximum of 0 first: a tiny temperature then gives 0 and -inf, never inf.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures.to(device)
    min_ps = torch.tensor([row.params.min_p for row in rows]).unsqueeze(1)
    if bool(min_ps.any()):
        # In terms of logits, p < min_p * max(p) is logit < max + log(min_p), and the maximum is 0.
        scaled = scaled.masked_fill(scaled < min_ps.log().to(device), -torch.inf)
    cut = [i for i, row in enumerate(rows) if row.params.top_k > 0 or row.params.top_p < 1.0]
    if cut:
        picked = torch.tensor(cut).to(device)
        limits = [rows[i].params for i in cut]
        scaled[picked] = ops.keep_top(scaled[picked], [p.top_k for p in limits], [p.top_p for p in limits])
    probs = scaled.softmax(dim=-1)
    cdf = (probs.double() if device.type == "cpu" else probs).cumsum(dim=-1)
    uniforms = [min(uniform(row.params.seed, row.index, len(row.token_ids)), LARGEST[cdf.dtype]) for row in rows]
    targets = torch.tensor(uniforms, dtype=cdf.dtype).to(device).unsqueeze(1) * cdf[:, -1:]
    token_ids: list[int] = torch.searchsorted(cdf, targets, right=True).squeeze(1).tolist()
    return token_ids


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Log-probabilities from the raw logits, for the rows that need them."""

    places: dict[int, int]  # row of the batch → row here
    values: Tensor
    top: list[tuple[tuple[int, float], ...]]

    @classmethod
    def of(cls, logits: Tensor, rows: Sequence[SamplerRow]) -> _Logprobs:
        wanted = [(i, count) for i, row in enumerate(rows) if (count := row.num_top) is not None]
        if not wanted:
            return cls({}, logits, [])
        places = [i for i, _ in wanted]
        picked = logits if len(places) == len(rows) else logits[torch.tensor(places).to(logits.device)]
        values = picked.log_softmax(dim=-1)
        most = min(max(count for _, count in wanted), values.shape[-1])
        top_values, top_ids = (part.tolist() for part in values.topk(most, dim=-1))
        top = [
            tuple(zip(ids[:count], logprobs[:count], strict=True))
            for ids, logprobs, (_, count) in zip(top_ids, top_values, wanted, strict=True)
        ]
        return cls({i: place for place, (i, _) in enumerate(wanted)}, values, top)

    def row(self, i: int, token_id: int) -> TokenLogprobs | None:
        place = self.places.get(i)
        if place is None:
            return None
        return TokenLogprobs(token_id, float(self.values[place, token_id]), self.top[place])
