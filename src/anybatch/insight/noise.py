"""NoiseScale: the batch at which noise and gradient are equally large, and how surely that is known.

    B_noise = tr(Sigma) / |G|^2        (McCandlish et al. 2018, section 2.2: the simple noise scale)

It is a ratio of two means, of which the lower one may be hidden by noise, so its errors are neither
small nor symmetric, and to quote it with a plus-minus would promise too much. The interval is that of
Fieller (1954, "Some problems in interval estimation"): all ratios that the two means, with their
variances and their covariance, do not rule out. Where |G|^2 cannot be told from zero it has no upper
end, and says so. Variances are those between blocks of steps that follow one another, as in a block
jackknife: steps that resemble their neighbours are not counted as if each were news. They are taken
from the differences of neighbouring blocks (von Neumann et al. 1941, "The mean square successive
difference"), so that a gradient which shrinks as it should does not pass for an uncertain one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

from anybatch.insight.noise_series import Block, joined, total

LEAST_STEPS = 10
"""Fewer tell nothing."""

LATEST = 0.25
"""The part of a run that counts as its latest."""

_BLOCKS = 20  # of a window, for its variance
_MOST_WINDOWS = 10
_WINDOW_STEPS = 30  # at the least, where a run has several windows
_LATEST_STEPS = 100  # at the least, if there are as many
_SURE = 0.95


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """The noise scale over some steps.

    Attributes:
        first_step, last_step: over which.
        num_steps: those of them that were measured.
        samples: the noise scale in samples. None: |G|^2 was not even positive.
        low, high: its interval of 95 %, in samples. `high` is None where |G|^2 cannot be told from
            zero: then `low` is all that is known.
        weight_per_sample: what a sample weighs, on average. Times this, samples are units of weight.
        square: the mean of |G|^2.
        noise: the mean of tr(Sigma) of one sample.
        tokens_per_sample: on average, where the global batch is in `Tokens`. Times this, samples are
            tokens, as the batch counts them.
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
        """The noise scale in tokens; None, too, where the global batch is not in `Tokens`."""
        if self.samples is None or self.tokens_per_sample is None:
            return None
        return self.samples * self.tokens_per_sample


def scale_of(blocks: Sequence[Block]) -> NoiseScale | None:
    """The noise scale over `blocks`; None if they are too few to tell."""
    if sum(block.num_steps for block in blocks) < LEAST_STEPS or len(blocks) < LEAST_STEPS:
        return None
    whole = total(blocks)
    per_sample = whole.weight / whole.samples
    square, noise = whole.square / whole.weight, whole.noise / whole.weight / per_sample
    groups = joined(blocks, _BLOCKS)
    # How far each block is from the means, by its weight; and by how much more than the one before.
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
    """The noise scale over a run, which changes, mostly upwards as gradients fall."""
    num_steps = sum(block.num_steps for block in blocks)
    most = min(_MOST_WINDOWS, num_steps // _WINDOW_STEPS, len(blocks) // LEAST_STEPS)
    return [found for part in _cut(blocks, max(1, most)) if (found := scale_of(part))]


def latest(blocks: Sequence[Block]) -> NoiseScale | None:
    """That of the last quarter of the run, or of the last 100 steps that were measured if these go
    further back."""
    if not blocks:
        return None
    last = blocks[-1].last_step
    since = last - LATEST * (last - blocks[0].first_step + 1)
    begin, there = len(blocks), 0
    while begin > 0 and (there < _LATEST_STEPS or blocks[begin - 1].first_step > since):
        begin -= 1
        there += blocks[begin].num_steps
    return scale_of(blocks[begin:])


def _cut(blocks: Sequence[Block], count: int) -> list[Sequence[Block]]:
    edges = [len(blocks) * i // count for i in range(count + 1)]
    return [blocks[begin:end] for begin, end in pairwise(edges)]


def _interval(
    square: float, noise: float, vaa: float, vab: float, vbb: float, t: float
) -> tuple[float, float | None]:
    """Fieller's: the ratios r of at least zero with (noise - r square)^2 <= t^2 var(noise - r square).
    An upper end of None: there is none."""
    positive = max(0.0, square)  # below zero it is no less possible than at zero
    a = positive**2 - t**2 * vaa
    b = positive * noise - t**2 * vab
    c = noise**2 - t**2 * vbb
    root = math.sqrt(max(0.0, b * b - a * c))
    if a > 0:
        return max(0.0, (b - root) / a), max(0.0, (b + root) / a)
    # |G|^2 may be zero: the parabola is open below, and only ratios up to where it comes down to zero
    # are ruled out.
    return (max(0.0, (b - root) / a) if c > 0 and a < 0 else 0.0), None


def _t(freedom: float) -> float:
    """The quantile of Student's distribution that leaves 2.5 % above it, from the normal one's by
    Abramowitz and Stegun (1964), 26.7.5: exact to 0.1 % from 6 degrees of freedom on."""
    z = NormalDist().inv_cdf((1 + _SURE) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
