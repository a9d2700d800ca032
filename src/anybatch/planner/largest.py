"""Largest: the most samples that a pass can hold, found with few traces."""

from __future__ import annotations

from anybatch.planner.costs import Costs
from anybatch.plans import Recompute

_CLOSE_ENOUGH = 1.04
"""Bisection stops when the largest micro-batch that fits is known to within this factor."""


def largest(way: Recompute, costs: Costs) -> int | None:
    """The largest micro-batch of `way` that fits, or None if the smallest does not."""
    sizes = costs.sizes

    def fits(size: int) -> bool:
        return costs.fits(costs.choice(way, size))

    if fits(sizes.whole):
        return sizes.whole
    unit, low, high = sizes.smallest, sizes.low, sizes.whole
    if not fits(low):
        return unit if unit < low and fits(unit) else None
    while sizes.passes(low) > sizes.passes(high - unit) and high > low * _CLOSE_ENOUGH:
        middle = sizes.in_units(_guess(way, low, high, costs))
        middle = min(max(middle, low + unit), sizes.in_units(high - 1))
        if middle <= low:
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _guess(way: Recompute, low: int, high: int, costs: Costs) -> int:
    """Where the peak meets the room, if it grows in a straight line from `low` to `high`; kept off the
    ends, so that a bend in the line costs few steps."""
    least, most = (costs.peak(costs.choice(way, size)) for size in (low, high))
    part = (costs.room - least) / max(1, most - least)
    return low + int((high - low) * min(max(part, 0.02), 0.98))
