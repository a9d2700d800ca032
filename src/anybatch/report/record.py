"""A run's log, collected in one pass, for the page.

A resumed run appends to the log of the earlier run and repeats the steps since the checkpoint. In the
curves, a repeated step replaces the first one. The list of events keeps both.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from anybatch.events import Evaluated, Event, RunEnded, RunStarted, StepDone
from anybatch.insight.noise_series import Block, Series

_COLUMNS = (
    "step",
    "samples",
    "loss",
    "learning_rate",
    "grad_norm",
    "seconds",
    "memory_bytes",
    "data_seconds",
)
"""The fields of `StepDone` that are kept: a run may have millions of steps."""


class Record:
    """The events of a run.

    Attributes:
        starts, ends: starts and ends of the run; several if the run was resumed.
        evaluations: evaluations in order, excluding those that a resumed run repeated.
        others: all events except steps, in order.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self.starts: list[RunStarted] = []
        self.ends: list[RunEnded] = []
        self.evaluations: list[Evaluated] = []
        self.others: list[Event] = []
        self._columns = {name: array("d") for name in _COLUMNS}
        self._metrics: dict[str, array[float]] = {}
        self._noise = Series()
        self._last_time: float | None = None
        for event in events:
            self._add(event)

    @property
    def num_steps(self) -> int:
        """Number of committed steps; repeated steps count once."""
        return len(self._columns["step"])

    @property
    def ended(self) -> RunEnded | None:
        """The end of the last run; None if it was killed, or is still running."""
        stories = [event for event in self.others if isinstance(event, RunStarted | RunEnded)]
        return stories[-1] if stories and isinstance(stories[-1], RunEnded) else None

    @property
    def seconds(self) -> float:
        """Total time from each start to its end, or to the last event if no end is recorded."""
        total = 0.0
        begun: float | None = None
        last: float = 0.0
        for event in self.others:
            if isinstance(event, RunStarted):
                total += last - begun if begun is not None else 0.0
                begun = event.time
            elif isinstance(event, RunEnded):
                total += event.seconds
                begun = None
            last = event.time
        if begun is not None and self._last_time is not None:
            total += self._last_time - begun
        return total

    def column(self, name: str) -> NDArray[np.float64]:
        """The values of a field of `StepDone` in `_COLUMNS`, one per step; NaN where it is None."""
        return np.array(self._columns[name])

    def noise(self) -> Sequence[Block]:
        """Measurements of the gradient noise in the steps."""
        return self._noise.blocks

    def metric(self, name: str) -> NDArray[np.float64]:
        """The values of a training metric, one per step; NaN where there is none."""
        missing = array("d", [math.nan]) * self.num_steps
        return np.array(self._metrics.get(name, missing))

    def metric_names(self) -> list[str]:
        """Names of metrics in order of first occurrence: those of evaluations first, then those of
        training alone."""
        evaluated = (name for event in self.evaluations for name in event.metrics)
        return list(dict.fromkeys([*evaluated, *self._metrics]))

    def _add(self, event: Event) -> None:
        self._last_time = event.time
        if isinstance(event, StepDone | Evaluated):
            while self.evaluations and self.evaluations[-1].step >= event.step:
                self.evaluations.pop()
        if isinstance(event, StepDone):
            self._add_step(event)
            self._noise(event)
            return
        self.others.append(event)
        if isinstance(event, RunStarted):
            self.starts.append(event)
        elif isinstance(event, RunEnded):
            self.ends.append(event)
        elif isinstance(event, Evaluated):
            self.evaluations.append(event)

    def _add_step(self, event: StepDone) -> None:
        steps = self._columns["step"]
        while steps and steps[-1] >= event.step:
            for column in (*self._columns.values(), *self._metrics.values()):
                column.pop()
        for name in event.metrics:
            if name not in self._metrics:
                self._metrics[name] = array("d", [math.nan]) * len(steps)
        for name, column in self._metrics.items():
            column.append(event.metrics.get(name, math.nan))
        for name, column in self._columns.items():
            value = getattr(event, name)
            column.append(math.nan if value is None else value)
