"""Choices as rows of a table, each in words of what differs among them.

Whoever compares plans compares bytes and seconds, so both are related to what there is: the budget, and
the plan that was taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from anybatch.plans import Candidate, Choice, FrontierPoint, Plan
from anybatch.report.tables import Content, Table
from anybatch.units import format_bytes, format_count, format_seconds

Point = Candidate | FrontierPoint


def table_of(plan: Plan, points: Sequence[Point]) -> Table:
    """`points` that were weighed for `plan`, one in each row; what the plan has taken is marked."""
    # What the plan itself has is told where another point has something else.
    own = _words(plan.choice, plan.parallel)
    others = [_words(point.choice, point.parallel or plan.parallel) for point in points]
    told = {what for words in others for what in words if words[what] != own[what]} | {"recompute"}
    by = _seconds_of_plan(plan, points)
    rows = [
        (
            format_count(point.choice.micro_batch),
            ", ".join(word for what, word in words.items() if what in told and word),
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
    return Table([columns[i] for i in kept], [[row[i] for i in kept] for row in rows])


def _words(choice: Choice, parallel: str) -> dict[str, str]:
    """What a choice is besides its micro-batch; empty where that is as ever."""
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
    """The predicted time of a step of `plan`, to compare `points` with. None: a rehearsal found the
    choice, so there is only a measured time."""
    for point in (*points, *plan.frontier):
        if is_taken(point, plan):
            return point.step_seconds
    told = plan.prediction
    return None if told is None or told.rehearsed else told.step_seconds


def with_plan(plan: Plan) -> list[FrontierPoint]:
    """The frontier of `plan` and what it has taken, which may lie a little beside it; leanest first."""
    points, told = list(plan.frontier), plan.prediction
    if told is not None and not any(is_taken(point, plan) for point in points):
        own = FrontierPoint(
            choice=plan.choice,
            parallel=plan.parallel,
            peak_bytes=told.peak_bytes,
            step_seconds=told.step_seconds,
        )
        points.append(own)
    return sorted(points, key=lambda point: point.peak_bytes)


def is_taken(point: Point, plan: Plan) -> bool:
    """Whether `point` is what the plan has taken."""
    return (point.parallel or plan.parallel) == plan.parallel and plan.choice.trains_like(
        point.choice
    )


def _part(size: int | None, whole: int | None) -> str:
    if size is None or not whole:
        return ""
    part = size / whole
    return (
        f"{part:.1%}" if 0.95 < part <= 1.0 else f"{part:.0%}"
    )  # the reserve is a matter of tenths


def _compared(seconds: float, by: float) -> str:
    """`seconds` in relation to another time: `+12%`, `-3.0%`, `2.5 x`."""
    times = seconds / by
    if times >= 2:
        return f"{times:,.1f} x"
    return f"{times - 1:+.1%}" if abs(times - 1) >= 5e-4 else "="
