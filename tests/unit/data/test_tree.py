"""The parts of a step make the same sum wherever they are added up."""

from functools import reduce
from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import example, given

from anybatch.data import Node, join, nodes_of, part_at, parts_of_rank, share
from anybatch.data.tree import most_kept
from anybatch.plans import num_units


def pair(left, right):
    return f"({left}+{right})"


def sum_of(low, high, num_parts):
    """Parts `low` to `high` (exclusive), a power of two of them or the end cut off, as a formula."""
    if high - low == 1:
        return str(low)
    middle = (low + high) // 2
    left = sum_of(low, middle, num_parts)
    return pair(left, sum_of(middle, high, num_parts)) if middle < num_parts else left


def formula(num_parts):
    return sum_of(0, 1 << (num_parts - 1).bit_length(), num_parts)


def over_ranks(cut, num_parts):
    """The formula of the ranks that have the parts between the places of `cut`."""
    root = []
    bounds = [0, *cut, num_parts]
    for first, last in pairwise(bounds):
        stack = []
        for part in range(first, last):
            join(stack, Node(0, part), str(part), num_parts, pair)
        assert tuple(node for node, _ in stack) == nodes_of(range(first, last), num_parts)
        for node, value in stack:
            join(root, node, value, num_parts, pair)
    ((_, value),) = root
    return value


@given(st.data())
def test_any_ranks_add_up_the_same(data):
    num_parts = data.draw(st.integers(1, 40))
    cut = data.draw(st.lists(st.integers(0, num_parts), max_size=6).map(sorted))
    assert over_ranks(cut, num_parts) == formula(num_parts)


def test_the_tree():
    assert formula(6) == "(((0+1)+(2+3))+(4+5))"
    assert formula(5) == "(((0+1)+(2+3))+4)"
    assert over_ranks([], 1) == "0"


@given(st.integers(1, 200))
def test_what_is_kept_grows_with_the_logarithm(num_parts):
    assert most_kept(range(num_parts), num_parts) <= (num_parts - 1).bit_length()


def test_what_is_kept():
    assert most_kept(range(1), 1) == 0
    assert most_kept(range(2), 2) == 1
    assert most_kept(range(8), 8) == 3
    assert most_kept(range(4, 8), 8) == 2


@given(
    num_samples=st.integers(1, 300),
    part=st.integers(1, 60),
    shares=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any),
)
@example(num_samples=41, part=8, shares=[1, 1])
@example(num_samples=1, part=8, shares=[0, 1])
def test_each_part_is_one_ranks(num_samples, part, shares):
    """And holds the samples that the shares say."""
    ranges = [parts_of_rank(num_samples, part, shares, rank) for rank in range(len(shares))]
    found = reduce(lambda have, more: [*have, *more], ranges, [])
    assert found == list(range(num_units(num_samples, part)))
    for rank, parts in enumerate(ranges):
        own = share(num_samples, shares, rank, part)
        assert {part_at(position, num_samples, part) for position in own} == set(parts)
