"""Comparison: everything that was weighed, beside the choice that was taken."""

from __future__ import annotations

from collections.abc import Iterable

from anybatch.planner.costs import Costs
from anybatch.planner.recompute_options import order
from anybatch.plans import Candidate, Choice, FrontierPoint
from anybatch.units import format_bytes

SAME_TIME = 1.01
"""Predicted times that differ by less are taken as equal; then the smaller peak wins."""


def rejected(costs: Costs, taken: Choice, by: Costs) -> tuple[Candidate, ...]:
    """Everything that was weighed by `costs` but the choice that was `taken`, which was weighed `by`
    these or others, with reasons."""
    return tuple(
        Candidate(
            choice=choice,
            parallel=costs.parallel,
            peak_bytes=costs.bytes(choice),
            step_seconds=costs.seconds(choice),
            reason=_reason(choice, costs, taken, by),
        )
        for choice in sorted(costs.weighed(), key=order)
        if choice != taken or costs is not by
    )


def impossible(
    choice: Choice, costs: Costs, reason: str, peak_bytes: float | None = None
) -> Candidate:
    """`choice`, which cannot be run for that `reason`; its bytes may not be known."""
    return Candidate(
        choice=choice,
        parallel=costs.parallel,
        peak_bytes=None if peak_bytes is None else int(peak_bytes),
        step_seconds=costs.seconds(choice),
        possible=False,
        reason=reason,
    )


def frontier(every: Iterable[Costs]) -> tuple[FrontierPoint, ...]:
    """Of all that was weighed, what nothing else beats in both bytes and time; leanest first."""
    weighed = [
        (peak, costs.seconds(choice), order(choice), choice, costs)
        for costs in every
        for choice, peak in costs.weighed().items()
    ]
    points: list[FrontierPoint] = []
    fastest = float("inf")
    for peak, seconds, _, choice, costs in sorted(weighed, key=lambda item: item[:3]):
        if seconds < fastest / 1.001:
            fastest = seconds
            points.append(
                FrontierPoint(
                    choice=choice,
                    parallel=costs.parallel,
                    peak_bytes=peak,
                    step_seconds=seconds,
                )
            )
    return tuple(points)


def _reason(choice: Choice, costs: Costs, taken: Choice, by: Costs) -> str:
    peak = costs.bytes(choice)
    if peak > costs.room:
        return f"exceeds the budget by {format_bytes(peak - costs.room)}"
    slower = costs.seconds(choice) / max(by.seconds(taken), 1e-12) - 1
    if slower >= 1:
        return f"fits, but is predicted to take {1 + slower:.1f} times as long"
    if slower > SAME_TIME - 1:
        return f"fits, but is predicted to be {slower:.0%} slower"
    if peak > by.bytes(taken):
        return "fits and is as fast, but needs more memory"
    return "fits and is as fast, or too little faster to be sure of"
