"""Which tokens a sequence may go on with, by its parameters alone."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal_replica.sampling_params import SamplingParams


class TokenChoice:
    """``allowed_token_ids`` and ``bad_token_ids`` of one sequence, looked up by its last token: most steps meet the
    beginning of no bad sequence.
    """

    def __init__(self, params: SamplingParams, device: torch.device) -> None:
        self._allowed = torch.tensor(params.allowed_token_ids, dtype=torch.int64, device=device)
        self._bad = [token_id for *before, token_id in params.bad_token_ids if not before]
        self._bad_after: dict[int, list[tuple[list[int], int]]] = defaultdict(list)  # by the token before
        for *before, token_id in params.bad_token_ids:
            if before:
                self._bad_after[before[-1]].append((before, token_id))

    def restrict(self, logits: Tensor, generated: NDArray[np.int64]) -> None:
        """Leave only allowed tokens, in place, and none that completes a bad sequence of ``generated`` tokens."""
        if len(self._allowed):
            kept = logits[self._allowed]
            logits.fill_(-torch.inf)
            logits[self._allowed] = kept
        bad = list(self._bad)
        if len(generated):
            for before, token_id in self._bad_after.get(int(generated[-1]), ()):
                if generated[-len(before) :].tolist() == before:
                    bad.append(token_id)
        if bad:
            logits[torch.tensor(bad, dtype=torch.int64, device=logits.device)] = -torch.inf
