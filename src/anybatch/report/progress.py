"""The progress of a run: a bar if the screen supports one (see `screen.py`), otherwise plain lines."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from anybatch.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    Rebalanced,
    Resumed,
    RunEnded,
    RunStarted,
    StepDone,
)
from anybatch.plans import Plan
from anybatch.report.screen import Screen, screen_of
from anybatch.report.sentences import (
    describe,
    ending,
    format_number,
    format_speed,
    going_on,
    passed_over,
    scores,
    severity,
)
from anybatch.report.terminal import print_plan
from anybatch.units import format_bytes, format_count, format_seconds

LINE_SECONDS = 2.0

_STYLES = {"plain": "", "warn": "yellow", "bad": "bold red"}


class Progress:
    """A sink that shows the progress of training. Use it as a context manager, or call `close`.

    Evaluations, out-of-memory errors, new plans and overflows are printed permanently, one sentence
    each. The reason why a run stopped is not printed: the caller receives the error and reports it.

    Args:
        console: the console to draw on.
        clock: a monotonic clock in seconds, which determines when to redraw.

    Attributes:
        screen: the screen for `console`.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.screen: Screen = screen_of(console)
        self._clock = clock
        self._meter = _Meter(total_steps=None, budget_bytes=None)
        self._shown_step: StepDone | None = None
        self._begin = clock()
        self._next_draw = -math.inf

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._meter.add(event)
            if self._clock() >= self._next_draw:
                self._draw()
        elif isinstance(event, RunStarted):
            self._start(event)
        elif isinstance(event, RunEnded):
            self._end(event)
        elif isinstance(event, Resumed):
            for sentence in passed_over(event):
                self.screen.say(sentence, "yellow")
            self.screen.say(going_on(event))
        else:
            if isinstance(event, Evaluated):
                self._meter.evaluated = event
                if self.screen.redraw_seconds is not None:  # else `say` redraws
                    self.screen.draw(self._meter.bar())
                else:
                    self._draw_last()
            if not isinstance(event, CheckpointSaved | Rebalanced):
                self.screen.say(describe(event), _STYLES[severity(event)])

    def close(self) -> None:
        """Leave the bar in its last state and release the terminal. Closing twice is allowed."""
        self.screen.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, event: RunStarted) -> None:
        self.close()
        # A budget that is not enforced is only the memory that was free when the plan was made.
        budget = event.plan.get("budget_bytes") if event.plan.get("enforced") else None
        self._meter = _Meter(event.total_steps, budget, event.total_samples)
        self._shown_step, self._begin, self._next_draw = None, self._clock(), -math.inf
        if self.screen.redraw_seconds is None:
            self.screen.say(describe(event))
        else:
            self.screen.draw(self._meter.bar())

    def _draw(self) -> None:
        now = self._clock()
        if self.screen.redraw_seconds is not None:
            self.screen.draw(self._meter.bar())
            self._next_draw = now + self.screen.redraw_seconds
            return
        self.screen.say(self._meter.line())
        self._shown_step = self._meter.last
        # The longer a run, the fewer lines are needed.
        self._next_draw = now + min(60.0, max(LINE_SECONDS, (now - self._begin) / 100))

    def _draw_last(self) -> None:
        """Draw the last step, unless it has been shown already."""
        if self._meter.last is not None and self._meter.last is not self._shown_step:
            self._draw()

    def _end(self, event: RunEnded) -> None:
        self._draw_last()
        self.close()
        self.screen.say(f"{ending(event)}.", "" if event.finished else "yellow")


