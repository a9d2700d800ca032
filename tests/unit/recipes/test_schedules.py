"""Schedules go by the fraction of training done, whatever the number of steps."""

from __future__ import annotations

import pickle

import pytest

from anybatch.errors import InputError
from anybatch.recipes.schedules import (
    scaled_lr,
    warmup_constant,
    warmup_cosine,
    warmup_linear,
)
from anybatch.task import Progress

SCHEDULES = [warmup_cosine, warmup_linear, warmup_constant]


def factors(schedule, num_steps, batch=10):
    return [
        schedule(Progress(step, step * batch, 0, num_steps, num_steps * batch))
        for step in range(num_steps)
    ]


@pytest.mark.parametrize("make", SCHEDULES)
@pytest.mark.parametrize("num_steps", [1, 2, 7, 1000])
def test_no_step_runs_at_a_rate_of_zero(make, num_steps):
    assert all(0 < factor <= 1 for factor in factors(make(0.1), num_steps))


@pytest.mark.parametrize("make", SCHEDULES)
def test_rises_through_the_warm_up_and_never_after(make):
    values = factors(make(0.2), 100)
    assert values[:20] == sorted(values[:20])
    assert values[20:] == sorted(values[20:], reverse=True)
    assert values[10] == pytest.approx(0.525)


def test_decays_to_the_floor():
    assert factors(warmup_cosine(0.1), 10000)[-1] == pytest.approx(0, abs=1e-6)
    assert factors(warmup_linear(0.1, floor=0.2), 10000)[-1] == pytest.approx(0.2, abs=1e-3)
    assert factors(warmup_cosine(0.1, floor=0.2), 10000)[-1] == pytest.approx(0.2, abs=1e-6)
    assert factors(warmup_constant(0.1), 100)[-1] == 1
    middle = factors(warmup_cosine(0.0), 10001)[5000]
    assert middle == pytest.approx(0.5, abs=1e-3)


def test_the_same_samples_have_the_same_rate_at_any_batch():
    many, few = factors(warmup_cosine(), 1000, batch=1), factors(warmup_cosine(), 10, batch=100)
    assert few == pytest.approx(
        [sum(many[i : i + 100]) / 100 for i in range(0, 1000, 100)], abs=0.03
    )


@pytest.mark.parametrize("make", SCHEDULES)
def test_can_be_sent_to_a_worker_process(make):
    schedule = make(0.3)
    assert factors(pickle.loads(pickle.dumps(schedule)), 5) == factors(schedule, 5)


@pytest.mark.parametrize("warmup", [0.0, 1.0])
def test_ends_of_the_range_are_allowed(warmup):
    assert all(0 < factor <= 1 for factor in factors(warmup_cosine(warmup), 5))


@pytest.mark.parametrize("bad", [-0.1, 1.5, float("nan")])
def test_what_is_no_fraction_is_refused(bad):
    for make in (warmup_cosine, warmup_linear, warmup_constant):
        with pytest.raises(InputError, match="warmup"):
            make(bad)
    with pytest.raises(InputError, match="floor"):
        warmup_cosine(0.1, floor=bad)


@pytest.mark.parametrize(
    ("lr", "batch", "power", "expected"),
    [
        (3e-3, 128, 0.5, 3e-3),
        (3e-3, 32, 0.5, 1.5e-3),
        (3e-3, 10**9, 0.5, 1e-2),
        (5e-2, 512, 0.5, 5e-2),
        (1e-3, 512, 1, 4e-3),
    ],
)
def test_the_learning_rate_grows_with_a_power_of_the_batch_up_to_a_cap(lr, batch, power, expected):
    assert scaled_lr(lr, batch, 128, 1e-2, power) == pytest.approx(expected)
