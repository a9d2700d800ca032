"""Refusal: the error that is raised when nothing fits, which names a budget that is enough and the
savings of each knob.

For a model that cannot be traced, weights, gradients and optimizer states are still known. If they
do not fit, the model cannot be trained, and for a device that is not present nothing else would
show this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from anybatch.compute.low_bit_optimizers import state_kinds
from anybatch.compute.optimizer_update import can_part
from anybatch.errors import NoPlanFits, worded
from anybatch.estimate import Subject
from anybatch.machine import Device
from anybatch.planner.costs import Costs
from anybatch.planner.knobs import Knob, knobs
from anybatch.planner.ranks import Layout, budget_for, least_budget, reserve_of
from anybatch.plans import Choice, Precision, Recompute
from anybatch.task import parameters_in
from anybatch.units import format_bytes, format_seconds

_MOST_TRIES = 8

_LEAST_ADVISED = 1 << 20
"""No knobs are listed for a model that needs less."""


def nothing_fits(searched: Sequence[tuple[Costs, Sequence[Recompute]]]) -> NoPlanFits:
    """The error that names the smallest budget under which some choice would fit, among all
    recompute methods of all `searched` costs."""
    every = [
        (costs, costs.choice(way, costs.sizes.smallest)) for costs, ways in searched for way in ways
    ]
    costs, leanest = _leanest(every)
    peak = enough(costs, leanest)
    ghost, long = costs.subject.identity.ghost_batch, costs.subject.long
    smaller = (
        f" A ghost batch smaller than {ghost} would need less, but changes BatchNorm's result."
        if ghost and ghost > 1
        else ""
    )
    if long:
        smaller += f" It has to hold the longest sample: {long}; shorten what is too long."
    seconds = format_seconds(costs.seconds(leanest))
    return no_plan_fits(
        costs.setting.device,
        f"the leanest ({leanest.describe()}{_divided(costs)})",
        peak,
        f".{smaller}{_knobs(leanest, costs) if peak >= _LEAST_ADVISED else ''}",
        at=f", at {seconds} per step",
    )


def _leanest(every: Sequence[tuple[Costs, Choice]]) -> tuple[Costs, Choice]:
    """The choice with the smallest peak. Those whose lower bound is larger are not traced."""
    bounds = [costs.least_bytes(choice.recompute, choice.micro_batch) for costs, choice in every]
    best: tuple[float, int] = float("inf"), 0
    for index in sorted(range(len(every)), key=bounds.__getitem__):
        if bounds[index] <= best[0]:
            costs, choice = every[index]
            best = min(best, (costs.least(choice), index))
    return every[best[1]]


def no_plan_fits(device: Device, what: str, peak_bytes: int, more: str, at: str = "") -> NoPlanFits:
    """The error that `what` is predicted to need `peak_bytes`, which names the smallest budget for
    it; `more` ends the sentence and may go on."""
    least = budget_for(peak_bytes, device.kind)
    reserve = ""
    if peak_bytes <= device.budget_bytes:
        kept = reserve_of(device.budget_bytes, device.kind)
        reserve = f" plus {format_bytes(kept)} in reserve"
    if device.present or least <= device.total_bytes:
        remedy = f"Give it at least {least_budget(least)}"
    else:
        size = f"{-(-least // (1 << 20))}MiB"
        asked = worded(f"Machine.describe({size!r})", f"--device {size}")
        remedy = f"Describe a device with at least {format_bytes(least)} ({asked})"
    return NoPlanFits(
        f"no plan fits the budget of {format_bytes(device.budget_bytes)}: {what} is predicted to need"
        f" {format_bytes(peak_bytes)}{reserve}{at}. {remedy}{more}",
        least_bytes=least,
    )


def enough(costs: Costs, choice: Choice) -> int:
    """The bytes that `choice` is predicted to need, also under the smallest budget for them. CUDA's
    allocator releases unused memory when it reaches its limit, so under a larger limit it may hold
    more."""
    kind = costs.setting.device.kind
    peak = costs.least(choice)
    for _ in range(_MOST_TRIES if kind == "cuda" else 0):
        there = costs.under(budget_for(peak, kind))
        needed = there.least(choice)
        if needed <= peak:
            break
        peak = needed
    return peak


def _divided(costs: Costs) -> str:
    division = costs.subject.division
    return "" if division is None else f", divided over {division.ranks} ranks"


def _knobs(leanest: Choice, costs: Costs) -> str:
    """A table of the bytes and seconds with each knob, starting from `leanest`; empty if there are
    none."""
    found = knobs(costs, leanest)
    if not found:
        return ""
    return "\nFrom there, one change at a time would need:\n" + "\n".join(_rows(found))


def _rows(found: Sequence[Knob]) -> Iterator[str]:
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
    for what, peak, time, remark in rows:
        yield f"  {what:{widths[0]}}  {peak:>{widths[1]}}  {time:>{widths[2]}}  {remark}".rstrip()


def check_floor(
    subject: Subject, device: Device, layouts: Sequence[Layout], precision: Precision, why: str
) -> None:
    """Raises `NoPlanFits` if not even weights, gradients and states fit on `device`; `why` is the
    reason why nothing else is known."""
    try:
        num_bytes = min(_floor(subject, layout, device, precision) for layout in layouts)
    except Exception:  # any exception of the user's code on fake tensors
        return
    least = budget_for(num_bytes, device.kind)
    if least > device.budget_bytes:
        raise NoPlanFits(
            f"no plan fits the budget of {format_bytes(device.budget_bytes)}: weights, gradients and"
            f" optimizer states that have to be there take {format_bytes(num_bytes)} by themselves."
            f" Give it more than {format_bytes(least)}. {why}",
            least_bytes=least,
        )


def _floor(subject: Subject, layout: Layout, device: Device, precision: Precision) -> int:
    """Bytes on one rank; states are included only if they have to be on the device."""
    model = subject.inspect()
    optimizer = subject.make_optimizer(model)
    weights = sum(param.nbytes for param in model.parameters())
    trained = [p for p in parameters_in(optimizer.param_groups) if p.requires_grad]
    gradients = sum(param.nbytes for param in trained)
    groups = [
        (group, sum(p.nbytes for p in group["params"] if p.requires_grad))
        for group in optimizer.param_groups
    ]
    divided = layout.parallel == "shard"
    elsewhere = device.kind == "cuda" and can_part(optimizer) and not divided
    states = 0 if elsewhere else sum(n * len(state_kinds(optimizer, g)) for g, n in groups)
    whole = (weights + gradients + states) // (2 if precision.endswith("-pure") else 1)
    return whole // (len(layout.shares) if divided else 1)
