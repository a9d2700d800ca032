"""The picture in cut.py, and what cannot be cut."""

import math

import pytest

from anybatch.data.cut import around, ghosts, micro_batches, positions, share
from anybatch.errors import InputError


def test_the_picture():
    assert ghosts(13, 4) == [4, 4, 5]
    assert [share(13, [1, 1], rank, unit=4) for rank in (0, 1)] == [range(8), range(8, 13)]
    assert list(micro_batches(range(8), 4, 4, 13)) == [range(4), range(4, 8)]
    assert list(micro_batches(range(8, 13), 4, 4, 13)) == [range(8, 13)]


def test_the_picture_of_gaps():
    assert around(range(1, 5), [2, 5]) == [range(1, 2), range(3, 5), range(6, 7)]


@pytest.mark.parametrize("gaps", [[], [0], [0, 1, 2], [9], [3, 4, 8], [0, 2, 4, 6, 8], [8, 9]])
def test_samples_around_gaps_are_those_that_are_left(gaps):
    left = [position for position in range(10) if position not in gaps]
    for start in range(len(left) + 1):
        for stop in range(start, len(left) + 1):
            assert list(positions(range(start, stop), gaps)) == left[start:stop]


@pytest.mark.parametrize(
    ("num_samples", "size", "expected"),
    [(8, 4, [4, 4]), (10, 4, [4, 4, 2]), (9, 4, [4, 5]), (1, 4, [1]), (3, 4, [3]), (0, 4, [])],
)
def test_ghosts(num_samples, size, expected):
    assert ghosts(num_samples, size) == expected


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([1, 1, 1], [4, 3, 3]),
        ([3, 1], [8, 2]),  # remainders tie: the lower rank
        ([0, 1], [0, 10]),
        ([0.1, 0.2, 0.7], [1, 2, 7]),
        ([1] * 12, [1] * 10 + [0, 0]),
    ],
)
def test_shares_in_proportion(shares, expected):
    assert [len(share(10, shares, rank)) for rank in range(len(shares))] == expected


def test_pieces_have_one_size_but_the_last():
    sizes = [len(piece) for piece in micro_batches(range(5, 26), 8, None, 26)]
    assert sizes == [8, 8, 5]
    assert list(micro_batches(range(3, 3), 8, None, 10)) == []
    assert [len(p) for p in micro_batches(range(9), 4, None, 9)] == [4, 4, 1]
    assert list(micro_batches(range(5), 7, 3, 5)) == [range(5)]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: share(10, [], 0), "shares of the ranks"),
        (lambda: share(10, [0, 0], 0), "above zero"),
        (lambda: share(10, [1, -1], 0), "at least zero"),
        (lambda: share(10, [1, math.nan], 0), "at least zero"),
    ],
)
def test_what_cannot_be_cut(call, says):
    with pytest.raises(InputError, match=says):
        call()
