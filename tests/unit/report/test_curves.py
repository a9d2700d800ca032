"""Smoothing keeps the level, thinning keeps the spikes."""

from __future__ import annotations

import numpy as np
import pytest

from anybatch.report.figures import smooth, thin


def test_the_mean_of_a_constant_is_the_constant():
    np.testing.assert_allclose(smooth(np.full(1000, 3.0)), 3.0)


def test_smoothing_keeps_gaps_as_gaps():
    means = smooth(np.array([1.0, np.nan, 1.0, np.inf, 1.0]))
    assert np.isfinite(means).tolist() == [True, False, True, False, True]


def test_smoothing_makes_noise_smaller():
    noise = np.random.default_rng(0).normal(size=3000)
    assert smooth(noise)[500:].std() < 0.3 * noise.std()


@pytest.mark.parametrize("size", [0, 1, 2, 1000])
def test_a_short_curve_is_left_alone(size: int):
    xs = np.arange(float(size))
    assert thin(xs, xs)[0] is xs


@pytest.mark.parametrize("size", [2001, 4001, 100_000])
def test_a_long_curve_keeps_its_ends_and_its_spike(size: int):
    xs = np.arange(float(size))
    ys = np.sin(xs / 1000)
    ys[size // 3] = 50.0
    few_xs, few_ys = thin(xs, ys)
    assert len(few_xs) <= 2000
    assert (few_xs[0], few_xs[-1]) == (0, size - 1)
    assert few_ys.max() == 50.0
    assert (np.diff(few_xs) > 0).all()


def test_a_single_gap_is_not_thinned_away():
    xs = np.arange(100_000.0)
    ys = np.ones(100_000)
    ys[77_777] = np.nan
    assert np.isnan(thin(xs, ys)[1]).sum() == 1
    assert np.isnan(thin(xs, np.full(100_000, np.nan))[1]).all()
