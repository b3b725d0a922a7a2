"""Where ``foresee`` expects another gateway's request to go, against ``route`` with the whole query."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from fixtures.cluster_views import make_query, make_row, make_stats

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.foresight import foresee
from shoal_cluster.policies.route_query import priced_steps, uncached_blocks, uncached_tokens
from shoal_cluster.policies.routing import RouteWeights, route
from shoal_cluster.policies.wishes import PlacedWish, Wish

WEIGHTS = RouteWeights()
BLOCK = 16


@pytest.mark.parametrize("seed", range(300))
def test_a_request_is_foreseen_to_go_where_it_would_be_routed(seed: int) -> None:
    rng = Random(seed)
    rows = [
        make_row(
            f"replica-{place}",
            make_stats(
                num_total_blocks=rng.choice([8, 100]),
                num_free_blocks=rng.choice([0, 3, 8]),
                num_running=rng.randrange(9),
                num_waiting_tokens=rng.randrange(4000),
                draining=rng.random() < 0.1,
            ),
            connected=rng.random() < 0.9,
            age_s=rng.choice([0.0, 1.0, 4.5]),
        )
        for place in range(6)
    ]
    place, num_tokens = rng.randrange(6), rng.randrange(1, 160)
    matched = np.zeros(6, np.int64)
    matched[place] = rng.randrange(
        (num_tokens - 1) // BLOCK + 1
    )  # even of a prompt that is cached whole, one token is computed
    query = make_query(num_tokens, decode_steps=priced_steps(rng.choice([1, 8, 100, None])))
    snapshot = Candidates.of(rows)
    size = [uncached_blocks(query, matched.item(place)), uncached_tokens(query, matched.item(place))]
    other = PlacedWish(Wish((0, 0, 1.0), *size, matched.item(place), query.decode_steps), place)

    there, *takes = foresee(other, snapshot, WEIGHTS, BLOCK)

    decision = route(query, snapshot.matching(matched), WEIGHTS, rng)
    if not decision.ranked:
        assert [there, *takes] == [place, *size], "it waits where it was wished"
        return
    best = snapshot.replica_ids.index(decision.ranked[0])
    scores = {candidate.replica_id: candidate.score for candidate in decision.candidates}
    if there != best:  # a tie
        assert scores[snapshot.replica_ids[there]] == pytest.approx(scores[decision.ranked[0]])
    assert takes == [uncached_blocks(query, matched.item(there)), uncached_tokens(query, matched.item(there))]
