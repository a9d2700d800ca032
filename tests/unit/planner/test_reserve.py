"""What is left free of a budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.planner.ranks import budget_for, reserve_of

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("budget", "kind", "free"),
    [
        (16 * MIB, "cpu", 2 * MIB),
        (100 * MIB, "cpu", 4 * MIB),
        (24 * GIB, "cpu", 0.96 * GIB),
        (24 * GIB, "cuda", 0.6 * GIB),
    ],
)
def test_a_part_of_the_budget_stays_free(budget, kind, free):
    assert reserve_of(budget, kind) == int(free)


@given(st.integers(1, 1 << 45), st.sampled_from(["cpu", "cuda"]))
def test_the_least_budget_leaves_the_peak_and_no_smaller_one_does(peak, kind):
    least = budget_for(peak, kind)
    assert least - reserve_of(least, kind) >= peak
    assert least - 2 - reserve_of(least - 2, kind) < peak
