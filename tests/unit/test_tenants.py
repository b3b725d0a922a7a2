"""Fair shares: a tenant that has had far more service than the fair level is heavy, but not for long."""

from __future__ import annotations

from random import Random

import pytest

from shoal_cluster.policies.tenants import FLOOD, FORGOTTEN_S, MAX_PLACE, MEMORY_S, MOST_UNSERVED, FairShares

LONG_S = 30 * MEMORY_S
MEMORY_REQUESTS = round(1 / MOST_UNSERVED)


def served(**tokens: list[float]) -> FairShares:
    """The shares after each tenant was served requests of these sizes (tokens), the tenants taking turns."""
    shares = FairShares()
    for number in range(max(map(len, tokens.values()))):
        for tenant, sizes in tokens.items():
            if number < len(sizes):
                shares.charge(tenant, sizes[number], 0.0)
    return shares


def places(shares: FairShares, *tenants: str) -> list[int]:
    return [shares.place(tenant) for tenant in tenants]


def test_heavy_is_who_has_had_several_times_the_fair_level() -> None:
    shares = served(heavy=[100.0] * 10, light=[100.0])
    assert shares.had_more("heavy")
    assert shares.had_less("light")
    assert not shares.had_more("light")
    assert not shares.are_even


def test_several_heavy_tenants_do_not_hide_behind_each_other() -> None:
    shares = served(a=[100.0] * 10, b=[100.0] * 10, c=[100.0] * 12, light=[100.0], lighter=[50.0])
    assert [shares.had_more(name) for name in ("a", "b", "c", "light", "lighter")] == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("num_requests", "place"), [(4, 0), (5, 1), (7, 2), (13, 3), (10_001, 12), (200_000, MAX_PLACE)]
)
def test_who_has_had_twice_as_much_comes_a_place_later(num_requests: int, place: int) -> None:
    assert places(served(light=[100.0], heavy=[100.0] * num_requests), "light", "heavy") == [0, place]


def test_one_large_request_makes_nobody_heavy() -> None:
    shares = served(small=[100.0, 100.0], large=[100_000.0, 100.0])
    assert shares.are_even
    assert places(shares, "small", "large") == [0, 0]


def test_who_waits_and_has_had_nothing_counts() -> None:
    shares = served(first=[100.0, 100.0])
    assert shares.are_even, "there is nobody to share with"
    shares.enter("waits", 0.0)
    assert shares.had_more("first")
    shares.leave("waits")
    assert shares.are_even


class Diligent(FairShares):
    """Counts anew at every change."""

    def _note_change(self) -> None:
        self._count_anew(0.0)


@pytest.mark.parametrize("seed", range(40))
def test_who_was_alone_is_known_for_what_it_had(seed: int) -> None:
    rng, now = Random(seed), 0.0
    lazy, diligent = FairShares(), Diligent()
    for number in range(60):
        now += rng.expovariate(4.0)
        tenant, num_tokens = "alone" if number < 40 else rng.choice(("alone", "comes")), rng.uniform(1.0, 5000.0)
        for shares in (lazy, diligent):
            shares.enter(tenant, now)
            shares.ask(tenant, round(num_tokens), shares.clock)
            shares.charge(tenant, num_tokens, now)
            shares.leave(tenant)
        assert places(lazy, "alone", "comes") == places(diligent, "alone", "comes")
        assert [lazy.is_over(name) for name in ("alone", "comes")] == [
            diligent.is_over(name) for name in ("alone", "comes")
        ]


def test_who_is_alone_again_is_not_over_its_share() -> None:
    shares = FairShares()
    for tenant in ("stays", "leaves"):
        shares.enter(tenant, 0.0)
        shares.ask(tenant, 1000, shares.clock)
    shares.charge("stays", 100.0, 0.0)
    assert shares.is_over("stays")
    shares.leave("leaves")
    assert not shares.is_over("stays"), "there is nobody to share with"


@pytest.mark.parametrize("num_tenants", [5, 20, 300])
def test_among_tenants_that_ask_alike_nearly_nobody_is_heavy(num_tenants: int) -> None:
    """Requests arrive at random and have very different lengths."""
    shares, rng, now, num_heavy = FairShares(), Random(num_tenants), 0.0, 0
    for _ in range(4000):
        now += rng.expovariate(16.0)
        tenant = f"{rng.randrange(num_tenants)}"
        shares.enter(tenant, now)
        shares.charge(tenant, rng.lognormvariate(7.2, 0.9), now)
        shares.leave(tenant)
        num_heavy += shares.had_more(tenant)
    assert num_heavy <= 0.05 * 4000


