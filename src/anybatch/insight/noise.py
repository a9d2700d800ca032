"""NoiseScale: the batch size at which noise and gradient have equal magnitude, with its confidence
interval.

    B_noise = tr(Sigma) / |G|^2        (McCandlish et al. 2018, section 2.2: the simple noise scale)

The noise scale is a ratio of two means. Its denominator may be hidden by noise, so its error is neither
small nor symmetric, and a symmetric interval (value plus or minus error) would be misleading. The
interval is that of Fieller (1954, "Some problems in interval estimation"): all ratios that are
consistent with the two means, their variances and their covariance. If |G|^2 is not significantly
different from zero, the interval has no upper end. Variances are computed between blocks of consecutive
steps, as in a block jackknife, since neighboring steps are correlated and are not independent
measurements. They are estimated from the differences of neighboring blocks (von Neumann et al. 1941,
"The mean square successive difference"), so that a gradient that decreases during training does not
increase the variance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

from anybatch.insight.noise_series import Block, cut, joined, total

LEAST_STEPS = 10
"""Minimum number of steps, and of blocks, for an estimate."""

LATEST = 0.25
"""Final fraction of a run over which `latest` computes the noise scale."""

_BLOCKS = 20  # blocks of a window, for its variance
_MOST_WINDOWS = 10
_WINDOW_STEPS = 30  # minimum number of steps of a window, if a run has several windows
_LATEST_STEPS = 100  # minimum number of steps, if the run has as many
_SURE = 0.95


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """The gradient noise scale over a range of steps.

    Attributes:
        first_step, last_step: the range of steps.
        num_steps: number of measured steps in the range.
        samples: noise scale in samples; None if the estimate of |G|^2 is not positive.
        low, high: 95 % confidence interval, in samples. `high` is None if |G|^2 is not significantly
            different from zero: only the lower bound `low` is then known.
        weight_per_sample: mean weight of a sample, which converts samples to units of weight.
        square: mean of |G|^2.
        noise: mean of tr(Sigma) for one sample.
        tokens_per_sample: mean number of tokens of a sample, as counted by the global batch, which
            converts samples to tokens; None if the global batch is not in `Tokens`.
    """

    first_step: int
    last_step: int
    num_steps: int
    samples: float | None
    low: float
    high: float | None
    weight_per_sample: float
    square: float
    noise: float
    tokens_per_sample: float | None = None

    @property
    def weight(self) -> float | None:
        """The noise scale in units of weight, such as tokens."""
        return None if self.samples is None else self.samples * self.weight_per_sample

    @property
    def tokens(self) -> float | None:
        """The noise scale in tokens; None also if the global batch is not in `Tokens`."""
        if self.samples is None or self.tokens_per_sample is None:
            return None
        return self.samples * self.tokens_per_sample


def scale_of(blocks: Sequence[Block]) -> NoiseScale | None:
    """Returns the noise scale over `blocks`; None if there are too few blocks or steps."""
    if sum(block.num_steps for block in blocks) < LEAST_STEPS or len(blocks) < LEAST_STEPS:
        return None
    whole = total(blocks)
    per_sample = whole.weight / whole.samples
    square, noise = whole.square / whole.weight, whole.noise / whole.weight / per_sample
    groups = joined(blocks, _BLOCKS)
    # Deviation of each block from the means, times its weight, and the successive differences.
    off = [
        (one.square - square * one.weight, one.noise / per_sample - noise * one.weight)
        for one in groups
    ]
    moved = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(off)]
    count = len(groups)
    scale = count / (count - 1) / 2 / whole.weight**2
    low, high = _interval(
        square,
        noise,
        scale * math.fsum(a * a for a, _ in moved),
        scale * math.fsum(a * b for a, b in moved),
        scale * math.fsum(b * b for _, b in moved),
        _t(2 * (count - 1) ** 2 / (3 * count - 4)),
    )
    return NoiseScale(
        whole.first_step,
        whole.last_step,
        whole.num_steps,
        max(0.0, noise) / square if square > 0 else None,
        low,
        high,
        per_sample,
        square,
        noise,
        whole.tokens / whole.samples if whole.tokens else None,
    )


def windows(blocks: Sequence[Block]) -> list[NoiseScale]:
    """Returns the noise scale in consecutive windows of a run. It changes during a run, and mostly
    increases, since gradients decrease."""
    num_steps = sum(block.num_steps for block in blocks)
    most = min(_MOST_WINDOWS, num_steps // _WINDOW_STEPS, len(blocks) // LEAST_STEPS)
    return [found for part in cut(blocks, max(1, most)) if (found := scale_of(part))]


def latest(blocks: Sequence[Block]) -> NoiseScale | None:
    """Returns the noise scale over the last quarter of the run or the last 100 measured steps,
    whichever reaches further back."""
    if not blocks:
        return None
    last = blocks[-1].last_step
    since = last - LATEST * (last - blocks[0].first_step + 1)
    begin, there = len(blocks), 0
    while begin > 0 and (there < _LATEST_STEPS or blocks[begin - 1].first_step > since):
        begin -= 1
        there += blocks[begin].num_steps
    return scale_of(blocks[begin:])


def _interval(
    square: float, noise: float, vaa: float, vab: float, vbb: float, t: float
) -> tuple[float, float | None]:
    """Returns Fieller's interval: the ratios r >= 0 with
    (noise - r square)^2 <= t^2 var(noise - r square). The upper end is None if there is none."""
    positive = max(0.0, square)  # a negative estimate is treated as zero
    a = positive**2 - t**2 * vaa
    b = positive * noise - t**2 * vab
    c = noise**2 - t**2 * vbb
    root = math.sqrt(max(0.0, b * b - a * c))
    if a > 0:
        return max(0.0, (b - root) / a), max(0.0, (b + root) / a)
    # |G|^2 may be zero: the parabola opens downward, and only ratios below its positive root are
    # excluded.
    return (max(0.0, (b - root) / a) if c > 0 and a < 0 else 0.0), None


def _t(freedom: float) -> float:
    """Returns the 97.5 % quantile of Student's t-distribution, computed from the normal quantile by
    Abramowitz and Stegun (1964), 26.7.5; accurate to 0.1 % for at least 6 degrees of freedom."""
    z = NormalDist().inv_cdf((1 + _SURE) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
