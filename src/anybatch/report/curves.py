"""Curves of a run, made fit to be looked at: smoothed, and thinned without losing a spike."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

MAX_POINTS = 2000
"""More points than a screen has columns only make a page slow."""


def smooth(values: Floats) -> Floats:
    """Exponentially weighted mean of the values so far, over about a thirtieth of the curve.

    Values that are not finite are left out of the mean and stay gaps. The weights are corrected for
    the beginning (Kingma and Ba 2015, section 3), so the first mean is the first value.
    """
    rate = 2.0 / (max(1.0, len(values) / 30) + 1.0)
    means = np.full(len(values), np.nan)
    total = weight = 0.0
    for index, value in enumerate(values.tolist()):
        if math.isfinite(value):
            total += rate * (value - total)
            weight += rate * (1.0 - weight)
            means[index] = total / weight
    return means


def thin(xs: Floats, ys: Floats, limit: int = MAX_POINTS) -> tuple[Floats, Floats]:
    """At most `limit` points of the curve: the first, the last, and of each stretch in between the
    least and the greatest; where a stretch has values that are not finite, one of them."""
    if len(xs) <= limit:
        return xs, ys
    edges = np.linspace(1, len(xs) - 1, (limit - 2) // 2 + 1).astype(int)
    kept = [0]
    for begin, end in pairwise(edges):
        kept.extend(sorted(begin + offset for offset in _extremes(ys[begin:end])))
    kept.append(len(xs) - 1)
    return xs[kept], ys[kept]


def _extremes(values: Floats) -> set[int]:
    finite = np.isfinite(values)
    if finite.all():
        return {int(values.argmin()), int(values.argmax())}
    gap = int(np.flatnonzero(~finite)[0])
    return {gap, int(np.nanargmax(np.where(finite, values, np.nan)))} if finite.any() else {gap}
