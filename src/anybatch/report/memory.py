"""A ledger as sections of text and tables: printed to a terminal here, made a page by `memory_page`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Literal, TypeAlias

from rich import box
from rich import table as rich_table
from rich.console import Console, Group
from rich.text import Text

from anybatch.plans import Plan
from anybatch.report.figures import Figure
from anybatch.report.layers import PARTS, Row, every_row, rows_of, total_row
from anybatch.report.terminal import bullets, pairs, print_section
from anybatch.report.totals import totals_of
from anybatch.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from anybatch.estimate.ledger import Holding, Ledger, Moment
    from anybatch.planner.knobs import Knob

OVER_TIME, BY_KIND, BY_LAYER = "Over one step", "When most is in use, by kind", "By layer"
"""Titles of the sections to which a page adds a figure."""

_MAX_HELD = 12
_NARROW, _WIDE = 76, 112
"""Columns of a terminal that has room for all parts of a layer, and for its type and output."""

_LEAST_FREED = 0.05
"""Part of the peak below which a saving is not mentioned."""

_STATED_BELOW = ("predicted peak", "predicted step", "timing")

Content: TypeAlias = Literal["words", "number", "whole"]
"""Of a column; `"whole"`: words that are not broken into lines."""


@dataclass(frozen=True, slots=True)
class Table:
    """`columns` are (title, content)."""

    columns: Sequence[tuple[str, Content]]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Section:
    """Part of a page or of what a terminal shows.

    Attributes:
        sentences: above the table.
        figures: on a page.
        more: a table that is opened by a click on its title, on a page.
    """

    title: str
    sentences: Sequence[str] = ()
    table: Table | None = None
    figures: Sequence[Figure] = ()
    more: tuple[str, Table] | None = None


def print_ledger(
    console: Console,
    plan: Plan,
    ledger: Ledger,
    knobs: Sequence[Knob],
    depth: int | None = None,
    every_layer: bool = False,
) -> None:
    """Print `ledger`, made for `plan`, and what would shrink the peak.

    Layers are unfolded to `depth` levels (None: as far as a page of rows goes), or all of them are
    listed, `every_layer`.
    """
    rows = every_row(ledger) if every_layer else rows_of(ledger, depth)
    for section in sections_of(plan, ledger, knobs, layers(rows, ledger, console.width)):
        parts = [bullets(section.sentences)] if section.sentences else []
        if section.table is not None:
            parts.append(_printed(section.table))
        print_section(console, section.title, Group(*parts))


def _printed(table: Table) -> rich_table.Table:
    if not any(title for title, _ in table.columns):
        return pairs((row[0], row[1]) for row in table.rows)
    printed = rich_table.Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False
    )
    for number, (title, content) in enumerate(table.columns):
        if content == "words":
            longest = max((len(row[number]) for row in table.rows), default=0)
            printed.add_column(title, overflow="fold", min_width=min(18, longest), max_width=38)
        else:
            justify = "right" if content == "number" else "left"
            printed.add_column(title, justify=justify, no_wrap=True)
    for row in table.rows:
        printed.add_row(*map(Text, row))
    return printed


def sections_of(
    plan: Plan, ledger: Ledger, knobs: Sequence[Knob], by_layer: Table
) -> list[Section]:
    """All that is known of `ledger`; `by_layer` has its layers."""
    sections = [
        Section(f"Memory of a step of {plan.task.name}", table=_assumptions(plan, ledger)),
        Section("Most bytes at any time", table=_totals(plan, ledger)),
        Section(BY_LAYER, table=by_layer),
        Section(BY_KIND, table=_kinds(ledger)),
    ]
    if ledger.held:
        sections.append(Section("When most is in use, the largest", table=_held(ledger.held)))
    most = [f"Most is in use in {where(ledger.peak)}."]
    sections.append(Section(OVER_TIME, most, _phases(ledger)))
    if knobs:
        sections.append(Section("What would shrink it", table=_knobs(knobs, ledger.num_bytes)))
    if advice := _loss_advice(ledger):
        sections.append(Section("What the loss takes", [advice]))
    if plan.notices:
        sections.append(Section("Notices", plan.notices))
    return [*sections, Section("How it was found", [ledger.method, *ledger.not_counted])]


def where(moment: Moment) -> str:
    """The place of a moment in a step: `backward of blocks.3: addmm`."""
    is_plain = not moment.module or moment.module.endswith(moment.phase)
    phase = moment.phase if is_plain else f"{moment.phase} of {moment.module}"
    operation = moment.operation.removeprefix("aten.").removesuffix(".default")
    return f"{phase}: {operation}" if operation else phase


# ---------------------------------------------------------------------------------------- tables


def _assumptions(plan: Plan, ledger: Ledger) -> Table:
    """The plan, without the figures that are stated below."""
    budget = plan.budget_bytes
    part = f" ({ledger.num_bytes / budget:.0%} of {format_bytes(budget)})" if budget else ""
    rows = [line for line in plan.explain() if line[0] not in _STATED_BELOW]
    rows += [
        ("parameters", f"{ledger.num_parameters:,}"),
        ("predicted peak", f"{format_bytes(ledger.num_bytes)}{part}"),
    ]
    return Table([("", "whole"), ("", "words")], rows)


def _totals(plan: Plan, ledger: Ledger) -> Table:
    rows = [
        (total.name, format_bytes(total.predicted or 0), total.meaning)
        for total in totals_of(plan.device, ledger.totals)
    ]
    return Table([("account", "whole"), ("predicted", "number"), ("what it counts", "words")], rows)


def layers(rows: Sequence[Row], ledger: Ledger, width: int | None = None) -> Table:
    """`rows` and their total; fewer columns in a terminal that has only `width`."""
    total = total_row(ledger)
    is_wide = width is None or width >= _WIDE
    parts = [(title, i) for i, (title, _) in enumerate(PARTS) if total.sizes[i]]
    if width is not None and width < _NARROW:
        parts = [part for part in parts if part[0] == "activations"]
    columns: list[tuple[str, Content]] = [("layer", "words")]
    if is_wide:
        columns.extend([("type", "words"), ("output", "whole")])
    columns.extend((title, "number") for title in (*(title for title, _ in parts), "all"))
    cells = [
        [
            "  " * row.depth + row.name,
            *((row.type_name, row.output) if is_wide else ()),
            *(_or_empty(row.sizes[i]) for _, i in parts),
            format_bytes(row.total_bytes),
        ]
        for row in (*rows, total)
    ]
    return Table(columns, cells)


def _or_empty(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else ""


def _kinds(ledger: Ledger) -> Table:
    total = max(1, ledger.num_bytes)
    rows = [
        (kind, format_bytes(size), f"{size / total:.0%}")
        for kind, size in sorted(ledger.by_kind.items(), key=lambda item: -item[1])
        if size
    ]
    return Table([("kind", "whole"), ("bytes", "number"), ("share", "number")], rows)


def _held(held: Sequence[Holding]) -> Table:
    rows = [
        (one.kind, one.module or "-", f"{one.num_blocks:,}", format_bytes(one.num_bytes))
        for one in _together(held)[:_MAX_HELD]
    ]
    return Table(
        [("kind", "whole"), ("of", "words"), ("tensors", "number"), ("bytes", "number")], rows
    )


def _together(held: Sequence[Holding]) -> list[Holding]:
    """What alike layers hold in one line, the largest first: `blocks.*.up (12 alike)`."""
    alike: dict[tuple[str, str, int, int], list[Holding]] = {}
    for one in held:
        name = re.sub(r"(?<![^.])\d+(?![^.])", "*", one.module)
        alike.setdefault((one.kind, name, one.num_bytes, one.num_blocks), []).append(one)
    lines = [
        ones[0]
        if len(ones) == 1
        else replace(
            ones[0],
            module=f"{name} ({len(ones)} alike)",
            num_bytes=num_bytes * len(ones),
            num_blocks=num_blocks * len(ones),
        )
        for (_, name, num_bytes, num_blocks), ones in alike.items()
    ]
    return sorted(lines, key=lambda line: -line.num_bytes)


def _phases(ledger: Ledger) -> Table:
    """The most bytes in use, and held by the allocator, in each phase of a step."""
    moments = ledger.curve or (ledger.peak,)
    rows: list[tuple[str, str, str]] = []
    for phase, run in groupby(moments, key=lambda moment: moment.phase):
        found = list(run)
        used = max(moment.used_bytes for moment in found)
        rows.append((phase, format_bytes(used), format_bytes(max(m.num_bytes for m in found))))
    return Table([("phase", "whole"), ("in use", "number"), ("held", "number")], rows)


def _knobs(knobs: Iterable[Knob], peak_bytes: int) -> Table:
    """The peak and the step with each knob turned, where the peak is `peak_bytes` as it is."""
    rows = [
        (
            knob.what,
            format_bytes(knob.peak_bytes),
            f"{knob.peak_bytes / max(1, peak_bytes) - 1:+.0%}",
            format_seconds(knob.step_seconds),
            knob.remark,
        )
        for knob in knobs
    ]
    numbers: list[tuple[str, Content]] = [(it, "number") for it in ("peak", "bytes", "step")]
    return Table([("one change", "words"), *numbers, ("", "words")], rows)


def _loss_advice(ledger: Ledger) -> str:
    """What the loss in chunks would free; empty if that is little."""
    if ledger.loss_in_chunks is None:
        return ""
    freed = ledger.num_bytes - ledger.loss_in_chunks
    if freed < _LEAST_FREED * ledger.num_bytes:
        return ""
    part = ledger.by_kind.get("loss and logits", 0) / max(1, ledger.num_bytes)
    return (
        f"Loss and logits are {part:.0%} of the peak. With the loss in chunks (--chunked-loss) the"
        f" peak is {format_bytes(ledger.loss_in_chunks)}: {format_bytes(freed)} less."
    )
