"""The noise scale from two gradients of each step: right on average, and as sure as it says."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from anybatch.insight.noise import LEAST_STEPS, latest, scale_of, windows
from anybatch.insight.noise_series import MOST_BLOCKS, Series, block_of, total

POPULATION = np.array([[1.0, 2.0], [0.5, -1.0], [3.0, 0.0], [-2.0, 1.5], [0.0, 0.25]])
MEAN = POPULATION.mean(axis=0)
SQUARE = float(MEAN @ MEAN)
NOISE = float(((POPULATION - MEAN) ** 2).sum(axis=1).mean())


def norm(vectors):
    return float(np.linalg.norm(np.sum(vectors, axis=0)))


def step_of(parts, number=1, rest=()):
    """The block of a step of which each rank's first micro-batch is one of `parts`, of samples that
    weigh 1: as the engine puts the parts together."""
    every = [vector for part in parts for vector in part] + list(rest)
    heavy = sum(map(len, parts))
    square = sum(norm(part) ** 2 / len(part) for part in parts) / heavy
    whole = norm(every) / len(every)
    return block_of(number, len(every), len(every), whole, heavy / len(parts), math.sqrt(square))


def means(blocks):
    one = total(list(blocks))
    return one.square / one.weight, one.noise / one.weight


@pytest.mark.parametrize("sizes", [(1,), (2,), (1, 2), (1, 1, 1)])
def test_both_means_are_right_on_average_over_all_draws(sizes):
    """Of three samples with putting back, the first as parts: the true moments of the population."""
    cuts = [0, *itertools.accumulate(sizes)]
    blocks = [
        step_of(
            [POPULATION[list(draw[a:b])] for a, b in itertools.pairwise(cuts)],
            rest=POPULATION[list(draw[cuts[-1] :])],
        )
        for draw in itertools.product(range(len(POPULATION)), repeat=3)
    ]
    assert means(blocks) == pytest.approx((SQUARE, NOISE), rel=1e-12)


def test_without_putting_back_they_are_those_of_what_the_data_set_was_drawn_from():
    """As an epoch takes its samples: the variance with n - 1, and the squared mean less its own."""
    count = len(POPULATION)
    noise = NOISE * count / (count - 1)
    blocks = [
        step_of([POPULATION[list(draw[:2])]], rest=POPULATION[list(draw[2:])])
        for draw in itertools.permutations(range(count), 4)
    ]
    assert means(blocks) == pytest.approx((SQUARE - noise / count, noise), rel=1e-12)


def drawn(rng, steps, square=1.0, noise=50.0, batch=16, part=4, dims=30, first=1):
    """Blocks of steps whose gradients are normal, of unequal variance in each direction."""
    spread = np.linspace(0.2, 2.0, dims)
    deviation = np.sqrt(noise * spread / spread.sum())
    mean = np.full(dims, math.sqrt(square / dims))
    for number in range(first, first + steps):
        each = mean + deviation * rng.standard_normal((batch, dims))
        yield step_of([each[:part]], number, each[part:])


def test_the_interval_holds_as_often_as_it_says():
    rng = np.random.default_rng(0)
    found = [scale_of(list(drawn(rng, 80))) for _ in range(300)]
    held = [one.low <= 50 and (one.high is None or one.high >= 50) for one in found]
    assert 0.92 <= np.mean(held) <= 0.985


def test_where_there_is_no_gradient_only_a_lower_end_is_told():
    rng = np.random.default_rng(1)
    found = [scale_of(list(drawn(rng, 80, square=0.0))) for _ in range(100)]
    assert np.mean([one.high is None for one in found]) > 0.93
    ends = [one.low for one in found]
    assert min(ends) >= 0
    assert np.median(ends) > 3  # 50 / 16 is the noise that a step of 16 samples has left


def test_the_more_steps_the_surer():
    rng = np.random.default_rng(2)
    few, many = (scale_of(list(drawn(rng, steps))) for steps in (60, 1500))
    assert many.high - many.low < (few.high - few.low) / 2
    assert many.samples == pytest.approx(50, rel=0.2)


def test_tokens_are_told_as_samples_too():
    rng = np.random.default_rng(3)
    plain = list(drawn(rng, 60))
    # The same sums, each sample of weight 100: gradients of the mean are a hundredth.
    heavy = Series()
    for one in plain:
        weight = 16.0
        whole = math.sqrt(max(0.0, one.square / weight + one.noise / weight**2))
        part = math.sqrt(max(0.0, one.square / weight + one.noise / weight / 4))
        heavy.add(block_of(one.first_step, 16, 1600, whole / 100, 400, part / 100))
    light, found = scale_of(plain), scale_of(heavy.blocks)
    assert found.samples == pytest.approx(light.samples)
    assert (found.low, found.high) == pytest.approx((light.low, light.high))
    assert found.weight_per_sample == 100
    assert found.weight == pytest.approx(100 * light.samples)


def test_a_scale_that_changes_is_told_over_the_run():
    rng = np.random.default_rng(4)
    early = list(drawn(rng, 400, square=4.0))
    late = list(drawn(rng, 400, square=0.25, batch=64, part=16, first=401))
    series = Series()
    for block in early + late:
        series.add(block)
    course = windows(series.blocks)
    assert course[0].samples == pytest.approx(12.5, rel=0.4)
    assert course[-1].samples == pytest.approx(200, rel=0.5)
    assert course[0].first_step == 1
    assert course[-1].last_step == 800
    now = latest(series.blocks)
    assert now.last_step == 800
    assert 200 <= now.num_steps < 205
    assert now.low < 200 < now.high


def test_too_few_steps_tell_nothing():
    rng = np.random.default_rng(6)
    blocks = list(drawn(rng, LEAST_STEPS))
    assert scale_of(blocks[:-1]) is None
    assert scale_of(blocks) is not None
    assert windows([]) == []
    assert latest([]) is None


@pytest.mark.parametrize(
    "fields",
    [
        (16, 16.0, None, 4.0, 1.0),
        (16, 16.0, 1.0, None, None),
        (16, 16.0, 1.0, 16.0, 1.0),
        (16, 16.0, math.nan, 4.0, 1.0),
        (16, 16.0, 1.0, 4.0, math.inf),
        (0, 16.0, 1.0, 4.0, 1.0),
    ],
)
def test_a_step_that_was_not_measured_is_passed_over(fields):
    assert block_of(3, *fields) is None


def test_a_long_run_takes_no_more_memory_and_loses_nothing():
    rng = np.random.default_rng(7)
    blocks = list(drawn(rng, 3 * MOST_BLOCKS + 7, dims=3))
    series = Series()
    for block in blocks:
        series.add(block)
    assert len(series.blocks) <= MOST_BLOCKS
    whole, kept = total(blocks), total(list(series.blocks))
    assert (kept.num_steps, kept.last_step) == (whole.num_steps, whole.last_step)
    assert (kept.square, kept.noise) == pytest.approx((whole.square, whole.noise))


def test_steps_that_are_done_again_are_counted_once():
    rng = np.random.default_rng(8)
    first, again = list(drawn(rng, 60)), list(drawn(rng, 40, first=41))
    series = Series()
    for block in first + again:
        series.add(block)
    assert [block.first_step for block in series.blocks] == list(range(1, 81))
    assert series.blocks[40] == again[0]
