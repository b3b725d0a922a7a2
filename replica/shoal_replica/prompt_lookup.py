"""Draft tokens for a sequence, looked up in the sequence itself (prompt lookup decoding, Saxena 2023)."""

from __future__ import annotations

from collections.abc import Collection
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

MAX_MATCH = 8  # tokens; longer matches are hardly more often right
FEW = 8  # matches that are sooner compared one by one than by operations on arrays


def look_up(token_ids: NDArray[np.int64], max_drafts: int, ends: Collection[int] = ()) -> tuple[int, tuple[int, ...]]:
    """Find where the last tokens of a sequence, at most MAX_MATCH, have occurred before: the longest such match, and of
    several the latest. Returns its length, and the tokens that followed there: at most ``max_drafts`` of them, none
    from the first of ``ends`` on. A sequence that repeats itself is taken to go on so.
    """
    num_matched, place = _longest_match(token_ids)
    if not num_matched:
        return 0, ()
    following = token_ids[place + 1 :][:max_drafts].tolist()
    drafts = following * -(-max_drafts // len(following))
    return num_matched, tuple(takewhile(lambda token_id: token_id not in ends, drafts[:max_drafts]))


def _longest_match(token_ids: NDArray[np.int64]) -> tuple[int, int]:
    """The length of the match, 0 for none, and the place of its last token."""
    last, places = len(token_ids) - 1, np.flatnonzero(token_ids[:-1] == token_ids[-1])
    num_matched, most = min(len(places), 1), min(MAX_MATCH, last)
    while len(places) > FEW and num_matched < most:
        places = places[places >= num_matched]
        longer = places[token_ids[places - num_matched] == token_ids[last - num_matched]]
        if not len(longer):
            break
        places, num_matched = longer, num_matched + 1
    if len(places) > FEW or num_matched == most:
        return num_matched, int(places[-1]) if num_matched else 0
    longest, text = (0, 0), token_ids[-MAX_MATCH:].tolist()
    for place in places[::-1].tolist():
        length = _num_alike(token_ids[max(0, place + 1 - MAX_MATCH) : place + 1].tolist(), text)
        if length > longest[0]:
            longest = length, place
    return longest


def _num_alike(a: list[int], b: list[int]) -> int:
    """How many of the last tokens are the same."""
    count = 0
    for one, other in zip(reversed(a), reversed(b), strict=False):
        if one != other:
            break
        count += 1
    return count
