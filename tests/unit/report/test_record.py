"""A run's log as columns: steps that a resumed run repeats, and metrics that come and go."""

from __future__ import annotations

import tracemalloc

import numpy as np
from tests.unit.report.fake_run import make_step

from anybatch.report.record import Record


def test_a_repeated_step_replaces_the_first_and_those_after_it():
    steps = [make_step(n, loss=float(n), metrics={}) for n in (1, 2, 3, 4)]
    again = [make_step(n, loss=10.0 + n, metrics={"late": 0.5}) for n in (3, 4)]
    record = Record([*steps, *again])
    assert record.num_steps == 4
    assert record.column("step").tolist() == [1, 2, 3, 4]
    assert record.column("loss").tolist() == [1, 2, 13, 14]
    assert record.metric_names() == ["late"]
    np.testing.assert_array_equal(record.metric("late"), [np.nan, np.nan, 0.5, 0.5])


def test_what_a_step_has_not_is_nan():
    steps = [
        make_step(1, grad_norm=None, metrics={"a": 1.0}),
        make_step(2, grad_norm=3.0, metrics={"b": 2.0}),
    ]
    record = Record(steps)
    np.testing.assert_array_equal(record.column("grad_norm"), [np.nan, 3.0])
    np.testing.assert_array_equal(record.metric("a"), [1.0, np.nan])
    np.testing.assert_array_equal(record.metric("b"), [np.nan, 2.0])
    np.testing.assert_array_equal(record.metric("none"), [np.nan, np.nan])


def test_a_step_takes_few_bytes():
    """A run may have millions of them, and its page is made in the process that has trained."""
    count = 20_000
    tracemalloc.start()
    record = Record(make_step(n, part_grad_norm=None) for n in range(1, count + 1))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert record.num_steps == count
    assert taken < 200 * count
