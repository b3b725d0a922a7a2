"""Requests that wait for the same blocks."""

from __future__ import annotations

from random import Random

import numpy as np
from fixtures.cluster_views import make_query, make_row, make_stats

from shoal_cluster.policies.alike import ALONE, Alike, Shared
from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import Phase
from shoal_cluster.policies.held import Held, KnownEnd
from shoal_cluster.policies.pending_request import PendingRequest
from shoal_replica.prefix_cache import BlockHash, hash_blocks

HOT = hash_blocks(list(range(160)), 16)


def held(number: int, hashes: list[BlockHash], phase: Phase = "") -> Held:
    query = make_query(600, request_id=str(number), block_hashes=tuple(hashes), phase=phase)
    return Held(PendingRequest(query=query, arrival_s=0.0))


def present(*num_blocks: int, role: Phase = "") -> Candidates:
    """Replicas of these sizes."""
    return Candidates.of(
        [
            make_row(f"replica-{place}", make_stats(num_total_blocks=total), role=role)
            for place, total in enumerate(num_blocks)
        ]
    )


def knows(alike: Alike, one: Held, *matched: int, replicas: Candidates | None = None) -> Shared:
    """What is said of it once so much of it is known to be cached on each replica."""
    one.matched = np.array(matched, np.int64)
    alike.note(one, replicas or present(*[100] * len(matched)))
    return alike.of(one)


def test_those_count_that_begin_with_the_same_cached_blocks() -> None:
    alike, more = Alike(), hash_blocks(list(range(400)), 16)
    first, second, third, longer = held(1, HOT), held(2, HOT), held(3, HOT), held(4, more)
    assert knows(alike, first, 10, 0) == ALONE
    assert knows(alike, second, 10, 3) == ALONE  # one for each of two replicas
    assert knows(alike, third, 0, 10) == ALONE  # three, as a power of two
    assert knows(alike, longer, 20, 10) == ALONE  # more of it is cached
    assert knows(alike, longer, 10, 10) == (10, 4, 2)
    assert alike.of(first) == (10, 4, 2)  # as last looked up for any of them
    assert knows(alike, first, 10, 10, 10) == alike.of(second) == ALONE  # one for each of four
    alike.drop(longer)
    alike.drop(longer)
    assert alike.of(longer) == alike.of(second) == ALONE


def test_who_is_sent_to_another_replica_makes_it_a_holder() -> None:
    alike, waiting = Alike(), [held(number, HOT) for number in range(9)]
    for one in waiting:
        knows(alike, one, 10, 0, 0)
    assert alike.of(waiting[0]) == (10, 8, 1)
    alike.send(waiting.pop(), 10)
    assert alike.of(waiting[0]) == (10, 8, 1)
    waiting.append(held(10, HOT))
    knows(alike, waiting[-1], 10, 0, 0)
    changes = alike.version
    alike.send(waiting.pop(), 4)
    assert alike.of(waiting[0]) == (10, 8, 2)
    assert alike.version > changes


def test_replicas_that_must_not_take_a_request_hold_nothing_for_it() -> None:
    alike, small = Alike(), present(100, 20, 100)
    for number in range(4):
        knows(alike, held(number, HOT), 5, 10, 3, replicas=small)
        one = held(number + 4, HOT)
        assert knows(alike, one, 10, 10, 3, replicas=small) == ((10, 4, 1) if number == 3 else ALONE)


def test_requests_for_different_roles_are_not_alike() -> None:
    alike = Alike()
    for number in range(3):
        knows(alike, held(number, HOT, "decode"), 10, 0, replicas=present(100, 100, role="decode"))
        assert knows(alike, held(number + 4, HOT), 10, 0) == ALONE


def test_groups_are_those_of_all_that_are_held() -> None:
    """By a plain count, over random events; and unless ``version`` differs, nothing is told otherwise of others."""
    rng, alike, prompts = Random(1), Alike(), [hash_blocks([kind, *range(300)], 16) for kind in range(3)]
    waiting: dict[int, Held] = {}
    told: dict[int, Shared] = {}
    holders: dict[KnownEnd | None, int] = {}
    for number in range(2000):
        changes, noted = alike.version, -1
        if waiting and rng.random() < 0.4:
            gone = waiting.pop(rng.choice(list(waiting)))
            end, num_matched = end_of(gone), rng.choice([0, 3, 9])
            if rng.random() < 0.5:
                alike.drop(gone)
            else:
                alike.send(gone, num_matched)
                holders[end] = holders.get(end, 0) + (num_matched < gone.matched.max(initial=0))
        elif waiting and rng.random() < 0.5:
            noted = rng.choice(list(waiting))
            knows(alike, waiting[noted], rng.choice([0, 3, 9]), rng.choice([0, 3]))
            holders[end_of(waiting[noted])] = int((waiting[noted].matched == waiting[noted].matched.max()).sum())
        else:
            waiting[number] = held(number, rng.choice(prompts))
        ends = {key: end_of(one) for key, one in waiting.items()}
        holders = {end: count for end, count in holders.items() if end in ends.values()}
        for key, one in waiting.items():
            count = sum(end == ends[key] for end in ends.values()) if ends[key] is not None else 0
            num_alike = 2 ** int(np.log2(count)) if count else 1
            is_one = ends[key] is None or num_alike <= holders[ends[key]] + 1
            known = ALONE if is_one else (int(one.matched.max()), num_alike, holders[ends[key]])
            assert alike.of(one) == known
            assert alike.version != changes or key == noted or told.get(key, known) == known
        told = {key: alike.of(one) for key, one in waiting.items()}
    for one in waiting.values():
        alike.drop(one)
    assert not alike._groups


def end_of(one: Held) -> KnownEnd | None:
    return (one.pending.query.block_hashes[int(one.matched.max()) - 1], "") if one.matched.any() else None