class Display:
    """A sink that shows the plan and the progress of a run.

    Args:
        progress: shows everything except the plan.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._shown: Plan | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted) and event.plan:
            self.show(Plan.from_json(json.dumps(event.plan)))
        self._progress(event)

    def show(self, plan: Plan) -> None:
        """Show `plan`, unless it is the one shown last: a run may restart with the same plan."""
        if plan != self._shown:
            self._progress.screen.write(lambda console: print_plan(console, plan))
            self._shown = plan


@contextmanager
def displayed(wanted: bool) -> Iterator[Display | None]:
    """A context with a display in the current notebook cell or on standard error; None unless
    `wanted`."""
    if not wanted:
        yield None
        return
    with Progress(Console(stderr=True)) as progress:
        yield Display(progress)


class _Mark(NamedTuple):
    time: float
    step: int
    samples: int
    seconds: float


class _Meter:
    """The figures to show, updated with a few additions per step."""

    # Speeds are means over at most NUM_MARKS marks, which are at least MARK_SECONDS apart.
    NUM_MARKS = 120
    MARK_SECONDS = 0.25
    LOSS_WEIGHT = 0.05

    def __init__(
        self, total_steps: int | None, budget_bytes: int | None, total_samples: int | None = None
    ) -> None:
        self.total_steps = total_steps
        self.total_samples = total_samples
        self.budget_bytes = budget_bytes
        self.last: StepDone | None = None
        self.evaluated: Evaluated | None = None
        self._marks: deque[_Mark] = deque(maxlen=self.NUM_MARKS)
        self._latest = _Mark(time=0.0, step=0, samples=0, seconds=0.0)
        self._loss = 0.0
        self._loss_weight = 0.0

    def add(self, event: StepDone) -> None:
        self.last = event
        self._latest = _Mark(
            event.time,
            event.step,
            self._latest.samples + event.samples,
            self._latest.seconds + event.seconds,
        )
        if not self._marks or event.time - self._marks[-1].time >= self.MARK_SECONDS:
            self._marks.append(self._latest)
        if math.isfinite(event.loss):
            self._loss += self.LOSS_WEIGHT * (event.loss - self._loss)
            self._loss_weight += self.LOSS_WEIGHT * (1.0 - self._loss_weight)

    def loss(self) -> float:
        """The mean loss, weighted toward recent steps; the last loss if that is not finite."""
        assert self.last is not None
        if not math.isfinite(self.last.loss) or self._loss_weight == 0.0:
            return self.last.loss
        return self._loss / self._loss_weight

    def samples_per_second(self) -> float:
        """Training throughput, excluding evaluations and pauses."""
        assert self.last is not None
        oldest = self._marks[0]
        samples = self._latest.samples - oldest.samples
        seconds = self._latest.seconds - oldest.seconds
        if samples <= 0 or seconds <= 0:
            samples, seconds = self.last.samples, self.last.seconds
        return samples / seconds if seconds > 0 else 0.0

    def seconds_left(self) -> float | None:
        """Estimated time to the last step at the recent pace, including evaluations and pauses. None if
        the total is unknown, and after the first step, which includes warm-up and is not
        representative."""
        if self.total_steps is None or self.last is None:
            return None
        oldest = self._marks[0]
        left, done = self.total_steps - self._latest.step, self._latest.step - oldest.step
        if done and self.total_samples is not None:  # steps may differ in size
            left = self.total_samples - self.last.samples_seen
            done = self._latest.samples - oldest.samples
        if done <= 0:
            return None if left > 0 else 0.0
        return max(0.0, self._latest.time - oldest.time) / done * max(0, left)

    def figures(self) -> list[tuple[str, str]]:
        """(label, figure) pairs of the last step; none before the first step."""
        last = self.last
        if last is None:
            return []
        memory = format_bytes(last.memory_bytes)
        if self.budget_bytes:
            memory += f" of {format_bytes(self.budget_bytes)}"
        return [
            ("epoch", str(last.epoch)),
            ("loss", format_number(self.loss())),
            ("samples/s", format_speed(self.samples_per_second())),
            ("memory", memory),
        ]

    def position(self) -> str:
        """The step and the total number of steps: `120/200`, or `120` for a stream."""
        step = format_count(self.last.step if self.last else 0)
        return step if self.total_steps is None else f"{step}/{format_count(self.total_steps)}"

    def line(self) -> str:
        """A plain line, for a console that is not a terminal."""
        parts = [f"step {self.position()}", *(f"{label} {text}" for label, text in self.figures())]
        left = self.seconds_left()
        if left:
            parts.append(_left(left))
        return "  ".join(parts)

    def bar(self) -> RenderableType:
        """Up to three lines for a terminal: progress, training figures, held-out scores."""
        row = Table.grid(expand=True, padding=(0, 0, 0, 2))
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        row.add_column(no_wrap=True, style="dim")
        done = self.last.step if self.last else 0
        left = self.seconds_left()
        time_left = "starting" if self.last is None else "" if left is None else _left(left)
        gauge = ProgressBar(
            total=self.total_steps, completed=done, complete_style="cyan", finished_style="green"
        )
        row.add_row(gauge, Text(f"step {self.position()}", "bold"), time_left)
        lines: list[RenderableType] = [row]
        if self.last is not None:
            lines.append(_Labelled(self.figures()))
        if self.evaluated is not None:
            told = [("", f"{name} {text}") for name, text in scores(self.evaluated).items()]
            step = ("after step", format_count(self.evaluated.step))
            lines.append(_Labelled([("held-out", told[0][1]), *told[1:], step]))
        return Group(*lines)


class _Labelled:
    """Labeled figures, wrapped to as many lines as needed: a figure is cut only if it does not fit on a
    line by itself."""

    def __init__(self, figures: list[tuple[str, str]]) -> None:
        self._figures = figures

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        line = Text(no_wrap=True, overflow="ellipsis")
        for label, figure in self._figures:
            if line and len(line) + len(label) + len(figure) + 3 > options.max_width:
                yield line
                line = Text(no_wrap=True, overflow="ellipsis")
            line.append("  " if line else "")
            line.append(f"{label} " if label else "", "dim")
            line.append(figure)
        yield line


def _left(seconds: float) -> str:
    return f"{format_seconds(seconds)} left" if seconds > 0 else "done"
