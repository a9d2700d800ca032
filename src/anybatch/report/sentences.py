"""Text for events and figures, shared by the terminal and the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TypeAlias

from anybatch.errors import some
from anybatch.events import (
    CheckpointFailed,
    CheckpointSaved,
    Evaluated,
    Event,
    OutOfMemory,
    Overflowed,
    Replanned,
    Resumed,
    RunEnded,
    RunStarted,
    Said,
    Skipped,
    Stalled,
    Starved,
    StepDone,
    Straggler,
    whereabouts,
)
from anybatch.process.threads import MOST_IDLE
from anybatch.units import format_bytes, format_count, format_seconds

_SHOWN = 8  # maximum number of samples named in a sentence

MISSING = "-"
"""Placeholder for a missing figure in a table."""


def describe(event: Event) -> str:
    """Describe `event` for readers, usually in one sentence."""
    match event:
        case RunStarted():
            steps = "" if event.total_steps is None else f", {counted(event.total_steps, 'step')}"
            return f"Training {event.task} on {event.device}{steps}."
        case StepDone():
            return f"Step {format_count(event.step)} is done: loss {format_number(event.loss)}."
        case Evaluated():
            return f"Evaluation after step {format_count(event.step)}: {format_scores(event)}."
        case OutOfMemory():
            return _out_of_memory(event)
        case Replanned():
            return (
                f"New plan from step {format_count(event.step)} on ({event.reason.rstrip('.')}):"
                f" {event.after}; before: {event.before}."
            )
        case Overflowed():
            return (
                f"Gradients overflowed in step {format_count(event.step)}: it is redone with loss"
                f" scale {event.loss_scale_after:,.10g} instead of {event.loss_scale_before:,.10g}."
            )
        case Skipped():
            return _skipped(event)
        case Resumed():
            return " ".join([*passed_over(event), going_on(event)])
        case CheckpointSaved():
            return (
                f"Checkpoint of step {format_count(event.step)} saved:"
                f" {format_bytes(event.num_bytes)} in {format_seconds(event.seconds)}."
            )
        case CheckpointFailed():
            return f"Checkpoint of step {format_count(event.step)} not saved: {event.reason}"
        case Straggler():
            return (
                f"Rank {event.rank} is repeatedly slow: {format_seconds(event.seconds)} for its part of"
                f" step {format_count(event.step)}, where the others take"
                f" {format_seconds(event.others)}."
            )
        case Stalled():
            return (
                f"Training stalled for {format_seconds(event.seconds)}"
                f" {whereabouts(event.step, event.phase)}, and has resumed."
            )
        case Starved():
            return _starved(event)
        case Said():
            return event.text
        case RunEnded():
            why = "" if event.finished else f": {(event.reason or 'no reason given').rstrip('.')}"
            return f"{ending(event)}{why}."
        case _:
            return f"{event.kind.replace('_', ' ').capitalize()}."


def severity(event: Event) -> Literal["plain", "warn", "bad"]:
    """Whether `event` is shown as a plain message, as a warning, or as a failure."""
    warned = (
        *(Replanned, Overflowed, CheckpointFailed, Skipped),
        *(Straggler, Stalled, Starved),
    )
    is_bad, is_warned = isinstance(event, OutOfMemory), isinstance(event, warned)
    return "bad" if is_bad else "warn" if is_warned else "plain"


def ending(event: RunEnded) -> str:
    """The progress of a run that has ended, in words, without the reason why it stopped and without a
    period."""
    what = "finished" if event.finished else "stopped"
    left_out = f", {counted(event.num_skipped, 'sample')} left out" if event.num_skipped else ""
    after = f"after {counted(event.steps, 'step')} and {format_seconds(event.seconds)}"
    return f"Training {what} {after}{left_out}"


def going_on(event: Resumed) -> str:
    """A sentence that states from which step and folder a run resumes."""
    if not event.step:
        return f"No checkpoint in {event.folder} yet: training starts from the beginning."
    return f"Resuming after step {format_count(event.step)}, from {event.folder}."


def passed_over(event: Resumed) -> list[str]:
    """A sentence for each newer checkpoint that was not used to resume the run."""
    return [f"{sentence[:1].upper()}{sentence[1:]}" for sentence in event.passed_over]


def _starved(event: Starved) -> str:
    part = event.data_seconds / event.step_seconds
    if event.wanted_workers is None:
        then = "what loads them is too slow for this model; less work per sample, or larger files, help"
    elif event.num_workers:
        then = f"num_workers={event.wanted_workers} instead of {event.num_workers} would load more"
    else:
        then = f"num_workers={event.wanted_workers} in the task would load them meanwhile"
    return (
        f"{part:.0%} of a step is spent waiting for samples ({format_seconds(event.data_seconds)} of"
        f" {format_seconds(event.step_seconds)}): {then}."
    )


def _out_of_memory(event: OutOfMemory) -> str:
    asked = (
        ""
        if event.requested_bytes is None
        else f"{format_bytes(event.requested_bytes)} requested, "
    )
    budget = "" if event.budget_bytes is None else f" of {format_bytes(event.budget_bytes)}"
    rank = f" on rank {event.rank}" if event.rank else ""
    step, size = format_count(event.step), format_count(event.micro_batch)
    if event.phase in ("evaluation", "prediction"):
        where = f"in the {event.phase} after step {step}{rank} ({size} samples at a time)"
        then = "it starts again"
    else:
        where = f"in step {step}{rank} ({event.phase}, micro-batch {size})"
        then = "the step was undone"
    if event.then:
        then += f" and is redone with {event.then}"
    pieces = (
        f" and {format_bytes(event.fragmented_bytes)} lost to fragmentation"
        if event.fragmented_bytes
        else ""
    )
    return (
        f"Out of memory {where}: {asked}{format_bytes(event.in_use_bytes)}{budget} in use{pieces};"
        f" {then}."
    )


def _skipped(event: Skipped) -> str:
    step, reason = format_count(event.step), event.reason.rstrip(".")
    if not event.samples:
        return (
            f"Step {step} is left out, with {counted(event.num_samples, 'sample')} of epoch"
            f" {event.epoch}: {reason}."
        )
    shown = some(event.samples, _SHOWN)
    noun = "Sample" if len(event.samples) == 1 else "Samples"
    are = "is" if len(event.samples) == 1 else "are"
    if event.held_out:
        where = f"{noun} {shown} of the held-out data {are} left out of evaluation"
    else:
        where = f"{noun} {shown} of epoch {event.epoch} {are} left out of step {step}"
    rank = f" (rank {event.rank})" if event.rank else ""
    return f"{where}{rank}: {reason}."


def format_number(value: float) -> str:
    """Format a loss or a metric with four significant digits, so that its width hardly changes from
    step to step."""
    if math.isfinite(value) and abs(value) >= 9999.5:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3e}"
    return f"{value:#.4g}".removesuffix(".")


def format_speed(samples_per_second: float) -> str:
    """Format samples per second with three significant digits, or as a whole number from 100 on."""
    value = samples_per_second
    return format_count(round(value)) if value >= 100 else f"{value:.3g}"


class Scored(Protocol):
    """An object with a loss and metrics, such as an evaluation."""

    @property
    def loss(self) -> float: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...


def format_scores(event: Scored) -> str:
    """Format loss and metrics of an evaluation: `loss 0.4100, accuracy 0.9130`."""
    return ", ".join(f"{name} {text}" for name, text in scores(event).items())


def scores(event: Scored) -> dict[str, str]:
    """Formatted loss and metrics of an evaluation, by name, the loss first."""
    named: Mapping[str, float] = {"loss": event.loss, **event.metrics}
    return {name: format_number(value) for name, value in named.items()}


def counted(count: int, noun: str) -> str:
    """A count with its noun: `1 step`, `2,000 steps`."""
    return f"{format_count(count)} {noun}{'' if count == 1 else 's'}"


Comparison: TypeAlias = tuple[str, str, str, str, str]
"""What is compared, its predicted and measured figure, the error relative to the measured one, and the
budget, as text."""


def compare(ended: RunEnded) -> list[Comparison]:
    """Compare predictions with measurements: peak memory, with each memory account that was measured,
    then step time, by part if several ranks shared the step. Time spent waiting for samples, or for a
    core used by other processes, is not predicted, and is excluded from the step time."""
    seconds, totals, parts = ended.step_seconds, ended.predicted_totals, ended.predicted_step_parts
    waits: dict[str, float] = {}
    if seconds and not ended.step_parts:
        shares = (
            ("step, waiting", ended.data_seconds, 0.01),
            ("step, idle", ended.idle_seconds, MOST_IDLE),
        )
        waits = {what: wait for what, wait, least in shares if wait > least * seconds}
        seconds = max(0.0, seconds - sum(waits.values()))
    sizes = {name: size for name, size in ended.measured_totals.items() if name in totals}
    return [
        compare_peak(ended.predicted_peak_bytes, ended.measured_peak_bytes, ended.budget_bytes),
        *(
            _compared(f"of it {name}", totals[name], size, format_bytes)
            for name, size in sizes.items()
            if name != "total"
        ),
        _compared(
            "step, computing" if waits else "step time",
            ended.predicted_step_seconds or None,
            seconds or None,
            _precise_seconds,
        ),
        *(_compared(what, None, wait, _precise_seconds) for what, wait in waits.items()),
        *(
            _compared(f"of it {part}", parts.get(part), measured, _precise_seconds)
            for part, measured in ended.step_parts.items()
        ),
    ]


def compare_peak(
    predicted_bytes: int | None, measured_bytes: int | None, budget_bytes: int | None
) -> Comparison:
    """Compare predicted with measured peak memory. None or 0: unknown."""
    budget = format_bytes(budget_bytes) if budget_bytes else MISSING
    both = predicted_bytes or None, measured_bytes or None
    return _compared("peak memory", *both, format_bytes, budget)


def _compared(
    what: str,
    predicted: float | None,
    measured: float | None,
    form: Callable[[Any], str],
    budget: str = MISSING,
) -> Comparison:
    error = f"{predicted / measured - 1:+.1%}" if predicted and measured else MISSING
    text = MISSING if predicted is None else form(predicted)
    return what, text, MISSING if measured is None else form(measured), error, budget


def _precise_seconds(seconds: float) -> str:
    """Format seconds with three significant digits below a minute, so that figures that differ by a few
    percent look different."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (59.95, 1.0, "s")):
        if seconds < limit:
            value = seconds * factor
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:#.3g} {unit}"
    return format_seconds(seconds)
