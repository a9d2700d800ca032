"""Rivals: choices so nearly as fast as the one taken that a trial on the device is to decide."""

from __future__ import annotations

from collections.abc import Iterator

from anybatch.planner.costs import Costs
from anybatch.planner.recompute_options import order
from anybatch.planner.setting import Wishes
from anybatch.plans import Choice

_CLOSE = 1.5
"""A choice that is predicted to take up to so many times as long as the fastest may be the faster one:
measured beside each other, predictions of one task were off by less."""

_MOST = 3


def rivals_of(best: Choice, wishes: Wishes, costs: Costs) -> Iterator[Choice]:
    """What a trial on the device may show to be faster than `best`, the fastest first.

    On a CPU there are none: how fast small passes are depends on how the heap has come to lie, which
    passes of other sizes change (docs/log.md)."""
    device, subject = costs.setting.device, costs.subject
    here = device.present and device.kind == "cuda"
    open_to = wishes.micro_batch is None and not subject.long
    if not (here and open_to and subject.division is None):
        return
    slowest = _CLOSE * costs.seconds(best)
    close = [
        choice
        for choice, peak in costs.weighed().items()
        if choice != best and peak <= costs.room and costs.seconds(choice) <= slowest
    ]
    close.sort(key=lambda choice: (costs.seconds(choice), order(choice)))
    yield from [choice for choice in close if costs.fits(choice)][:_MOST]
