"""Comparison: everything that was weighed, beside the choice that was taken."""

from __future__ import annotations

from collections.abc import Sequence

from anybatch.planner.costs import Costs
from anybatch.planner.ways import order
from anybatch.plans import Candidate, Choice, FrontierPoint, Recompute
from anybatch.units import format_bytes

SAME_TIME = 1.01
"""Predicted times that differ by less are taken as equal; then the smaller peak wins."""


def explore(ways: Sequence[Recompute], costs: Costs) -> None:
    """Weigh every way over all micro-batches: two traces each, the rest by the line."""
    for way in ways:
        for size in (costs.sizes.smallest, costs.sizes.whole):
            costs.peak(costs.choice(way, size))
        for size in costs.sizes.doubled():
            costs.bytes(costs.choice(way, size))


def rejected(taken: Choice, costs: Costs) -> tuple[Candidate, ...]:
    """Everything that was weighed but the one that was `taken`, with reasons."""
    return tuple(
        candidate(choice, taken, costs)
        for choice in sorted(costs.weighed(), key=order)
        if choice != taken
    )


def candidate(choice: Choice, taken: Choice, costs: Costs) -> Candidate:
    """`choice`, with the reason for which another one was `taken`."""
    return Candidate(
        choice=choice,
        peak_bytes=costs.learned_bytes(costs.bytes(choice)),
        step_seconds=costs.learned_seconds(costs.seconds(choice)),
        reason=_reason(choice, taken, costs),
    )


def frontier(costs: Costs) -> tuple[FrontierPoint, ...]:
    """Of all that was weighed, what nothing else beats in both bytes and time; leanest first."""
    points: list[FrontierPoint] = []
    fastest = float("inf")
    for choice, peak in sorted(
        costs.weighed().items(), key=lambda item: (item[1], costs.seconds(item[0]), order(item[0]))
    ):
        seconds = costs.seconds(choice)
        if seconds < fastest / 1.001:
            fastest = seconds
            points.append(
                FrontierPoint(
                    choice=choice,
                    peak_bytes=costs.learned_bytes(peak),
                    step_seconds=costs.learned_seconds(seconds),
                )
            )
    return tuple(points)


def _reason(choice: Choice, taken: Choice, costs: Costs) -> str:
    peak = costs.bytes(choice)
    if peak > costs.room:
        times = peak / costs.setting.device.budget_bytes
        compared = f", {times:.1f} times the budget" if times >= 1.05 else ""
        return (
            f"needs {format_bytes(peak)}, {format_bytes(peak - costs.room)} more than the budget"
            f" leaves{compared}"
        )
    slower = costs.seconds(choice) / max(costs.seconds(taken), 1e-12) - 1
    if slower > SAME_TIME - 1:
        return f"fits, but is predicted to be {slower:.0%} slower"
    return "fits and is as fast, but needs more memory"
