"""Draws and log-probabilities by torch's operators, for devices and installations without kernels of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal_kernels import ops
from shoal_kernels.draws import Draw, LogProbabilities

# The largest draw, as a share of the sum of probabilities: their product must stay below the sum in the sum's dtype.
# Accelerators lack doubles.
LARGEST = {torch.float64: 1 - 2.0**-52, torch.float32: 1 - 2.0**-23}


def draw(logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> list[int]:
    """See ``ops.draw``."""
    logits, device = picked(logits, rows), logits.device
    temperatures = torch.tensor([how.divisor for how in draws]).unsqueeze(1)
    # Shifted to a maximum of 0 first: a tiny temperature then gives 0 and -inf, never inf.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures.to(device)
    if any(how.min_p for how in draws):
        least = torch.tensor([how.least_score for how in draws]).unsqueeze(1)
        scaled = scaled.masked_fill(scaled < least.to(device), -torch.inf)
    cut = [i for i, how in enumerate(draws) if how.top_k > 0 or how.top_p < 1.0]
    if cut:
        places = torch.tensor(cut).to(device)
        scaled[places] = ops.keep_top(scaled[places], [draws[i].top_k for i in cut], [draws[i].top_p for i in cut])
    probs = scaled.softmax(dim=-1)
    cdf = (probs.double() if device.type == "cpu" else probs).cumsum(dim=-1)
    uniforms = [min(how.uniform, LARGEST[cdf.dtype]) for how in draws]
    targets = torch.tensor(uniforms, dtype=cdf.dtype).to(device).unsqueeze(1) * cdf[:, -1:]
    token_ids: list[int] = torch.searchsorted(cdf, targets, right=True).squeeze(1).tolist()
    return token_ids


def log_probabilities(
    logits: Tensor, rows: Sequence[int], token_ids: Sequence[int], counts: Sequence[int]
) -> list[LogProbabilities]:
    """See ``ops.log_probabilities``."""
    values = picked(logits, rows).log_softmax(dim=-1)
    chosen = values.gather(1, torch.tensor(token_ids).to(logits.device).unsqueeze(1)).squeeze(1).tolist()
    top_values, top_ids = (part.tolist() for part in values.topk(min(max(counts), values.shape[-1]), dim=-1))
    return [
        LogProbabilities(logprob, tuple(zip(ids[:count], logprobs[:count], strict=True)))
        for logprob, ids, logprobs, count in zip(chosen, top_ids, top_values, counts, strict=True)
    ]


def picked(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows of logits, by number: a copy, unless they are all of them."""
    whole = list(rows) == list(range(len(logits)))
    return logits if whole else logits[torch.tensor(rows, dtype=torch.int64).to(logits.device)]
