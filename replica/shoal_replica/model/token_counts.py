"""The tokens that a sequence has seen, and how often each was generated, for penalties."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

INITIAL_SIZE = 256


class TokenCounts:
    """Updated token by token; holds only tokens that the sequence has seen, however large the vocabulary."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # by token id
        self._token_ids = np.empty(INITIAL_SIZE, np.int64)
        self._generated = np.zeros(INITIAL_SIZE, np.float32)
        self._num_counted = 0

    def extend(self, token_ids: NDArray[np.int64], num_prompt_tokens: int) -> None:
        """Count the tokens of a sequence, prompt first, that have not been counted yet."""
        prompt = np.unique(token_ids[self._num_counted : num_prompt_tokens])  # a loop over a long one would show
        generated = token_ids[max(self._num_counted, num_prompt_tokens) :]
        for token_id in prompt.tolist():
            self._place(token_id)
        for token_id in generated.tolist():
            place = self._place(token_id)
            self._generated[place] += 1
        self._num_counted = len(token_ids)

    def _place(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._token_ids):
            self._token_ids = np.concatenate((self._token_ids, np.empty_like(self._token_ids)))
            self._generated = np.concatenate((self._generated, np.zeros_like(self._generated)))
        self._token_ids[place] = token_id
        return place

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Each token seen, int64 [n], and how often it was generated, float32 [n]; valid until ``extend``."""
        count = len(self._places)
        token_ids, generated = torch.from_numpy(self._token_ids[:count]), torch.from_numpy(self._generated[:count])
        return token_ids.to(device), generated.to(device)
