"""The progress of a run: a bar if the screen supports one (see `screen.py`), otherwise plain lines."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from rich.console import Console, Group, RenderableType
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
from anybatch.report.screen import Screen
from anybatch.report.sentences import (
    counted,
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
        with_plan: whether to show the plan of a run when it starts.
    """

    def __init__(
        self,
        console: Console,
        *,
        clock: Callable[[], float] = time.monotonic,
        with_plan: bool = False,
    ) -> None:
        self._screen = Screen(console)
        self._clock = clock
        self._with_plan = with_plan
        self._plan: Plan | None = None
        self._meter = _Meter(None)
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
            self._draw_last()
            self.close()
            self._screen.say(f"{ending(event)}.", "" if event.finished else "yellow")
        elif isinstance(event, Resumed):
            for sentence in passed_over(event):
                self._screen.say(sentence, "yellow")
            self._screen.say(going_on(event))
            total_steps = self._meter.total_steps
            if total_steps is not None and event.step > total_steps:
                end = counted(total_steps, "step")
                self._screen.say(f"This training ends after {end}: nothing is trained.", "yellow")
        else:
            if isinstance(event, Evaluated):
                self._meter.evaluated = event
                if self._screen.redraw_seconds is None:
                    self._draw_last()
                else:
                    self._draw_bar()  # else `say` redraws the bar without it
            if not isinstance(event, CheckpointSaved | Rebalanced):
                self._screen.say(describe(event), _STYLES[severity(event)])

    def show(self, plan: Plan) -> None:
        """Show `plan`, unless it is the one shown last: a run may restart with the same plan."""
        if plan != self._plan:
            self._screen.write(lambda console: print_plan(console, plan))
            self._plan = plan

    def close(self) -> None:
        """Leave the bar in its last state and release the terminal. Closing twice is allowed."""
        self._screen.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _start(self, event: RunStarted) -> None:
        if self._with_plan and event.plan:
            self.show(Plan.from_json(json.dumps(event.plan)))
        self.close()
        self._meter = _Meter(event)
        self._shown_step, self._begin, self._next_draw = None, self._clock(), -math.inf
        if self._screen.redraw_seconds is None:
            self._screen.say(describe(event))
        else:
            self._draw_bar()

    def _draw(self) -> None:
        now = self._clock()
        if self._screen.redraw_seconds is not None:
            self._draw_bar()
            self._next_draw = now + self._screen.redraw_seconds
            return
        self._screen.say(self._meter.line())
        self._shown_step = self._meter.last
        # The longer a run, the fewer lines are needed.
        self._next_draw = now + min(60.0, max(LINE_SECONDS, (now - self._begin) / 100))

    def _draw_bar(self) -> None:
        self._screen.draw(self._meter.bar(self._screen.width))

    def _draw_last(self) -> None:
        """Draw the last step, unless it has been shown already."""
        if self._meter.last is not None and self._meter.last is not self._shown_step:
            self._draw()


@contextmanager
def displayed(wanted: bool) -> Iterator[Progress | None]:
    """A context that shows plan and progress in the current notebook cell or on standard error; None
    unless `wanted`."""
    if not wanted:
        yield None
        return
    with Progress(Console(stderr=True), with_plan=True) as progress:
        yield progress


class _Meter:
    """The figures to show, updated with a few additions per step. `started` is None before the run."""

    # Speeds are means over at most NUM_MARKS steps, which are at least MARK_SECONDS apart.
    NUM_MARKS = 120
    MARK_SECONDS = 0.25
    LOSS_WEIGHT = 0.05

    def __init__(self, started: RunStarted | None) -> None:
        self.total_steps = started and started.total_steps
        self.total_samples = started and started.total_samples
        # A budget that is not enforced is only the memory that was free when the plan was made.
        plan = started.plan if started else {}
        self.budget_bytes = plan.get("budget_bytes") if plan.get("enforced") else None
        self.last: StepDone | None = None
        self.evaluated: Evaluated | None = None
        # Steps, with the samples and the seconds of all steps up to each.
        self._marks: deque[tuple[StepDone, int, float]] = deque(maxlen=self.NUM_MARKS)
        self._samples, self._seconds = 0, 0.0
        self._loss = self._loss_weight = 0.0

    def add(self, event: StepDone) -> None:
        self.last = event
        self._samples += event.samples
        self._seconds += event.seconds
        if not self._marks or event.time - self._marks[-1][0].time >= self.MARK_SECONDS:
            self._marks.append((event, self._samples, self._seconds))
        if math.isfinite(event.loss):
            self._loss += self.LOSS_WEIGHT * (event.loss - self._loss)
            self._loss_weight += self.LOSS_WEIGHT * (1.0 - self._loss_weight)

    def loss(self, last: StepDone) -> float:
        """The mean loss, weighted toward recent steps; the last loss if that is not finite."""
        if not math.isfinite(last.loss) or self._loss_weight == 0.0:
            return last.loss
        return self._loss / self._loss_weight

    def samples_per_second(self, last: StepDone) -> float:
        """Training throughput, excluding evaluations and pauses."""
        _, samples, seconds = self._marks[0]
        samples, seconds = self._samples - samples, self._seconds - seconds
        if samples <= 0 or seconds <= 0:
            samples, seconds = last.samples, last.seconds
        return samples / seconds if seconds > 0 else 0.0

    def seconds_left(self) -> float | None:
        """Estimated time to the last step at the recent pace, including evaluations and pauses. None if
        the total is unknown, and after the first step, which includes warm-up and is not
        representative."""
        if self.total_steps is None or self.last is None:
            return None
        first, samples, _ = self._marks[0]
        left, done = self.total_steps - self.last.step, self.last.step - first.step
        if done and self.total_samples is not None:  # steps may differ in size
            left, done = self.total_samples - self.last.samples_seen, self._samples - samples
        if done <= 0:
            return None if left > 0 else 0.0
        return max(0.0, self.last.time - first.time) / done * max(0, left)

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
            ("loss", format_number(self.loss(last))),
            ("samples/s", format_speed(self.samples_per_second(last))),
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
        return "  ".join([*parts, _left(left)] if left else parts)

    def bar(self, width: int) -> RenderableType:
        """Lines for a terminal: progress, training figures, held-out scores."""
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
        lines: list[RenderableType] = [row, *_wrapped(self.figures(), width)]
        if self.evaluated is not None:
            first, *others = (f"{name} {text}" for name, text in scores(self.evaluated).items())
            step = ("after step", format_count(self.evaluated.step))
            held_out = [("held-out", first), *(("", score) for score in others), step]
            lines += _wrapped(held_out, width)
        return Group(*lines)


def _wrapped(figures: Sequence[tuple[str, str]], width: int) -> list[Text]:
    """Lines of labeled figures. A figure is cut only if it does not fit on a line by itself."""
    lines: list[Text] = []
    for label, figure in figures:
        if not lines or len(lines[-1]) + len(label) + len(figure) + 3 > width:
            lines.append(Text(no_wrap=True, overflow="ellipsis"))
        line = lines[-1]
        line.append("  " if line else "")
        line.append(f"{label} " if label else "", "dim")
        line.append(figure)
    return lines


def _left(seconds: float) -> str:
    return f"{format_seconds(seconds)} left" if seconds > 0 else "done"
