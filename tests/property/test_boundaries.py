"""Steps of a global batch in tokens, or that grows, against loops over single samples."""

from __future__ import annotations

from itertools import pairwise, permutations, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import anybatch as ab
from anybatch.data import Steps, permutation
from anybatch.data.boundaries import most_samples

lasts = st.sampled_from(["keep", "wrap"])
some_lengths = st.lists(st.integers(1, 30), min_size=1, max_size=25)
trainings = st.one_of(
    st.builds(lambda n: {"epochs": n}, st.integers(1, 3)),
    st.builds(lambda n: {"steps": n}, st.integers(1, 12)),
    st.builds(lambda n: {"samples": n}, st.integers(1, 60)),
)


def steps_by(rule, lengths, last, training, seed=3):
    """The steps of a shuffled data set of these lengths."""
    values = np.array(lengths)

    def in_order(epoch):
        return values[permutation(seed, epoch, len(values)).numpy()]

    return Steps(len(values), rule, last, lengths=in_order, **training)


def one_by_one(lengths, last, training, target_of, seed=3):
    """The lengths in each step, sample by sample; `target_of`: from a step's index and first sample."""
    found, step, taken = [], [], 0
    for epoch in range(10_000):
        order = permutation(seed, epoch, len(lengths)).tolist()
        for number, sample in enumerate(order):
            step.append(lengths[sample])
            taken += 1
            reached = sum(step) >= target_of(len(found), taken - len(step))
            ends = last == "keep" and number + 1 == len(order)
            over = taken == training.get("samples", taken + 1)
            if training.get("epochs") == epoch + 1 and number + 1 == len(order):
                over = True
            if reached or ends or over:
                found.append(step)
                step = []
            if over or len(found) == training.get("steps"):
                return found
    raise AssertionError


@given(some_lengths, st.integers(1, 120), lasts, trainings)
def test_a_step_ends_with_the_sample_that_reaches_the_target(lengths, count, last, training):
    steps = steps_by(ab.Tokens(count), lengths, last, training)
    expected = one_by_one(lengths, last, training, lambda index, first: count)
    assert steps.total_steps == len(expected)
    sizes = [steps.num_samples_of(index) for index in range(len(expected))]
    assert sizes == [len(step) for step in expected]
    assert steps.num_samples_of(len(expected)) == 0
    assert steps.total_samples == sum(sizes)
    assert steps.total_tokens == sum(map(sum, expected))
    assert steps.tokens_before(len(expected) // 2) == sum(map(sum, expected[: len(expected) // 2]))
    assert steps.first_of_one == (sizes.index(1) if 1 in sizes else None)
    assert max(sizes) <= steps.most_samples
    for index, step in enumerate(expected):
        assert sum(step[:-1]) < count  # never more than one sample over
        cut_short = steps.is_epoch_end(index) or index + 1 == len(expected)
        assert sum(step) >= count or cut_short


@given(some_lengths, st.integers(1, 120), lasts, trainings)
def test_steps_cover_the_line_of_samples_and_tell_which_they_are(lengths, count, last, training):
    steps = steps_by(ab.Tokens(count), lengths, last, training)
    starts = [steps.samples_before(index) for index in range(steps.total_steps + 1)]
    assert starts[0] == 0
    assert starts[-1] == steps.total_samples
    assert all(a < b for a, b in pairwise(starts))
    for epoch in range(starts[-1] // len(lengths)):
        line = range(epoch * len(lengths), (epoch + 1) * len(lengths))
        mine = [max(i for i, start in enumerate(starts) if start <= at) for at in line]
        assert steps.steps_in(epoch).tolist() == mine


@given(some_lengths, st.integers(1, 40), lasts)
def test_tokens_of_samples_of_one_length_are_a_number_of_samples(lengths, size, last):
    alike = [7] * len(lengths)
    tokens = steps_by(ab.Tokens(7 * size), alike, last, {"epochs": 2})
    fixed = Steps(len(alike), size, last, epochs=2)
    assert tokens.total_steps == fixed.total_steps
    every = range(fixed.total_steps)
    assert [tokens.samples_of(i) for i in every] == [fixed.samples_of(i) for i in every]


@given(some_lengths, st.integers(1, 200))
def test_without_wrapping_the_most_samples_are_those_of_the_shortest_first(lengths, target):
    taken, total = 0, 0
    for length in sorted(lengths):
        if total < target:
            taken, total = taken + 1, total + length
    assert most_samples(np.array(lengths), target, wraps=False) == taken


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, 30))
def test_wrapping_no_order_gives_more_than_the_most_samples(lengths, target):
    orders = list(permutations(lengths))
    epochs = 3 + target // sum(lengths)
    most = 0
    for first, last in product(orders, orders):
        middle = list(lengths) * (epochs - 2)
        line = [*first, *middle, *last]
        for begin in range(len(lengths)):
            reached = np.cumsum(line[begin:])
            most = max(most, int(np.searchsorted(reached, target)) + 1)
    assert most <= most_samples(np.array(lengths), target, wraps=True)


