"""A run's log, collected in one pass, for the page.

A resumed run appends to the log of the earlier run and repeats the steps since the checkpoint. In the
curves, a repeated step replaces the first one. The list of events keeps both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from anybatch.events import Evaluated, Event, RunEnded, RunStarted, StepDone
from anybatch.insight.noise_series import Block, Series


@dataclass
class Record:
    """The events of a run.

    Attributes:
        starts, ends: starts and ends of the run; several if the run was resumed.
        evaluations: evaluations in order, excluding those that a resumed run repeated.
        others: all events except steps, in order.
    """

    starts: list[RunStarted] = field(default_factory=list)
    ends: list[RunEnded] = field(default_factory=list)
    evaluations: list[Evaluated] = field(default_factory=list)
    others: list[Event] = field(default_factory=list)
    _steps: dict[int, StepDone] = field(default_factory=dict)
    _noise: Series = field(default_factory=Series)
    _last_time: float | None = None

    @classmethod
    def of(cls, events: Iterable[Event]) -> Record:
        """Create the record of `events`."""
        record = cls()
        for event in events:
            record._add(event)
        return record

    @property
    def num_steps(self) -> int:
        """Number of committed steps; repeated steps count once."""
        return len(self._steps)

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
        """The values of a field of `StepDone`, one per step; NaN where it is None."""
        values = [getattr(step, name) for step in self._steps.values()]
        return np.array(values, dtype=np.float64)  # None becomes NaN

    def noise(self) -> Sequence[Block]:
        """Measurements of the gradient noise in the steps."""
        return self._noise.blocks

    def metric(self, name: str) -> NDArray[np.float64]:
        """The values of a training metric, one per step; NaN where there is none."""
        return np.array([step.metrics.get(name, math.nan) for step in self._steps.values()])

    def metric_names(self) -> list[str]:
        """Names of metrics in order of first occurrence: those of evaluations first, then those of
        training alone."""
        scored = chain(self.evaluations, self._steps.values())
        return list(dict.fromkeys(name for event in scored for name in event.metrics))

    def _add(self, event: Event) -> None:
        self._last_time = event.time
        if isinstance(event, StepDone | Evaluated):
            while self.evaluations and self.evaluations[-1].step >= event.step:
                self.evaluations.pop()
        if isinstance(event, StepDone):
            while self._steps and next(reversed(self._steps)) >= event.step:
                self._steps.popitem()
            self._steps[event.step] = event
            self._noise(event)
            return
        self.others.append(event)
        if isinstance(event, RunStarted):
            self.starts.append(event)
        elif isinstance(event, RunEnded):
            self.ends.append(event)
        elif isinstance(event, Evaluated):
            self.evaluations.append(event)
