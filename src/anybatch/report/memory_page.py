"""HTML pages of a ledger, and of the plans for a task as memory against time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from anybatch.plans import Plan
from anybatch.process.files import write_whole
from anybatch.report import figures
from anybatch.report.choice_table import table_of, with_plan
from anybatch.report.figures import byte_scale, rounded
from anybatch.report.layers import every_row, rows_of
from anybatch.report.memory import layers, sections_of, where
from anybatch.report.page import render
from anybatch.report.plot import Axis, Figure, Mark, Trace
from anybatch.report.tables import Section
from anybatch.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from anybatch.estimate.ledger import Ledger, Moment
    from anybatch.planner.knobs import Knob


def write_ledger(
    path: str | os.PathLike[str],
    plan: Plan,
    ledger: Ledger,
    knobs: Sequence[Knob],
) -> Path:
    """Write `ledger`, computed for `plan`, as an HTML page that works offline. Raises `InputError` if
    it cannot be written."""
    budget = f"of {format_bytes(plan.budget_bytes)}" if plan.budget_bytes else ""
    tiles = [
        ("predicted peak", format_bytes(ledger.num_bytes), budget),
        ("parameters", format_count(ledger.num_parameters), ""),
        ("activations", format_bytes(ledger.activation_bytes), "when forward ends"),
        ("micro-batch", format_count(ledger.micro_batch), f"of {plan.task.global_batch:,} samples"),
    ]
    rows, every = rows_of(ledger), every_row(ledger)
    sections = sections_of(
        plan,
        ledger,
        knobs,
        layers(rows, ledger),
        (f"Every layer ({len(every):,})", layers(every, ledger)),
        [_over_time(ledger, plan.budget_bytes)],
    )
    sections.sort(key=lambda section: not section.figures)  # the figure comes first
    facts = [
        plan.device_name or plan.device,
        plan.choice.precision,
        f"recompute {plan.choice.recompute.describe()}",
        "loss in chunks" if plan.choice.chunked_head else "",
    ]
    page = render(f"Memory of {plan.task.name}", facts, tiles, sections)
    return write_whole(path, page, "the page")


def write_frontier(path: str | os.PathLike[str], plan: Plan) -> Path:
    """Write the trade-off between memory and time for `plan` as an HTML page. Raises `InputError` if it
    cannot be written."""
    tiles: list[tuple[str, str, str]] = []
    if plan.prediction is not None:
        tiles = [
            ("predicted step", format_seconds(plan.prediction.step_seconds), ""),
            ("predicted peak", format_bytes(plan.prediction.peak_bytes), ""),
            ("micro-batch", format_count(plan.choice.micro_batch), ""),
        ]
    text = "Each of these is beaten by no other in both memory and time; the leanest comes first."
    sections = [
        Section("Memory against time", figures=figures.candidates(plan)),
        Section("The frontier", [text], table=table_of(plan, with_plan(plan))),
        Section("The plan", pairs=plan.explain()),
    ]
    several = f"{plan.num_ranks} devices" if plan.num_ranks > 1 else ""
    facts = [plan.device_name or plan.device, several, plan.choice.precision]
    page = render(f"Plans for {plan.task.name}", facts, tiles, sections)
    return write_whole(path, page, "the page")


# ------------------------------------------------------------------------------- bytes over one step

_KIND_COLORS = {  # from the bottom of the figure up: constant, growing, temporary
    "device context": "--grey",
    "libraries": "--ink-2",
    "libraries' workspaces": "--ink-2",
    "parameters": "--blue",
    "buffers": "--blue-faint",
    "weights in half precision": "--sky",
    "gathered weights and gradients": "--sky",
    "optimizer state": "--violet",
    "gradients": "--teal",
    "input batch": "--teal-faint",
    "activations": "--amber",
    "loss and logits": "--rose",
    "temporary": "--moss",
    "kernels' scratch": "--moss-faint",
}
_LEAST_SHOWN = 0.002
"""Kinds that never exceed this fraction of the peak are not drawn."""


def _over_time(ledger: Ledger, budget: int | None) -> Figure:
    """A figure of the bytes in use over one step, as stacked areas by kind, and the bytes held by the
    process, as a line above them."""
    moments, peak = ledger.curve or (ledger.peak,), ledger.peak
    top = max(moment.num_bytes for moment in moments)
    scale, unit = byte_scale(max(top, 1))
    xs = [moment.number for moment in moments]
    traces: list[Trace] = []
    below = [0] * len(moments)
    for kind, color in _KIND_COLORS.items():
        sizes = [moment.by_kind.get(kind, 0) for moment in moments]
        if max(sizes) > _LEAST_SHOWN * top:
            above = [a + b for a, b in zip(below, sizes, strict=True)]
            edges = [[rounded(size / scale) for size in edge] for edge in (below, above)]
            traces.append(Trace(kind, xs, edges[1], color, "area", edges[0], stairs=True))
            below = above
    held = [rounded(moment.num_bytes / scale) for moment in moments]
    texts = [_hover(moment) for moment in moments]
    traces += [
        Trace("held by the process", xs, held, "--ink", text=texts, width=1.5, stairs=True),
        Trace("most in use", [peak.number], [rounded(peak.used_bytes / scale)], "--ink", "points"),
    ]
    said = (
        f"At most {format_bytes(peak.used_bytes)} in use, at operation {peak.number:,}"
        f" ({where(peak)}), and {format_bytes(top)} held"
    )
    firsts = [next(run) for _, run in groupby(moments, key=lambda moment: moment.phase)]
    spans = list(pairwise(one.number for one in (*firsts, moments[-1])))
    marks = [Mark("x", begin, "--grey", dotted=True) for begin, _ in spans[1:]]
    names = [(sum(span) / 2, one.phase) for span, one in zip(spans, firsts, strict=True)]
    # Where names would overlap, the longest phase is named.
    longest_first = sorted(range(len(spans)), key=lambda i: spans[i][0] - spans[i][1])
    near = budget if budget and budget < 4 * top else 0
    if near:
        name = f"budget {format_bytes(near)}"
        marks.append(Mark("y", near / scale, "--red", name))
        said += f"; the red line is the {name}"
    most = 1.06 * max(top, near) / scale
    x_axis = Axis("operations of one step", ticks=[names[i] for i in longest_first], grid=False)
    axes = x_axis, Axis(unit, (0, most or 1.0))
    return Figure("curve", "Memory over one step", f"{said}.", traces, *axes, marks, height=460)


def _hover(moment: Moment) -> str:
    largest = sorted(moment.by_kind.items(), key=lambda item: -item[1])[:4]
    lines = [
        where(moment),
        f"{format_bytes(moment.used_bytes)} in use, {format_bytes(moment.num_bytes)} held",
        *(f"{kind} {format_bytes(size)}" for kind, size in largest),
    ]
    return "\n".join(lines)