@pytest.mark.parametrize("num_tenants", [2, 3, 20])
def test_who_has_had_the_same_to_a_token_is_even(num_tenants: int) -> None:
    """By rounding, their average may be less than what each has had."""
    rng = Random(num_tenants)
    for _ in range(200):
        shares, num_tokens = FairShares(), float(rng.randrange(1, 5000))
        for number in range(num_tenants):
            shares.charge(f"{number}", num_tokens, 0.0)
        shares.fade(MEMORY_S * rng.uniform(1.0, 4.0))
        assert shares.are_even


def many_sizes() -> FairShares:
    """Of 3 360 tokens three tenants have had 33, 13 and 13 %, and 14 equal ones the rest: the first has had 11 times
    the fair level.
    """
    alike = {f"t{number}": [10.0] * 10 for number in range(14)}
    return served(first=[10.0] * 110, second=[10.0] * 43, third=[10.0] * 43, **alike)


def test_where_the_others_have_most_of_the_service_nobody_is_heavy() -> None:
    shares = many_sizes()
    assert shares.are_even
    for _ in range(60):
        shares.charge("first", 10.0, 0.0)
    assert places(shares, "first", "second", "third", "t0") == [3, 1, 1, 0], "now they have less than two fifths"


def test_but_who_asks_for_far_more_than_there_is_for_it() -> None:
    shares, asked = many_sizes(), 0
    for tenant, num_tokens in {"second": 430, "third": 430, **{f"t{number}": 100 for number in range(14)}}.items():
        shares.ask(tenant, num_tokens, shares.clock)
    while shares.are_even and asked < 10_000:
        shares.enter("first", 0.0)
        shares.ask("first", 10, shares.clock)
        asked += 10
        count_anew(shares)
    assert places(shares, "first", "second") == [2, 0]
    level = water_level([asked, 430.0, 430.0, *[100.0] * 14], 3360.0)
    assert FLOOD * level < asked < FLOOD * level + 10.1
    shares.ask("first", -100, shares.clock)
    count_anew(shares)
    assert shares.are_even, "it was less than was thought"


def test_over_its_share_is_who_asks_for_more_than_is_left_for_each() -> None:
    rng = Random(0)
    for _ in range(200):
        wanted = {f"t{number}": rng.randrange(1, 1000) for number in range(rng.randrange(2, 9))}
        shares = FairShares()
        for tenant, num_tokens in wanted.items():
            shares.enter(tenant, 0.0)
            shares.ask(tenant, num_tokens, shares.clock)
        there_is = rng.random() * 1.2 * sum(wanted.values())
        shares.charge("t0", there_is, 0.0)
        level = water_level([float(num_tokens) for num_tokens in wanted.values()], there_is)
        for tenant, num_tokens in wanted.items():
            assert abs(num_tokens - level) < 1e-6 or shares.is_over(tenant) == (num_tokens > level)


def test_what_was_asked_for_is_forgotten_as_it_was_weighed() -> None:
    """However long ago it was asked for: taking it back late takes away no more than is left of it."""
    shares = FairShares()
    shares.enter("a", 0.0)
    since = shares.clock
    shares.ask("a", 1000, since)
    for second in range(1, 30):
        shares.enter("b", float(second))
        shares.ask("b", 100, shares.clock)
        shares.charge("b", 100.0, float(second))
        shares.leave("b")
    assert shares.is_over("b"), "there is not enough for both"
    shares.ask("a", -1000, since)
    count_anew(shares, "b")
    assert [shares.is_over(name) for name in ("a", "b")] == [False, False], "nothing is left of it"


def test_who_asks_steadily_for_less_than_its_share_is_never_over() -> None:
    """Also between recounts, which are far apart with many tenants. Another tenant here asks for more than it gets."""
    rng, shares = Random(0), FairShares()
    for number in range(4000):
        now = number * 0.05
        for name, num_tokens, served in (("most", 800, 200), ("middle", 185, 185), (f"t{rng.randrange(600)}", 60, 60)):
            shares.enter(name, now)
            shares.ask(name, num_tokens, shares.clock)
            shares.charge(name, float(served), now)
            shares.leave(name)
        if number > 1000:
            assert shares.is_over("most")
            assert not shares.is_over("middle")


