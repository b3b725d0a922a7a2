"""Requests that wait for the same blocks."""

from __future__ import annotations

from random import Random

import numpy as np
from fixtures.cluster_views import make_query

from shoal_cluster.policies.alike import ALONE, Alike, Shared
from shoal_cluster.policies.held import Held, PendingRequest
from shoal_replica.prefix_cache import BlockHash, hash_blocks

HOT = hash_blocks(list(range(160)), 16)


def held(number: int, hashes: list[BlockHash]) -> Held:
    query = make_query(600, request_id=str(number), block_hashes=tuple(hashes))
    return Held(PendingRequest(query=query, arrival_s=0.0))


def knows(alike: Alike, one: Held, *matched: int) -> Shared:
    """What is said of it once so much of it is known to be cached on each replica."""
    one.matched = np.array(matched, np.int64)
    alike.note(one)
    return alike.of(one)


def test_those_count_that_begin_with_the_same_cached_blocks() -> None:
    alike, more = Alike(), hash_blocks(list(range(400)), 16)
    first, second, third, longer = held(1, HOT), held(2, HOT), held(3, HOT), held(4, more)
    assert knows(alike, first, 10, 0) == ALONE
    assert knows(alike, second, 10, 3) == ALONE  # one for each of two replicas
    assert knows(alike, third, 0, 10) == ALONE  # three, as a power of two
    assert knows(alike, longer, 20, 10) == ALONE  # more of it is cached
    assert knows(alike, longer, 10, 10) == (10, 4, 2)
    assert alike.of(first) == (10, 4, 1)
    assert knows(alike, first, 10, 10, 10) == ALONE  # one for each of four
    alike.drop(longer)
    alike.drop(longer)
    assert alike.of(longer) == alike.of(second) == ALONE


def test_counts_are_those_of_all_that_are_held() -> None:
    """By a plain count, over random events; and unless ``num_changes`` differs, nothing is told otherwise of others."""
    rng, alike, prompts = Random(1), Alike(), [hash_blocks([kind, *range(300)], 16) for kind in range(3)]
    waiting: dict[int, Held] = {}
    told: dict[int, Shared] = {}
    for number in range(2000):
        changes, noted = alike.num_changes, -1
        if waiting and rng.random() < 0.4:
            alike.drop(waiting.pop(rng.choice(list(waiting))))
        elif waiting and rng.random() < 0.5:
            noted = rng.choice(list(waiting))
            knows(alike, waiting[noted], rng.choice([0, 3, 9]), rng.choice([0, 3]))
        else:
            waiting[number] = held(number, rng.choice(prompts))
        ends = {
            key: one.pending.query.block_hashes[int(one.matched.max()) - 1] if one.matched.any() else None
            for key, one in waiting.items()
        }
        for key, one in waiting.items():
            count = sum(end == ends[key] for end in ends.values()) if ends[key] is not None else 0
            num_holders = int((one.matched == one.matched.max(initial=0)).sum())
            num_alike = 2 ** int(np.log2(count)) if count else 1
            known = (int(one.matched.max()), num_alike, num_holders) if num_alike > num_holders + 1 else ALONE
            assert alike.of(one) == known
            assert alike.num_changes != changes or key == noted or told.get(key, known) == known
        told = {key: alike.of(one) for key, one in waiting.items()}
    for one in waiting.values():
        alike.drop(one)
    assert not alike._counts
