"""Choices as rows of a table, with columns for what differs among them.

Whoever compares plans compares bytes and seconds, so both stand beside a number that relates them to
what there is: the budget, and the plan that was taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anybatch.plans import Candidate, FrontierPoint, Plan
from anybatch.units import format_bytes, format_count, format_seconds

Point = Candidate | FrontierPoint


@dataclass(frozen=True, slots=True)
class Column:
    """A title, and whether numbers stand below it."""

    title: str
    number: bool


@dataclass(frozen=True, slots=True)
class Grid:
    """Rows of text, with a cell for each column."""

    columns: tuple[Column, ...]
    rows: list[tuple[str, ...]]

    def narrow(self) -> Grid:
        """The same with all words in one column, after the first."""
        words = [i for i, column in enumerate(self.columns) if not column.number]
        numbers = [i for i, column in enumerate(self.columns) if column.number]
        rows = [
            (
                row[numbers[0]],
                ", ".join(filter(None, (_said(self.columns[i].title, row[i]) for i in words))),
                *(row[i] for i in numbers[1:]),
            )
            for row in self.rows
        ]
        first, *others = (self.columns[i] for i in numbers)
        return Grid((first, Column("choice", False), *others), rows)


def _said(title: str, word: str) -> str:
    """What a cell of words says where its title is not above it; nothing where that is as ever."""
    if (title, word) in (("loss", "whole"), ("states", "device")):
        return ""
    said = {"recompute": f"recompute {word}", "loss": f"loss {word}", "states": f"states on {word}"}
    return said.get(title, word)


def points_of(plan: Plan, points: Sequence[Point]) -> Grid:
    """`points` that were weighed for `plan`, one in each row."""
    columns = [Column("micro-batch", True)]
    cells = [[format_count(point.choice.micro_batch) for point in points]]
    differing = {
        "precision": [point.choice.precision for point in points],
        "ranks": [point.parallel or plan.parallel for point in points],
        "recompute": [point.choice.recompute.describe() for point in points],
        "loss": ["in chunks" if point.choice.chunked_head else "whole" for point in points],
        "states": [point.choice.optimizer_states for point in points],
        "update": [point.choice.update for point in points],
    }
    own = {
        "precision": plan.choice.precision,
        "ranks": plan.parallel,
        "loss": "in chunks" if plan.choice.chunked_head else "whole",
        "states": plan.choice.optimizer_states,
        "update": plan.choice.update,
    }
    for title, values in differing.items():
        if title == "recompute" or {*values, own[title]} != {own[title]}:
            columns.append(Column(title, False))
            cells.append([str(value) for value in values])
    columns += [Column("peak", True), Column("budget", True)]
    cells.append(["" if p.peak_bytes is None else format_bytes(p.peak_bytes) for p in points])
    cells.append([_part(point.peak_bytes, plan.budget_bytes) for point in points])
    by = _seconds_of_plan(plan, points)
    columns.append(Column("step", True))
    cells.append([format_seconds(point.step_seconds) for point in points])
    if by is not None:
        columns.append(Column("vs plan", True))
        cells.append([compared(point.step_seconds, by) for point in points])
    return Grid(tuple(columns), list(zip(*cells, strict=True)))


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


def compared(seconds: float, by: float | None) -> str:
    """`seconds` in relation to another time: `+12%`, `-3.0%`, `2.5 x`."""
    if not by:
        return ""
    times = seconds / by
    if times >= 2:
        return f"{times:,.1f} x"
    return f"{times - 1:+.1%}" if abs(times - 1) >= 5e-4 else "="
