"""Which tokens a sequence may go on with, by its parameters alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

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
        self._device = device
        self._allowed = self._tensor(params.allowed_token_ids)
        sequences = dict.fromkeys(params.bad_token_ids)  # each once
        self._never = self._tensor([token_id for *before, token_id in sequences if not before])
        self._bad_after: dict[int, list[tuple[list[int], int]]] = defaultdict(list)  # by the token before
        for *before, token_id in sequences:
            if before:
                self._bad_after[before[-1]].append((before, token_id))

    def restrict(self, logits: Tensor, generated: NDArray[np.int64]) -> None:
        """Leave only allowed tokens, in place, and none that completes a bad sequence of ``generated`` tokens."""
        if len(self._allowed):
            kept = logits[self._allowed]
            logits.fill_(-torch.inf)
            logits[self._allowed] = kept
        if len(self._never):
            logits[self._never] = -torch.inf
        if len(generated) and (bad := self._completing(generated)):
            logits[self._tensor(bad)] = -torch.inf

    def _completing(self, generated: NDArray[np.int64]) -> list[int]:
        """The tokens that would complete a bad sequence."""
        after = self._bad_after.get(int(generated[-1]), ())
        return [token_id for before, token_id in after if generated[-len(before) :].tolist() == before]

    def _tensor(self, token_ids: Sequence[int]) -> Tensor:
        return torch.tensor(token_ids, dtype=torch.int64, device=self._device)
