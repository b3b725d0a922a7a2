"""``npu_top_k_top_p``."""

from __future__ import annotations

import torch
from torch import Tensor

from simulated_npu.limits import need

MAX_TOP_K = 1024


def top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    """-inf for logits below the k-th largest, then for the least likely, whose probabilities sum to at most 1 - p."""
    need(logits.dim() == 2, "logits have 2 dimensions")
    need(p is not None or k is not None, "p and k are not both None")
    ranked, order = torch.sort(logits, stable=True, dim=-1)
    if k is not None:
        need(k.dtype == torch.int32 and k.shape == logits.shape[:1], "k is int32, one for each row")
        need(int(k.min()) >= 1 and int(k.max()) <= MAX_TOP_K, f"k is 1 to {MAX_TOP_K}")
        need(int(k.max()) <= logits.shape[1], "k is at most the number of logits in a row")
        smallest = ranked.gather(1, (ranked.shape[1] - k.long())[:, None])
        ranked = ranked.masked_fill(ranked < smallest, -torch.inf)
    if p is not None:
        need(p.dtype == logits.dtype and p.shape == logits.shape[:1], "p has the logits' dtype, one for each row")
        need(float(p.min()) >= 0 and float(p.max()) <= 1, "p is 0 to 1")
        dropped = ranked.softmax(-1).cumsum(-1) <= 1 - p[:, None]
        dropped[:, -1] = False
        ranked = ranked.masked_fill(dropped, -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, ranked)


REFERENCES = {"npu_top_k_top_p": top_k_top_p}
