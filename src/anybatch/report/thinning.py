"""Thinning: of a long run not every step is logged, so that a million steps are 35 MB and not 450.

The first `ALL_LOGGED` steps are logged, of as many again every second one, of twice as many every
fourth one, and so on:

    step          1 ... 20,000 ... 40,000 ... 80,000 ...
    one in               1          2          4

No spike is lost: of each stretch that is left out, the step with the greatest loss is logged (or one
with a loss that is not finite) if it is greater than at both ends. And so is the last step before any
other event, so that an evaluation, a checkpoint and the end follow the step that they are of.
"""

from __future__ import annotations

import math
from typing import final

from anybatch.events import Event, Sink, StepDone

ALL_LOGGED = 20_000
"""So many steps are logged from the first one on, and half as many of each doubling."""


def is_logged(step: int) -> bool:
    """Whether the step with this number is logged in any case. Steps are counted from the first, as
    those are whose gradient noise is measured (one in four, late in a run)."""
    stride = 1 << max(0, math.ceil(math.log2(max(1.0, step / ALL_LOGGED))))
    return (step - 1) % stride == 0


@final
class Thinning:
    """A sink that gives another one the events that are logged."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._logged: StepDone | None = None  # the last that was
        self._greatest: StepDone | None = None  # of those since, by loss
        self._last: StepDone | None = None

    def __call__(self, event: Event) -> None:
        if not isinstance(event, StepDone):
            last = self._last
            if last is not None:
                self._log(last)
            self._logged = None
            self._sink(event)
        elif is_logged(event.step):
            self._log(event)
        else:
            if self._greatest is None or _height(event) > _height(self._greatest):
                self._greatest = event
            self._last = event

    def _log(self, event: StepDone) -> None:
        before, greatest = self._logged, self._greatest
        self._logged, self._greatest, self._last = event, None, None
        if greatest is not None and greatest is not event:
            ends = [_height(event), *([] if before is None else [_height(before)])]
            if _height(greatest) > max(ends):
                self._sink(greatest)
        self._sink(event)


def _height(event: StepDone) -> float:
    return event.loss if math.isfinite(event.loss) else math.inf
