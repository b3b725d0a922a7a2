"""The replica of least cost, native: what ``routing`` works out with numpy, in one call."""

from __future__ import annotations

from ctypes import addressof, byref, c_char, c_int64

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.native_library import library
from shoal_cluster.policies.ranking import RouteQuery

_num_eligible = c_int64()
_num_eligible_address = addressof(_num_eligible)


def native_least_cost(
    query: RouteQuery, candidates: Candidates, prefill_price: float, sequence_price: float
) -> tuple[int, int]:
    """For a prompt that passes no others and leaves no replica out, of one or more: the best's place, where it has room
    now and no other costs the same, and how many are eligible; else -1 for the place. The costs are ``routing.cost``'s.
    For one thread at a time.
    """
    assert library is not None
    columns, matched = candidates.columns, candidates.num_matched_blocks
    place: int = library.shoal_least_cost(
        byref(c_char.from_buffer(columns.data)),
        matched.size,
        byref(c_char.from_buffer(matched.data)),
        query.num_prompt_tokens,
        query.block_size,
        query.num_blocks_needed,
        prefill_price,
        sequence_price,
        _num_eligible_address,
    )
    return place, _num_eligible.value
