"""What holds of held-out data for any length, batch and number of ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

from anybatch.data.evaluation import evaluation_batches, join

lengths = st.integers(1, 60)
batches = st.integers(1, 70)
ranks_of = st.one_of(
    st.integers(1, 9).map(lambda count: (1.0,) * count),
    st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.5, 7.0]), min_size=1, max_size=9).filter(any),
).map(tuple)


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return ((i, torch.rand(())) for i in range(self.count))


KINDS = {
    "tensors": lambda n: TensorDataset(torch.arange(n), torch.zeros(n)),
    "list": lambda n: [(i, 0.0) for i in range(n)],
    "stream": Stream,
}


def over_ranks(kind, count, batch, shares, **more):
    """For each rank its batches, as (numbers, noise, number of samples)."""
    return [
        [
            (parts[0].tolist(), parts[1].tolist(), number)
            for parts, number in evaluation_batches(
                KINDS[kind](count), None, batch, rank=rank, shares=shares, **more
            )
        ]
        for rank in range(len(shares))
    ]


@pytest.mark.parametrize("kind", sorted(KINDS))
@given(lengths, batches, ranks_of, st.booleans())
def test_every_sample_comes_once_on_one_rank(kind, count, batch, shares, lockstep):
    ranks = over_ranks(kind, count, batch, shares, lockstep=lockstep)
    own = [[one for one in each if one[2]] for each in ranks]
    seen = [number for each in own for numbers, _, _ in each for number in numbers]
    assert sorted(seen) == list(range(count))
    assert all(len(numbers) == size <= batch for each in own for numbers, _, size in each)
    if kind != "stream":
        assert seen == list(range(count))
    for mine, part in zip(own, shares, strict=True):
        wanted = count * part / sum(shares)
        assert kind == "stream" or abs(sum(size for _, _, size in mine) - wanted) <= 1
        assert part or not mine
    if lockstep:
        assert len({len(each) for each in ranks}) == 1
        assert len(ranks[0]) == max(map(len, own))
        for each, mine in zip(ranks, own, strict=True):
            assert each[: len(mine)] == mine  # what is not one's own comes last


@given(lengths, batches, batches, ranks_of)
def test_what_a_stream_draws_depends_on_no_cut(count, batch, other, shares):
    def noise(ranks):
        return {n: x for each in ranks for ns, xs, _ in each for n, x in zip(ns, xs, strict=True)}

    before = torch.get_rng_state()
    alone = noise(over_ranks("stream", count, batch, (1.0,)))
    assert noise(over_ranks("stream", count, other, shares)) == alone
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", sorted(KINDS))
@given(lengths, batches, st.integers(0, 70))
def test_it_goes_on_from_any_sample(kind, count, batch, first):
    whole = over_ranks(kind, count, batch, (1.0,))[0]
    if kind == "stream" and first >= count:
        first = count
    rest = over_ranks(kind, count, batch, (1.0,), first=first)[0]
    numbers = [n for ns, _, _ in rest for n in ns]
    assert numbers == [n for ns, _, _ in whole for n in ns][first:]
    assert len(rest) == math.ceil(max(0, count - first) / batch)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any), st.booleans())
def test_joined_pieces_are_the_whole(sizes, named):
    count = sum(sizes)
    x = torch.arange(count * 2.0).reshape(count, 2)
    names = [f"sample {i}" for i in range(count)]
    pieces, start = [], 0
    for size in sizes:
        stop = start + size
        inner = (x[start:stop], names[start:stop])
        pieces.append({"a": inner, "b": None} if named else inner)
        start = stop
    whole = join(pieces, sizes)
    x_found, names_found = whole["a"] if named else whole
    assert torch.equal(x_found, x)
    assert names_found == names
