"""Which blocks are recomputed: enough is freed, nothing cheaper would do, and equals are alike."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.planner.subsets import cheapest, level


def test_the_level_is_that_of_the_worst_moment_of_backward():
    kept = [10.0, 20.0, 30.0]
    assert level(kept, ()) == 60  # backward of the last block, all is kept
    assert level(kept, {0}) == 50
    assert level(kept, {0, 1}) == 30
    assert level(kept, {0, 1, 2}) == 30  # the last one is computed anew at once
    assert level(kept, {2}) == 60
    assert level([], ()) == 0


def test_of_equal_blocks_the_first_are_recomputed_and_no_more_than_needed():
    kept, seconds = [10.0] * 8, [1.0] * 8
    assert cheapest(kept, seconds, 80) == ()
    assert cheapest(kept, seconds, 79) == (0,)
    assert cheapest(kept, seconds, 45) == (0, 1, 2, 3)
    assert cheapest(kept, seconds, 10) == tuple(range(8)) or cheapest(kept, seconds, 10) == tuple(
        range(7)
    )
    assert cheapest(kept, seconds, 9) is None


def test_of_unequal_blocks_those_that_free_most_for_their_time():
    kept, seconds = [10.0, 40.0, 10.0, 10.0], [5.0, 1.0, 5.0, 5.0]
    assert cheapest(kept, seconds, 50) == (1,)
    assert cheapest(kept, seconds, 45) == (0, 1)  # block 1 itself needs 40, beside what is kept
    seconds = [1.0, 50.0, 1.0, 1.0]
    assert cheapest(kept, seconds, 60) == (0,)


blocks = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=2, max_size=7)


@given(blocks, st.floats(0.1, 1.0))
def test_no_other_set_is_much_cheaper(drawn: list[tuple[int, int]], part: float):
    kept, seconds = [float(k) for k, _ in drawn], [float(s) for _, s in drawn]
    most = part * sum(kept)
    everything = range(len(kept))
    sets = chain.from_iterable(combinations(everything, n) for n in range(len(kept) + 1))
    enough = [set(s) for s in sets if level(kept, set(s)) <= most]
    found = cheapest(kept, seconds, most)
    if found is None:
        assert not enough
        return
    assert level(kept, set(found)) <= most
    best = min(sum(seconds[i] for i in s) for s in enough)
    assert sum(seconds[i] for i in found) <= best + max(seconds) + 0.2 * sum(seconds)


@pytest.mark.parametrize("most", [15.0, 33.0, 71.0])
def test_it_is_the_same_every_time(most: float):
    kept, seconds = [7.0, 13.0, 22.0, 5.0, 30.0], [3.0, 1.0, 4.0, 1.0, 5.0]
    assert len({cheapest(kept, seconds, most) for _ in range(5)}) == 1
