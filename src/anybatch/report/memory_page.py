"""HTML pages of a ledger, and of the plans for a task as memory against time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from anybatch.plans import Plan
from anybatch.process.files import write_whole
from anybatch.report import figures, ledger_figures
from anybatch.report.choice_table import table_of, with_plan
from anybatch.report.layers import every_row, rows_of
from anybatch.report.memory import (
    BY_LAYER,
    OVER_TIME,
    Section,
    layers,
    sections_of,
)
from anybatch.report.page import render
from anybatch.report.tables import Table
from anybatch.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from anybatch.estimate.ledger import Ledger
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
    over_time = ledger_figures.over_time(ledger, plan.budget_bytes)
    every = f"Every layer ({len(ledger.layers):,})", layers(every_row(ledger), ledger)
    sections = [
        replace(
            section,
            figures=[over_time] if section.title == OVER_TIME else (),
            more=every if section.title == BY_LAYER else None,
        )
        for section in sections_of(plan, ledger, knobs, layers(rows_of(ledger), ledger))
    ]
    sections.sort(key=lambda section: section.title != OVER_TIME)  # the figure comes first
    facts = [
        plan.device_name or plan.device,
        plan.choice.precision,
        f"recompute {plan.choice.recompute.describe()}",
        *(["loss in chunks"] if plan.choice.chunked_head else []),
    ]
    return _write(path, f"Memory of {plan.task.name}", facts, tiles, sections)


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
    figure = figures.candidates(plan)
    sections = [
        Section("Memory against time", figures=[figure] if figure else ()),
        Section("The frontier", [text], table_of(plan, with_plan(plan))),
        Section("The plan", table=Table([("", "words"), ("", "words")], plan.explain())),
    ]
    several = f"{plan.num_ranks} devices" if plan.num_ranks > 1 else ""
    facts = [plan.device_name or plan.device, several, plan.choice.precision]
    return _write(path, f"Plans for {plan.task.name}", facts, tiles, sections)


def _write(
    path: str | os.PathLike[str],
    title: str,
    facts: Sequence[str],
    tiles: Sequence[tuple[str, str, str]],
    sections: Sequence[Section],
) -> Path:
    page = render(
        "sections.html.jinja",
        [figure for section in sections for figure in section.figures],
        title=title,
        facts=[fact for fact in facts if fact],
        tiles=tiles,
        sections=sections,
    )
    return write_whole(path, page, "the page")
