"""Samples of unequal length: how they are cut, shared and put in order."""

from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from anybatch.data import Loader, Steps, ghosts, permutation, schedule
from anybatch.data.lengths import (
    Extent,
    lengths_of,
    longest_first,
    micro_batches_by_length,
    padded_size,
    share_by_length,
)
from anybatch.errors import InputError

lengths = st.lists(st.integers(1, 30), min_size=1, max_size=60).map(np.array)
ghost_batches = st.none() | st.integers(2, 9)


def boundaries(count: int, ghost: int | None) -> set[int]:
    """Where a cut may lie."""
    sizes = ghosts(count, ghost) if ghost else [1] * count
    return {0, *itertools.accumulate(sizes)}


@given(lengths, st.integers(1, 200), ghost_batches)
def test_micro_batches_are_as_large_as_they_may_be(lengths, most, ghost):
    count = len(lengths)
    allowed = sorted(boundaries(count, ghost))
    pieces = micro_batches_by_length(lengths, range(count), most, ghost)
    assert [i for piece in pieces for i in piece] == list(range(count))
    for piece in pieces:
        assert piece.stop in allowed
        units = sum(piece.start < end <= piece.stop for end in allowed)
        assert padded_size(lengths, piece) <= most or units == 1
        if piece.stop < count:
            larger = range(piece.start, next(end for end in allowed if end > piece.stop))
            assert padded_size(lengths, larger) > most


def test_one_sample_twenty_times_longer_has_a_micro_batch_of_its_own():
    lengths = np.array([5] * 10 + [100] + [5] * 30)
    pieces = micro_batches_by_length(lengths, range(41), 100, None)
    assert [len(piece) for piece in pieces] == [10, 1, 20, 10]


@given(lengths, st.lists(st.integers(0, 5), min_size=1, max_size=4), ghost_batches)
def test_ranks_take_parts_of_the_total_length(lengths, shares, ghost):
    if not sum(shares):
        shares[0] = 1
    parts = [share_by_length(lengths, shares, rank, ghost) for rank in range(len(shares))]
    assert [i for part in parts for i in part] == list(range(len(lengths)))
    ends = sorted(boundaries(len(lengths), ghost))
    reached = {end: int(lengths[:end].sum()) for end in ends}
    for rank, part in enumerate(parts):
        wanted = reached[ends[-1]] * sum(shares[: rank + 1]) / sum(shares)
        nearest = min(abs(total - wanted) for total in reached.values())
        assert abs(reached[part.stop] - wanted) == pytest.approx(nearest)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=40),
    st.integers(1, 12),
    st.sampled_from(["keep", "drop", "wrap"]),
    st.none() | st.integers(1, 90),
)
def test_a_global_batch_is_put_in_order_and_stays_the_same_set(lengths, size, last, samples):
    count = len(lengths)
    if last == "drop" and count < size:
        size = count
    steps = Steps(count, size, last, epochs=None if samples else 3, samples=samples)
    values = torch.tensor(lengths)
    before = [permutation(0, epoch, count) for epoch in range(100)]
    after = [longest_first(values, steps, order, epoch) for epoch, order in enumerate(before)]
    for step in range(steps.total_steps):
        for epoch, start, stop in steps.samples_of(step):
            mine = after[epoch][start:stop].tolist()
            theirs = before[epoch][start:stop].tolist()
            # Equal ones stay in the order of the epoch, and so do a few by which noise is measured.
            whole = len(steps.samples_of(step)) == 1 and len(theirs) > 1
            few = math.ceil(len(theirs) / 16) if whole else 0
            assert mine == theirs[:few] + sorted(theirs[few:], key=lambda index: -lengths[index])


def test_a_loader_tells_the_lengths_of_a_step_and_gives_its_samples_in_their_order():
    data = torch.utils.data.TensorDataset(torch.arange(10))
    lengths = torch.tensor([3, 9, 1, 7, 7, 2, 8, 5, 4, 6])
    steps = Steps(10, 6, "keep", epochs=1)
    loader = Loader(data, steps, shuffle=False, lengths=lengths, by_length=True)
    loader.begin(0, lambda extent: [range(extent.num_samples)])
    first = loader.next_step()
    assert first.extent.lengths.tolist() == [3, 9, 7, 7, 2, 1]
    assert first.extent.num_drawn == 1
    assert next(first.micro_batches)[0].tolist() == [0, 1, 3, 4, 5, 2]
    again = loader.redo(lambda extent: [range(extent.num_samples)], gaps=[2, 5])
    assert again.extent.lengths.tolist() == [3, 9, 7, 2]
    assert again.extent.num_drawn == 1
    assert next(again.micro_batches)[0].tolist() == [0, 1, 4, 5]
    assert [place.name[1] for place in loader.places(range(1, 3))] == [1, 4]
    assert loader.redo(lambda extent: [range(extent.num_samples)], gaps=[0]).extent.num_drawn == 0


def test_samples_are_all_in_order_of_length_where_noise_is_not_measured(monkeypatch):
    monkeypatch.setattr(schedule, "ALL_MEASURED", 1)
    lengths = torch.arange(40) % 7
    steps = Steps(40, 20, "keep", epochs=4)
    for epoch, few in ((0, (2, 0)), (1, (0, 0)), (2, (2, 0))):  # steps 0 and 4 are measured
        order = longest_first(lengths, steps, torch.arange(40), epoch)
        for index, num_drawn in enumerate(few):
            mine = order[20 * index : 20 * (index + 1)].tolist()
            drawn = list(range(20 * index, 20 * index + num_drawn))
            assert mine[:num_drawn] == drawn
            rest = lengths[mine[num_drawn:]]
            assert torch.equal(rest, rest.sort(descending=True).values)


def test_the_amount_of_a_part_is_its_length_or_number():
    assert Extent(4).amount(range(1, 4)) == 3
    assert Extent(4, np.array([5, 1, 2, 7])).amount(range(1, 4)) == 10


class Data(torch.utils.data.Dataset):
    """Three sequences."""

    def __init__(self):
        self.rows = ["a", "bcd", ""]

    def __len__(self):
        return len(self.rows)


def test_lengths_are_given_or_asked_for_once():
    asked = []

    def measure(data):
        asked.append(data)
        return [len(row) for row in data.rows]

    data = Data()
    assert lengths_of(None, data, "training") is None
    assert lengths_of([4, 5, 6], data, "training").tolist() == [4, 5, 6]
    assert lengths_of(measure, data, "training").tolist() == [1, 3, 1]  # nothing counts as one
    assert lengths_of(measure, data, "training").tolist() == [1, 3, 1]
    assert len(asked) == 1
    data.rows.append("efgh")
    assert lengths_of(measure, data, "training").tolist() == [1, 3, 1, 4]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([1, 2], "there are 2 lengths for 3 training samples"),
        ([1, -2, 3], "that of sample 1 is -2"),
        ([1, 2.5, 3], "that of sample 1 is 2.5"),
        ([1, None, 3], "that of sample 1 is None"),
        (np.ones((3, 2), dtype=int), "they are int64 of shape (3, 2)"),
        (torch.ones(3), "they are float32 of shape (3,)"),
        (lambda data: 7, "for each sample, or a function from a data set to the lengths"),
    ],
)
def test_what_is_no_length_for_each_sample_is_refused(given, says):
    with pytest.raises(InputError) as error:
        lengths_of(given, Data(), "training")
    assert says in str(error.value)
