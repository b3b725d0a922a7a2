"""Shares of service: paid back by all who want such, held against nobody for long."""

from __future__ import annotations

from shoal_cluster.policies.tenants import BURST_TOKENS, MAX_EXCESS_TOKENS, MEMORY_S, FairShares


def test_shares_are_paid_back_by_all_who_want_service() -> None:
    shares = FairShares()
    for tenant in ("a", "b"):
        shares.enter(tenant)
    shares.charge("a", 4 * BURST_TOKENS, 0.0)
    assert (shares.excess("a"), shares.excess("b")) == (2, 0)
    shares.charge("b", 4 * BURST_TOKENS, 0.0)
    assert (shares.excess("a"), shares.excess("b")) == (0, 2)
    shares.leave("a")
    for _ in range(5):
        shares.charge("b", BURST_TOKENS, 0.0)
    assert shares.excess("b") == 2  # alone it pays back what it takes


def test_who_waits_with_a_lower_priority_does_not_want_such() -> None:
    shares = FairShares()
    shares.enter("batch", 10)
    shares.enter("chats", 0)
    shares.charge("chats", 8 * BURST_TOKENS, 0.0, 0)
    assert shares.excess("chats") == 0
    shares.charge("batch", 8 * BURST_TOKENS, 0.0, 10)
    assert shares.excess("batch") == 4


def test_a_debt_has_a_bound_and_fades_when_nothing_more_is_wanted() -> None:
    shares = FairShares()
    for tenant in ("waits", "busy"):
        shares.enter(tenant)
    for number in range(3000):
        shares.charge("busy", 8000.0, number / 10)
        assert shares.excess("busy") <= MAX_EXCESS_TOKENS / BURST_TOKENS
    assert shares.excess("busy") >= MAX_EXCESS_TOKENS / BURST_TOKENS - 4
    for tenant in ("waits", "busy"):
        shares.leave(tenant)
    assert shares.fade(300.0 + 20 * MEMORY_S)
    assert shares.place("busy") == 0
    assert shares.are_even


def test_a_slow_cluster_charges_as_much_as_a_fast_one() -> None:
    shares = FairShares()
    for tenant in ("light", "heavy"):
        shares.enter(tenant)
    for number in range(42):
        shares.charge("heavy", 100.0, 60.0 * number)
    assert shares.excess("heavy") == 1


def test_after_a_pause_nobody_has_had_more() -> None:
    shares = FairShares()
    shares.enter("light")
    shares.charge("heavy", 9000.0, 0.0)
    shares.leave("light")
    shares.charge("light", 100.0, 1.0)
    assert not shares.fade(1.0 + MEMORY_S / 2)
    assert shares.had_more("heavy")
    changes = shares.num_changes
    assert shares.fade(1.0 + 20 * MEMORY_S)
    assert not shares.had_more("heavy")
    assert shares.num_changes > changes
    assert not shares.fade(1.0 + 60 * MEMORY_S), "there is nothing left"


def test_tenants_that_come_once_are_forgotten() -> None:
    shares = FairShares()
    for number in range(5000):
        for waiting in range(3):
            shares.enter(f"{number + waiting}")
        shares.charge(f"{number}", 2000.0, number / 10)
        for waiting in range(3):
            shares.leave(f"{number + waiting}")
    assert len(shares._excess) + len(shares._served) < 2 * 10 * MEMORY_S * 8


def test_what_was_long_ago_is_forgotten() -> None:
    shares = FairShares()
    shares.charge("a", 1000.0, 0.0)
    shares.charge("b", 500.0, 0.0)
    assert shares.had_more("a")
    assert not shares.had_more("b")
    shares.charge("b", 10.0, 1000.0)
    assert not shares.had_more("a")
    assert not shares.had_more("b")
