"""Shares that follow measured speed, from times that are made up."""

from __future__ import annotations

import pytest

from anybatch.data import share
from anybatch.engine import Balance


def cut(shares, total, unit=1):
    return [len(share(total, shares, rank, unit)) for rank in range(len(shares))]


def run(speeds, steps, total=800, unit=1):
    """The shares after each step of ranks with these samples per second; None: as before."""
    balance, shares, found = Balance(), (1.0,) * len(speeds), []
    for _ in range(steps):
        seconds = [n / speed for n, speed in zip(cut(shares, total), speeds, strict=True)]
        proposal = balance.observe(lambda proposed: cut(proposed, total, unit), shares, seconds)
        found.append(proposal)
        shares = proposal.shares if proposal else shares
    return found, shares


def test_unequal_ranks_end_together_after_a_few_steps():
    found, shares = run([5.0, 2.0, 1.0], 20)
    assert sum(one is not None for one in found) == 1
    parts = [len(share(800, shares, rank)) for rank in range(3)]
    assert parts == [500, 200, 100]


def test_equal_ranks_are_left_alone():
    assert run([3.0, 3.1, 2.9], 50)[0] == [None] * 50


def test_one_slow_step_changes_nothing():
    balance = Balance()
    for step in range(40):
        slow = 9.0 if step % 6 == 5 else 1.0
        assert balance.observe(lambda shares: cut(shares, 200), (1.0, 1.0), [1.0, slow]) is None


def test_a_rank_without_samples_keeps_none():
    balance = Balance()
    found = [
        balance.observe(lambda shares: cut(shares, 200), (1.0, 1.0, 0.0), [1.0, 3.0, 0.0])
        for _ in range(5)
    ][-1]
    assert found is not None
    assert found.shares[2] == found.seconds[2] == 0.0
    assert found.shares[0] == pytest.approx(3 * found.shares[1], rel=0.01)


def test_the_seconds_that_are_told_are_those_in_the_middle_of_the_steps():
    balance = Balance()
    for slow in (3.0, 2.0, 9.0, 2.5, 2.2):
        found = balance.observe(lambda shares: cut(shares, 200), (1.0, 1.0), [1.0, slow])
    assert found is not None
    assert found.seconds == pytest.approx((1.0, 2.5))


def test_times_that_are_not_known_yet_say_nothing():
    assert Balance().observe(lambda shares: cut(shares, 200), (1.0, 1.0), [0.0, 1.0]) is None


def test_a_rank_a_fifth_faster_than_the_others_is_given_more():
    found, shares = run([1.2, 1.0], 6)
    assert any(found)
    first, second = cut(shares, 800)
    assert first / 1.2 == pytest.approx(second, rel=0.01)


def test_shares_that_would_be_cut_as_they_are_now_are_not_proposed():
    assert run([1.2, 1.0], 30, total=64, unit=32)[0] == [None] * 30
