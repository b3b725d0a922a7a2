"""Which replica could give another one a prompt's cached blocks, so that it need not compute them."""

from __future__ import annotations

from typing import NamedTuple

from shoal_cluster.policies.candidates import Candidates


class BlockOffer(NamedTuple):
    """A replica and the leading blocks of the prompt that it has: more than the replica where the prompt goes."""

    replica_id: str
    num_blocks: int


def best_offer(candidates: Candidates, replica_id: str) -> BlockOffer | None:
    """The replica that has the most blocks of the prompt, of those that can be reached; None if it is ``replica_id``,
    where the prompt goes, or has no more than that. It may drain: it gives what it has as long as it is there.
    """
    matched = candidates.num_matched_blocks
    most, offer = candidates.matched_by(replica_id), None
    for place in (matched > most).nonzero()[0].tolist():
        state, num_blocks = candidates.states[place], matched.item(place)
        if state.connected and not state.stalled and num_blocks > most:
            most, offer = num_blocks, BlockOffer(candidates.replica_ids[place], num_blocks)
    return offer