def count_anew(shares: FairShares, tenant: str = "t0") -> None:
    for _ in range(3):
        shares.charge(tenant, 0.0, 0.0)


def water_level(wanted: list[float], there_is: float) -> float:
    """The max-min fair level, by bisection: ``there_is`` shared evenly, with nobody getting more than it wants."""
    low, high = 0.0, max(wanted)
    if sum(wanted) <= there_is:
        return high
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(min(want, middle) for want in wanted) < there_is else (low, middle)
    return high


def test_who_waits_less_urgently_than_who_was_served_is_passed_over_by_nobody() -> None:
    shares = FairShares()
    shares.enter("batch", 0.0, priority=10)
    for _ in range(9):
        shares.charge("chats", 500.0, 0.0, priority=0)
        assert shares.are_even
    shares.enter("batch", 0.0, priority=0)
    assert shares.had_more("chats")


def test_many_small_services_count_as_much_as_few_large_ones() -> None:
    shares = FairShares()
    for number in range(3000):
        shares.charge("many", 12.0, number / 100)
        if number % 300 == 0:
            shares.charge("few", 100.0, number / 100)
    assert shares.had_more("many")
    assert not shares.had_more("few")


def test_who_comes_and_goes_ages_nobody_that_waits() -> None:
    """Nor does a long wait make the weights overflow."""
    shares = FairShares()
    for tenant in ("heavy", "light"):
        shares.enter(tenant, 0.0)
    for number in range(4 * MEMORY_REQUESTS):
        shares.charge("light" if number % 11 == 0 else "heavy", 100.0, 60.0 * number)
        for half in range(120):
            shares.enter("polls", 60.0 * number + half / 2)
            shares.leave("polls")
    assert shares.had_more("heavy")
    for number in range(20_000):
        shares.enter("polls", 1e4 + number / 2)
        shares.leave("polls")
    shares.charge("polls", 100.0, 3e4)
    assert shares.had_more("heavy")


def test_a_slow_cluster_remembers_as_many_requests_as_a_fast_one() -> None:
    """While both wait; of the requests, one a minute, ten of eleven are the heavy tenant's."""
    shares = FairShares()
    for tenant in ("heavy", "light"):
        shares.enter(tenant, 0.0)
    for number in range(4 * MEMORY_REQUESTS):
        shares.charge("light" if number % 11 == 0 else "heavy", 100.0, 60.0 * number)
    assert shares.had_more("heavy")
    assert shares.had_less("light")


def test_after_a_pause_nobody_is_heavy() -> None:
    shares = served(heavy=[1000.0] * 9, light=[100.0])
    shares.fade(MEMORY_S / 2)
    assert shares.had_more("heavy")
    changes = shares.version
    shares.fade(LONG_S)
    assert shares.are_even
    assert shares.version > changes
    assert not shares._served


def test_to_wait_for_long_is_no_pause() -> None:
    shares = served(heavy=[1000.0] * 9, light=[100.0])
    for tenant in ("heavy", "light"):
        shares.enter(tenant, 0.0)
    shares.fade(LONG_S)
    assert shares.had_more("heavy")
    shares.leave("heavy")
    shares.fade(2 * LONG_S)
    assert shares.are_even, "though the other one waits"


def test_places_stand_while_nothing_is_said_to_have_changed() -> None:
    shares, rng, now = FairShares(), Random(0), 0.0
    names = [f"{number}" for number in range(40)]
    before, version = places(shares, *names), shares.version
    held: list[str] = []
    for _ in range(3000):
        now += rng.expovariate(20.0)
        tenant = names[min(39, int(rng.expovariate(0.2)))]
        match rng.randrange(4):
            case 0:
                shares.enter(tenant, now)
                held.append(tenant)
            case 1 if held:
                shares.leave(held.pop(rng.randrange(len(held))))
            case 2:
                now += rng.choice((0.0, LONG_S))
                shares.fade(now)
            case _:
                shares.charge(tenant, rng.uniform(1.0, 5000.0), now)
        after = places(shares, *names)
        assert (after == before) or shares.version > version
        assert shares.are_even == (not any(after))
        before, version = after, shares.version


def test_tenants_that_come_once_are_forgotten_and_cost_no_more_than_few() -> None:
    shares = FairShares()
    for number in range(20_000):
        shares.enter(f"{number}", number / 10)
        shares.charge(f"{number}", 2000.0, number / 10)
        shares.leave(f"{number}")
    assert len(shares._served) < 10 * FORGOTTEN_S * 1.2
