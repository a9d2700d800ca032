"""What a batch costs under a noise scale."""

import numpy as np
import pytest

from anybatch.insight.cost import Batch, fastest, fixed_part
from anybatch.plans import Prediction


def test_at_the_noise_scale_both_are_twice_their_least():
    assert (Batch(100, 100).steps, Batch(100, 100).samples) == (2, 2)


@pytest.mark.parametrize("size", [1, 10, 1000, 1e6])
def test_steps_and_samples_lie_on_the_hyperbola(size):
    batch = Batch(size, 300)
    assert (batch.steps - 1) * (batch.samples - 1) == pytest.approx(1)


def test_samples_are_steps_times_the_batch():
    one, other = Batch(32, 300), Batch(256, 300)
    assert 256 * other.steps / (32 * one.steps) == pytest.approx(other.samples / one.samples)


@pytest.mark.parametrize("fixed", [0.01, 0.3, 0.9])
def test_the_fastest_batch_is_where_time_is_least(fixed):
    batch = Batch(64, 500)
    sizes = np.geomspace(1, 1e5, 20_000)
    times = [batch.seconds(size, fixed) for size in sizes]
    assert fastest(batch, fixed) == pytest.approx(sizes[int(np.argmin(times))], rel=2e-3)
    assert batch.seconds(64, fixed) == pytest.approx(1)


def test_without_noise_samples_have_no_least():
    assert Batch(64, 0).samples == float("inf")
    assert Batch(64, 0).steps == 1


def test_what_a_step_takes_for_any_batch_is_the_update_and_the_exchange():
    parts = {"forward": 1.0, "backward": 2.0, "update": 0.5, "exchange of gradients": 0.5}
    told = Prediction(peak_bytes=1, evaluation_peak_bytes=1, step_seconds=4.0, step_parts=parts)
    assert fixed_part(told) == 0.25
    assert fixed_part(told.model_copy(update={"step_parts": {"forward": 1.0}})) is None
    assert fixed_part(told.model_copy(update={"step_parts": {}})) is None
    assert fixed_part(None) is None
