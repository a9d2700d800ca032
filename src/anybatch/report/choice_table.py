"""A table of choices, each described by the settings in which they differ.

Plans are compared by bytes and seconds, so peaks are shown relative to the budget, and times relative
to the selected plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from anybatch.plans import Candidate, Choice, FrontierPoint, Plan
from anybatch.report.tables import Content, Table
from anybatch.units import format_bytes, format_count, format_seconds

Point = Candidate | FrontierPoint


def table_of(plan: Plan, points: Sequence[Point]) -> Table:
    """A table of the `points` that were considered for `plan`, one per row. The selected one is
    marked."""
    # Only settings in which some point differs from the plan are shown, and recompute.
    own = _words(plan.choice, plan.parallel)
    others = [_words(point.choice, point.parallel or plan.parallel) for point in points]
    shown = {what for words in others for what in words if words[what] != own[what]} | {"recompute"}
    by = _seconds_of_plan(plan, points)
    rows = [
        (
            format_count(point.choice.micro_batch),
            ", ".join(word for what, word in words.items() if what in shown and word),
            "" if point.peak_bytes is None else format_bytes(point.peak_bytes),
            _part(point.peak_bytes, plan.budget_bytes),
            format_seconds(point.step_seconds),
            _compared(point.step_seconds, by) if by else "",
            "plan" if is_taken(point, plan) else "",
        )
        for point, words in zip(points, others, strict=True)
    ]
    columns: list[tuple[str, Content]] = [
        ("micro-batch", "number"),
        ("choice", "words"),
        *((title, "number") for title in ("peak", "budget", "step", "vs plan")),
        ("", "whole"),
    ]
    kept = [number for number in range(len(columns)) if any(row[number] for row in rows)]
    cells = [[row[i] for i in kept] for row in rows]
    return Table([columns[i] for i in kept], cells, ["budget", "vs plan"])


def _words(choice: Choice, parallel: str) -> dict[str, str]:
    """Descriptions of the settings of a choice other than the micro-batch; empty for defaults."""
    return {
        "precision": choice.precision,
        "ranks": parallel,
        "recompute": f"recompute {choice.recompute.describe()}",
        "loss": "loss in chunks" if choice.chunked_head else "",
        "states": ""
        if choice.optimizer_states == "device"
        else f"states on {choice.optimizer_states}",
        "update": choice.update,
    }


def _seconds_of_plan(plan: Plan, points: Sequence[Point]) -> float | None:
    """The predicted step time of `plan`, with which `points` are compared. None if a rehearsal found
    the choice, so that only a measured time exists, or if there is no prediction."""
    for point in (*points, *plan.frontier):
        if is_taken(point, plan):
            return point.step_seconds
    prediction = plan.prediction
    return None if prediction is None or prediction.rehearsed else prediction.step_seconds


def with_plan(plan: Plan) -> list[FrontierPoint]:
    """The frontier of `plan` together with the selected choice, which may be slightly off the
    frontier. Sorted by peak memory, smallest first."""
    points, prediction = list(plan.frontier), plan.prediction
    if prediction is not None and not any(is_taken(point, plan) for point in points):
        own = FrontierPoint(
            choice=plan.choice,
            parallel=plan.parallel,
            peak_bytes=prediction.peak_bytes,
            step_seconds=prediction.step_seconds,
        )
        points.append(own)
    return sorted(points, key=lambda point: point.peak_bytes)


def is_taken(point: Point, plan: Plan) -> bool:
    """Whether `point` is the choice selected by `plan`."""
    return (point.parallel or plan.parallel) == plan.parallel and plan.choice.trains_like(
        point.choice
    )


def _part(size: int | None, whole: int | None) -> str:
    if size is None or not whole:
        return ""
    part = size / whole
    return f"{part:.1%}" if 0.95 < part <= 1.0 else f"{part:.0%}"  # tenths matter near the budget


def _compared(seconds: float, by: float) -> str:
    """`seconds` relative to another time: `+12%`, `-3.0%`, `2.5 x`."""
    times = seconds / by
    if times >= 2:
        return f"{times:,.1f} x"
    return f"{times - 1:+.1%}" if abs(times - 1) >= 5e-4 else "="
