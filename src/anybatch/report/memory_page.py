"""Pages beside that of a run: a ledger as a page, and the plans of a task, memory against time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from anybatch.files import write_whole
from anybatch.plans import Plan
from anybatch.report import figures, html, ledger_figures
from anybatch.report.choice_table import points_of, with_plan
from anybatch.report.figures import Figure
from anybatch.report.layers import PARTS, Row, every_row, rows_of, total_row
from anybatch.report.memory import assumptions, changed, loss_advice, where
from anybatch.report.totals import totals_of
from anybatch.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from anybatch.estimate.ledger import Ledger
    from anybatch.planner.knobs import Knob

_INDENT = "\N{EM SPACE}"


@dataclass(frozen=True, slots=True)
class _Table:
    """`columns` are (title, whether numbers stand in it; or `"whole"`: text that is not broken)."""

    columns: Sequence[tuple[str, bool | Literal["whole"]]]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class _Section:
    title: str
    text: str = ""
    figures: Sequence[Figure] = ()
    table: _Table | None = None
    more: tuple[str, _Table] | None = None  # opened by a click on its title


def write_ledger(
    path: str | os.PathLike[str],
    plan: Plan,
    ledger: Ledger,
    knobs: Sequence[Knob],
    in_use: Sequence[Knob] = (),
) -> Path:
    """Write `ledger`, made for `plan`, as a page that works offline. Raises `InputError` if it cannot
    be written."""
    budget = f"of {format_bytes(plan.budget_bytes)}" if plan.budget_bytes else ""
    tiles = [
        ("predicted peak", format_bytes(ledger.num_bytes), budget),
        ("parameters", format_count(ledger.num_parameters), ""),
        ("activations", format_bytes(ledger.activation_bytes), "when forward ends"),
        ("micro-batch", format_count(ledger.micro_batch), f"of {plan.task.global_batch:,} samples"),
    ]
    every = f"Every layer ({len(ledger.layers):,})"
    sections = [
        _Section(
            "Over one step",
            f"Most is in use in {where(ledger.peak)}.",
            [ledger_figures.over_time(ledger, plan.budget_bytes)],
        ),
        _Section("Most bytes at any time", table=_totals_table(plan, ledger)),
        _Section(
            "When most is in use, by kind",
            figures=[ledger_figures.by_kind(ledger)],
            table=_kinds_table(ledger),
        ),
        _Section(
            "By layer",
            figures=[ledger_figures.by_layer(ledger)],
            table=_layers_table(rows_of(ledger), total_row(ledger)),
            more=(every, _layers_table(every_row(ledger), total_row(ledger))),
        ),
    ]
    if knobs:
        sections.append(
            _Section(
                "What would shrink it",
                loss_advice(ledger),
                table=_knobs_table(knobs, ledger.num_bytes),
            )
        )
    if in_use:
        saving = _knobs_table(in_use, ledger.num_bytes)
        sections.append(_Section("In use, and what it saves", "Without it:", table=saving))
    sections.append(
        _Section(
            "The plan",
            " ".join(plan.notices),
            table=_Table([("", "whole"), ("", False)], assumptions(plan, ledger)),
        )
    )
    sections.append(_Section("How it was found", " ".join([ledger.method, *ledger.not_counted])))
    facts = [
        plan.device_name or plan.device,
        plan.choice.precision,
        f"recompute {plan.choice.recompute.describe()}",
        *(["loss in chunks"] if plan.choice.chunked_head else []),
    ]
    return _write(path, f"Memory of {plan.task.name}", facts, tiles, sections)


def write_frontier(path: str | os.PathLike[str], plan: Plan) -> Path:
    """Write what memory buys in time, as a page. Raises `InputError` if it cannot be written."""
    told = plan.prediction
    tiles: list[tuple[str, str, str]] = []
    if told is not None:
        tiles = [
            ("predicted step", format_seconds(told.step_seconds), ""),
            ("predicted peak", format_bytes(told.peak_bytes), ""),
            ("micro-batch", format_count(plan.choice.micro_batch), ""),
        ]
    drawn = [figure for figure in (figures.candidates(plan),) if figure]
    grid = points_of(plan, with_plan(plan))
    table = _Table([(column.title, column.number) for column in grid.columns], grid.rows)
    text = "Each of these is beaten by no other in both memory and time; the leanest comes first."
    sections = [
        _Section("Memory against time", figures=drawn),
        _Section("The frontier", text, table=table),
        _Section(
            "The plan",
            table=_Table([("", False), ("", False)], [list(line) for line in plan.explain()]),
        ),
    ]
    several = f"{plan.num_ranks} devices" if plan.num_ranks > 1 else ""
    facts = [plan.device_name or plan.device, several, plan.choice.precision]
    return _write(path, f"Plans for {plan.task.name}", facts, tiles, sections)


def _write(
    path: str | os.PathLike[str],
    title: str,
    facts: Sequence[str],
    tiles: Sequence[tuple[str, str, str]],
    sections: Sequence[_Section],
) -> Path:
    specs = {figure.id: figure.spec for section in sections for figure in section.figures}
    page = html.render(
        "sections.html.jinja",
        title=title,
        facts=[fact for fact in facts if fact],
        tiles=tiles,
        sections=sections,
        specs=specs,
    )
    return write_whole(path, page, "the page")


# ---------------------------------------------------------------------------------------- tables


def _totals_table(plan: Plan, ledger: Ledger) -> _Table:
    columns: list[tuple[str, bool | Literal["whole"]]] = [
        ("account", "whole"),
        ("predicted", True),
        ("what it counts", False),
    ]
    rows = [
        (total.name, format_bytes(total.predicted or 0), total.meaning)
        for total in totals_of(plan.device, ledger.totals)
    ]
    return _Table(columns, rows)


def _kinds_table(ledger: Ledger) -> _Table:
    total = max(1, ledger.num_bytes)
    rows = [
        (kind, format_bytes(size), f"{size / total:.0%}")
        for kind, size in sorted(ledger.by_kind.items(), key=lambda item: -item[1])
        if size
    ]
    return _Table([("kind", False), ("bytes", True), ("share", True)], rows)


def _layers_table(layers: Sequence[Row], total: Row) -> _Table:
    parts = [(title, i) for i, (title, _) in enumerate(PARTS) if total.sizes[i]]
    rows = [
        [
            _INDENT * row.depth + row.name,
            row.type_name,
            row.output.replace("x", " × "),
            *(_or_empty(row.sizes[i]) for _, i in parts),
            format_bytes(row.total_bytes),
        ]
        for row in (*layers, total)
    ]
    return _Table(
        [
            ("layer", "whole"),
            ("type", False),
            ("output", "whole"),
            *((title, True) for title, _ in parts),
            ("all", True),
        ],
        rows,
    )


def _knobs_table(knobs: Sequence[Knob], peak_bytes: int) -> _Table:
    columns = [("one change", False), ("peak", True), ("bytes", True), ("step", True), ("", False)]
    rows = [
        (
            knob.what,
            format_bytes(knob.peak_bytes),
            changed(knob, peak_bytes),
            format_seconds(knob.step_seconds),
            knob.remark,
        )
        for knob in knobs
    ]
    return _Table(columns, rows)


def _or_empty(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else ""
