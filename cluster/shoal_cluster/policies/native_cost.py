"""The replica of least cost in one native call: what ``routing`` otherwise computes with numpy."""

from __future__ import annotations

from ctypes import addressof, byref, c_char, c_int64

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.native_library import library
from shoal_cluster.policies.route_query import RouteQuery

_num_eligible = c_int64()
_num_eligible_address = addressof(_num_eligible)


def native_least_cost(
    query: RouteQuery, candidates: Candidates, prefill_price: float, sequence_price: float
) -> tuple[int, int]:
    """The cheapest replica's place, if it has room now and no other costs the same, else -1; and how many are eligible.

    ``query`` must pass no other requests and not be restricted, and there must be at least one replica. Costs are
    those of ``routing.cost``. For one thread at a time.
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
        query.num_known_blocks,
        query.spared,
        prefill_price,
        sequence_price,
        _num_eligible_address,
    )
    return place, _num_eligible.value
