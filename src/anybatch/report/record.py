"""Record: a run's log gathered in columns, in one pass, for the page.

A resumed run appends to the log of the run before it and repeats the steps since the checkpoint.
The curves tell what counts: a repeated step replaces what was done first. The list of events keeps
both.
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

# What is kept of every step; None becomes not-a-number.
_COLUMNS = (
    *("step", "loss", "learning_rate", "grad_norm", "samples"),
    *("seconds", "data_seconds", "memory_bytes"),
    *("weight", "part_weight", "part_grad_norm"),
    *("samples_seen", "tokens_seen"),
)


@dataclass
class Record:
    """What happened in a run.

    Attributes:
        starts, ends: more than one of each where the run was resumed.
        evaluations: of the steps that count, in order.
        others: all events but steps, in order.
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
        """The record of `events`."""
        record = cls()
        for event in events:
            record._add(event)
        return record

    @property
    def num_steps(self) -> int:
        """Committed steps that count."""
        return len(self._columns["step"])

    @property
    def ended(self) -> RunEnded | None:
        """How the last run ended; None if it was killed, or goes on."""
        stories = [event for event in self.others if isinstance(event, RunStarted | RunEnded)]
        return stories[-1] if stories and isinstance(stories[-1], RunEnded) else None

    @property
    def seconds(self) -> float:
        """Time from each start to its end, or to the last event, added up."""
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
        """One value per step of that field of `StepDone`, not-a-number where there was none."""
        return np.array(self._columns[name], dtype=np.float64)

    def noise(self) -> Sequence[Block]:
        """What the steps tell of the noise in their gradients."""
        series = Series()
        names = ("step", "samples", "weight", "grad_norm", "part_weight", "part_grad_norm")
        columns = [self._columns[name] for name in (*names, "samples_seen", "tokens_seen")]
        for step, *rest, samples, tokens in zip(*columns, strict=True):
            per_sample = 0.0 if math.isnan(tokens) else tokens / samples
            series.add(block_of(int(step), *rest, tokens_per_sample=per_sample))
        return series.blocks

    def metric(self, name: str) -> NDArray[np.float64]:
        """One value per step of a metric of training."""
        values = np.full(self.num_steps, np.nan)
        known = self._metrics.get(name, array("d"))
        values[: len(known)] = known
        return values

    def metric_names(self) -> list[str]:
        """Metrics of evaluations first, then those of training alone, each as they came up."""
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
