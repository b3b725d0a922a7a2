"""Guesses at what follows in a sequence, looked up in the sequence itself (prompt lookup decoding, Saxena 2023)."""

from __future__ import annotations

from collections.abc import Collection
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

MAX_MATCH = 8  # tokens; longer matches are hardly more often right


def look_up(token_ids: NDArray[np.int64], max_drafts: int, ends: Collection[int] = ()) -> tuple[int, tuple[int, ...]]:
    """Find where the last tokens of a sequence, at most MAX_MATCH, have occurred before: the longest such match, and of
    several the latest. Returns its length, and the tokens that followed there: at most ``max_drafts`` of them, none
    from the first of ``ends`` on. A sequence that repeats itself is taken to go on so.
    """
    num_tokens = len(token_ids)
    places, num_matched = np.flatnonzero(token_ids[:-1] == token_ids[-1]), 0
    while len(places):
        found, num_matched = places, num_matched + 1
        if num_matched == min(MAX_MATCH, num_tokens - 1):
            break
        places = places[places >= num_matched]
        places = places[token_ids[places - num_matched] == token_ids[num_tokens - 1 - num_matched]]
    if not num_matched:
        return 0, ()
    following = token_ids[int(found[-1]) + 1 :][:max_drafts].tolist()
    drafts = following * -(-max_drafts // len(following))
    return num_matched, tuple(takewhile(lambda token_id: token_id not in ends, drafts[:max_drafts]))
