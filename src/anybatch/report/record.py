"""A run's log, collected into columns in one pass, for the page.

A resumed run appends to the log of the earlier run and repeats the steps since the checkpoint. In the
curves, a repeated step replaces the first one. The list of events keeps both.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from anybatch.events import Evaluated, Event, RunEnded, RunStarted, StepDone
from anybatch.insight.noise_series import Block, Series, block_of

# Fields of `StepDone` that are kept for every step; None is stored as NaN.
_COLUMNS = (
    *("step", "loss", "learning_rate", "grad_norm", "samples"),
    *("seconds", "data_seconds", "memory_bytes"),
    *("weight", "part_weight", "part_grad_norm"),
    *("samples_seen", "tokens_seen"),
)


@dataclass
class Record:
    """The events of a run, with its steps in columns.

    Attributes:
        starts, ends: starts and ends of the run; several if the run was resumed.
        evaluations: evaluations in order, excluding those that a resumed run repeated.
        others: all events except steps, in order.
    """

    starts: list[RunStarted] = field(default_factory=list)
    ends: list[RunEnded] = field(default_factory=list)
    evaluations: list[Evaluated] = field(default_factory=list)
    others: list[Event] = field(default_factory=list)
    _columns: dict[str, array[float]] = field(
        default_factory=lambda: {name: array("d") for name in _COLUMNS}
    )
    _metrics: dict[str, array[float]] = field(default_factory=dict)
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
        """The values of a field of `StepDone`, one per step; NaN where it is None."""
        return np.array(self._columns[name], dtype=np.float64)

    def noise(self) -> Sequence[Block]:
        """Measurements of the gradient noise in the steps."""
        series = Series()
        names = ("step", "samples", "weight", "grad_norm", "part_weight", "part_grad_norm")
        columns = [self._columns[name] for name in (*names, "samples_seen", "tokens_seen")]
        for step, *rest, samples, tokens in zip(*columns, strict=True):
            per_sample = 0.0 if math.isnan(tokens) else tokens / samples
            series.add(block_of(int(step), *rest, tokens_per_sample=per_sample))
        return series.blocks

    def metric(self, name: str) -> NDArray[np.float64]:
        """The values of a training metric, one per step; NaN where there is none."""
        values = np.full(self.num_steps, np.nan)
        known = self._metrics.get(name, array("d"))
        values[: len(known)] = known
        return values

    def metric_names(self) -> list[str]:
        """Names of metrics in order of first occurrence: those of evaluations first, then those of
        training alone."""
        names = [name for event in self.evaluations for name in event.metrics]
        return list(dict.fromkeys([*names, *self._metrics]))

    def _add(self, event: Event) -> None:
        self._last_time = event.time
        if isinstance(event, StepDone):
            self._rewind(event.step)
            self._add_step(event)
            return
        self.others.append(event)
        if isinstance(event, RunStarted):
            self.starts.append(event)
        elif isinstance(event, RunEnded):
            self.ends.append(event)
        elif isinstance(event, Evaluated):
            while self.evaluations and self.evaluations[-1].step >= event.step:
                self.evaluations.pop()
            self.evaluations.append(event)

    def _add_step(self, event: StepDone) -> None:
        for name, values in self._columns.items():
            value = getattr(event, name)
            values.append(float("nan") if value is None else value)
        for name, value in event.metrics.items():
            values = self._metrics.setdefault(name, array("d"))
            values.extend([float("nan")] * (self.num_steps - 1 - len(values)))
            values.append(value)

    def _rewind(self, step: int) -> None:
        steps = self._columns["step"]
        if not steps or steps[-1] < step:
            return
        while steps and steps[-1] >= step:
            steps.pop()
        for values in (*self._columns.values(), *self._metrics.values()):
            del values[len(steps) :]
        while self.evaluations and self.evaluations[-1].step >= step:
            self.evaluations.pop()