def test_the_shortest_samples_of_two_epochs_may_meet_in_a_step():
    assert most_samples(np.array([1, 1, 9]), 4, wraps=True) == 4  # of 9 1 1 | 1 1 9
    assert most_samples(np.array([1, 1, 9]), 4, wraps=False) == 3


@given(
    st.integers(1, 40),
    st.integers(1, 20),
    st.integers(1, 20),
    st.sampled_from([0.1, 0.3, 0.5, 1.0]),
    lasts,
    trainings,
)
def test_a_ramp_is_a_function_of_the_samples_or_steps_before(
    num_samples, start, stop, until, last, training
):
    steps = Steps(num_samples, ab.Ramp(start, stop, until), last, **training)

    def target_of(index, first):
        total = training.get("samples", training.get("epochs", 0) * num_samples)
        done = index / training["steps"] if "steps" in training else first / total
        return round(start + (stop - start) * min(1.0, done / until))

    expected = one_by_one([1] * num_samples, last, training, target_of)
    assert steps.total_steps == len(expected)
    assert [steps.num_samples_of(i) for i in range(len(expected))] == list(map(len, expected))
    assert steps.total_samples == sum(map(len, expected))
    assert steps.num_samples_of(steps.largest_step) == max(map(len, expected))


@given(some_lengths, st.integers(1, 60), st.integers(1, 60), lasts, trainings)
def test_a_ramp_in_tokens_goes_by_tokens(lengths, start, stop, last, training):
    steps = steps_by(ab.Ramp(ab.Tokens(start), ab.Tokens(stop), 0.5), lengths, last, training)
    total = training.get("samples", training.get("epochs", 0) * len(lengths))
    line = [
        lengths[sample]
        for epoch in range(1 + total // len(lengths))
        for sample in permutation(3, epoch, len(lengths)).tolist()
    ]

    def target_of(index, first):
        done = (
            index / training["steps"]
            if "steps" in training
            else sum(line[:first]) / sum(line[:total])
        )
        return round(start + (stop - start) * min(1.0, done / 0.5))

    expected = one_by_one(lengths, last, training, target_of)
    assert [steps.num_samples_of(i) for i in range(steps.total_steps)] == list(map(len, expected))
    assert max(map(len, expected)) <= steps.most_samples


@pytest.mark.parametrize("last", ["keep", "wrap"])
def test_a_ramp_that_does_not_grow_is_a_fixed_batch(last):
    ramp, fixed = (Steps(23, rule, last, epochs=3) for rule in (ab.Ramp(5, 5, 1.0), 5))
    assert [ramp.samples_of(i) for i in range(20)] == [fixed.samples_of(i) for i in range(20)]
    assert ramp.first_of_one == fixed.first_of_one
    for epoch in range(3):
        same = np.diff(ramp.steps_in(epoch)) == np.diff(fixed.steps_in(epoch))
        assert same.all()


def test_the_order_inside_a_step_does_not_change_which_samples_it_has():
    from anybatch.data.lengths import longest_first

    lengths = torch.randint(1, 30, (200,), generator=torch.Generator().manual_seed(0))
    steps = steps_by(ab.Tokens(90), lengths.tolist(), "wrap", {"epochs": 2})
    for index in range(steps.total_steps):
        for epoch, start, stop in steps.samples_of(index):
            plain = permutation(3, epoch, 200)
            sorted_ = longest_first(lengths, steps, plain, epoch)
            assert sorted(plain[start:stop].tolist()) == sorted(sorted_[start:stop].tolist())
            inside = lengths[sorted_[start:stop]]
            few = -(-len(inside) // 16) if len(steps.samples_of(index)) == 1 else 0
            assert torch.equal(sorted_[start : start + few], plain[start : start + few])
            assert torch.equal(inside[few:], inside[few:].sort(descending=True).values)
