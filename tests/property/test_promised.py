"""A snapshot plus the promises made since, against a model that counts all promises in again each time."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from fixtures.cluster_views import make_query, make_row, make_stats

from shoal_cluster.policies.candidates import Candidates, ReplicaView
from shoal_cluster.policies.columns import CAPACITY, URGENT, promise
from shoal_cluster.policies.given import Given
from shoal_cluster.policies.promised import FEW_PLACES, Promised
from shoal_cluster.policies.steps_ahead import StepsAhead

STEPS_AHEAD = StepsAhead(1.0)
STEP = 256
QUERY = make_query(160)


class DumbPromised:
    """Promises in a list."""

    def __init__(self, snapshot: Candidates) -> None:
        self.snapshot = snapshot
        self.promises: list[tuple[int, int, int]] = []  # place, blocks, tokens

    def check(self, promised: Promised) -> None:
        columns = self.snapshot.columns.copy()
        for place, num_blocks, num_tokens in self.promises:
            promise(columns, place, 1, num_blocks, num_tokens)
        is_open, is_startable = self._may_start(self.snapshot.columns), self._may_start(columns)
        assert promised.has_startable == any(is_startable)
        assert (promised.num_open, promised.num_startable) == (sum(is_open), sum(is_startable))
        assert promised.may_start().tolist() == is_open
        assert [promised.is_open(place) for place in range(len(is_open))] == is_open
        np.testing.assert_array_equal(promised.columns, columns)
        assert promised.is_untouched == (not self.promises)

    def _may_start(self, columns: np.ndarray) -> list[bool]:
        may_start = []
        for place, stats in enumerate(self.snapshot.stats):
            most = 0 if stats is None else 2 * STEP - 1 if stats.by_due else STEP
            may_start.append(bool(columns[CAPACITY, place] >= 0 and columns[URGENT, place] <= most))
        return may_start


def row(rng: Random, place: int) -> ReplicaView:
    """A replica that has not reported, takes no requests, or has about one or two steps of work."""
    kind = rng.randrange(8)
    num_tokens = rng.choice([0, STEP - 1, STEP, STEP + 1, 2 * STEP - 1, 2 * STEP, rng.randrange(3 * STEP)])
    stats = make_stats(
        max_num_batched_tokens=STEP, num_waiting_tokens=num_tokens, by_due=rng.random() < 0.5, draining=kind == 1
    )
    return make_row(f"replica-{place:03}", None if kind == 0 else stats, connected=kind != 2)


def given(rng: Random, place: int) -> Given:
    matched = np.zeros(1, np.int64)
    return Given(QUERY, place, matched, 0, 0.0, rng.randrange(1, 9), rng.randrange(1, STEP), 1, 1.0, 0.0)


@pytest.mark.parametrize("num_replicas", [1, 5, 4 * FEW_PLACES])
@pytest.mark.parametrize("seed", range(8))
def test_counts_and_columns_are_those_of_promises_counted_in_anew(seed: int, num_replicas: int) -> None:
    rng = Random(f"{seed} {num_replicas}")
    rows = [row(rng, place) for place in range(num_replicas)]
    dumb = DumbPromised(Candidates.of(rows))
    promised = Promised(dumb.snapshot, STEPS_AHEAD)
    all_given: list[Given] = []
    for _ in range(120):
        match rng.randrange(6):
            case 0:
                one = given(rng, rng.randrange(num_replicas))
                promised.add(one.place, one.num_blocks, one.num_tokens)
                dumb.promises.append((one.place, one.num_blocks, one.num_tokens))
                if rng.random() < 0.7:  # otherwise only set aside: the next reset of that place forgets it
                    all_given.append(one)
            case 1:
                for _ in range(rng.randrange(1, 2 * FEW_PLACES)):
                    one = given(rng, rng.randrange(num_replicas))
                    promised.add_later(one)
                    dumb.promises.append((one.place, one.num_blocks, one.num_tokens))
                    all_given.append(one)
            case 2 | 3:  # news of some replicas; some of the given requests are taken back
                changed = rng.sample(range(num_replicas), rng.randint(1, num_replicas))
                rows = [row(rng, place) if place in changed else old for place, old in enumerate(rows)]
                dumb.snapshot = Candidates.of(rows)
                taken = all_given[rng.randint(0, len(all_given)) :]
                del all_given[len(all_given) - len(taken) :]
                promised.renew(dumb.snapshot)
                places = {*changed, *(one.place for one in taken)}
                if not all_given:
                    promised.clear()
                promised.reset(places, all_given)
                kept = [(one.place, one.num_blocks, one.num_tokens) for one in all_given if one.place in places]
                dumb.promises = [one for one in dumb.promises if all_given and one[0] not in places] + kept
            case 4 if not all_given or rng.random() < 0.2:
                promised.clear()
                all_given.clear()
                dumb.promises.clear()
        if rng.random() < 0.6:  # without a check, promises stay owed and are counted in later
            dumb.check(promised)
    dumb.check(promised)
