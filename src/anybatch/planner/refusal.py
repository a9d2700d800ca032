"""Refusal: what to say when nothing fits: what would, and what each knob would buy."""

from __future__ import annotations

from collections.abc import Sequence

from anybatch.errors import NoPlanFits
from anybatch.planner.costs import Costs
from anybatch.planner.knobs import knobs
from anybatch.planner.reserve import budget_for
from anybatch.plans import Choice, Recompute
from anybatch.units import format_bytes, format_seconds


def nothing_fits(ways: Sequence[Recompute], costs: Costs) -> NoPlanFits:
    """The error that names the least budget under which one of `ways` would fit."""
    leanest = min((costs.choice(way, costs.sizes.smallest) for way in ways), key=costs.peak)
    peak = costs.learned_bytes(costs.peak(leanest))
    least = budget_for(peak)
    budget = format_bytes(costs.setting.device.budget_bytes)
    ghost, long = costs.subject.identity.ghost_batch, costs.subject.long
    smaller = (
        f" A ghost batch smaller than {ghost} would need less, but changes BatchNorm's result."
        if ghost and ghost > 1
        else ""
    )
    if long:
        smaller += f" It has to hold the longest sample: {long}; shorten what is too long."
    seconds = format_seconds(costs.learned_seconds(costs.seconds(leanest)))
    return NoPlanFits(
        f"no plan fits the budget of {budget}: the leanest ({leanest.describe()}) is predicted to"
        f" need {format_bytes(peak)}, at {seconds} per step. Give it at least"
        f" {format_bytes(least)} (--memory {-(-least // (1 << 20))}MiB), or take lower"
        f" precision.{smaller}{_bought(leanest, costs)}",
        least_bytes=least,
    )


def _bought(leanest: Choice, costs: Costs) -> str:
    """What the knobs that no plan turns by itself would buy."""
    found = knobs(costs.subject, costs.setting, leanest)
    if not found:
        return ""
    rows = [
        (
            knob.what,
            format_bytes(knob.peak_bytes),
            f"{format_seconds(knob.step_seconds)} per step",
            knob.remark,
        )
        for knob in found
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"  {what:{widths[0]}}  {peak:>{widths[1]}}  {time:>{widths[2]}}  {remark}".rstrip()
        for what, peak, time, remark in rows
    ]
    return "\nFrom there, one change at a time would need:\n" + "\n".join(lines)
