"""A ledger as sections of text and tables. Printed to a terminal by this module, and rendered as an
HTML page by `memory_page`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console

from anybatch.plans import Plan
from anybatch.report.layers import PARTS, Row, every_row, numbered, rows_of, total_row
from anybatch.report.plot import Figure
from anybatch.report.tables import Content, Section, Table, print_sections
from anybatch.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from anybatch.estimate.ledger import Holding, Ledger, Moment
    from anybatch.planner.knobs import Knob

_MAX_HELD = 12
_OMISSIBLE = "type", "output", "buffers", "optimizer", "gradients", "parameters"

_STATED_BELOW = ("predicted peak", "predicted step", "timing")

_ACCOUNTS = {
    "cuda": {
        "allocated": "in tensors: torch.cuda.max_memory_allocated()",
        "active": 'torch.cuda.memory_stats()["active_bytes.all.peak"]',
        "reserved": "with the allocator's cache: torch.cuda.max_memory_reserved()",
        "total": "with context and libraries: nvidia-smi; the budget is of this",
    },
    "cpu": {
        "allocated": "in tensors and in kernels' scratch",
        "reserved": "as allocated: what malloc adds is not predicted",
        "total": "resident, beyond what the process had; the budget is of this",
    },
}
"""Description of what each memory account counts, by type of device."""


def print_ledger(
    console: Console,
    plan: Plan,
    ledger: Ledger,
    knobs: Sequence[Knob],
    depth: int | None = None,
    every_layer: bool = False,
) -> None:
    """Print `ledger`, computed for `plan`, and the memory-saving measures `knobs`.

    Layers are expanded to `depth` levels (None: as many as fit in `layers.ROWS` rows). If
    `every_layer`, all layers are listed instead.
    """
    rows = every_row(ledger) if every_layer else rows_of(ledger, depth)
    print_sections(console, sections_of(plan, ledger, knobs, layers(rows, ledger)))


def sections_of(
    plan: Plan,
    ledger: Ledger,
    knobs: Sequence[Knob],
    by_layer: Table,
    every_layer: tuple[str, Table] | None = None,
    over_time: Sequence[Figure] = (),
) -> list[Section]:
    """All sections about `ledger`. `by_layer` is the table of its layers; `every_layer`, a titled table
    of all of them, and the figure `over_time` are shown only on a page."""
    most = f"Most is in use in {where(ledger.peak)}."
    return [
        Section(f"Memory of a step of {plan.task.name}", pairs=_assumptions(plan, ledger)),
        Section("Most bytes at any time", table=_totals(plan, ledger)),
        Section("By layer", table=by_layer, more=every_layer),
        Section("When most is in use, by kind", table=_kinds(ledger)),
        Section("When most is in use, the largest", table=_held(ledger.held)),
        Section("Over one step", [most], figures=over_time, table=_phases(ledger)),
        Section("What would shrink it", table=_knobs(knobs, ledger.num_bytes)),
        Section("Notices", plan.notices),
        Section("How it was found", [ledger.method, *ledger.not_counted]),
    ]


def where(moment: Moment) -> str:
    """The position of a moment in a step, in words: `backward of blocks.3: addmm`."""
    is_plain = not moment.module or moment.module.endswith(moment.phase)
    phase = moment.phase if is_plain else f"{moment.phase} of {moment.module}"
    operation = moment.operation.removeprefix("aten.").removesuffix(".default")
    return f"{phase}: {operation}" if operation else phase


# ---------------------------------------------------------------------------------------- tables


def _assumptions(plan: Plan, ledger: Ledger) -> list[tuple[str, str]]:
    """The lines of the plan, without the figures that are shown in later sections."""
    budget = plan.budget_bytes
    part = f" ({ledger.num_bytes / budget:.0%} of {format_bytes(budget)})" if budget else ""
    return [
        *(line for line in plan.explain() if line[0] not in _STATED_BELOW),
        ("parameters", f"{ledger.num_parameters:,}"),
        ("predicted peak", f"{format_bytes(ledger.num_bytes)}{part}"),
    ]


def _totals(plan: Plan, ledger: Ledger) -> Table:
    accounts = _ACCOUNTS.get(plan.device.partition(":")[0], {})
    rows = [
        (name, format_bytes(ledger.totals[name]), meaning)
        for name, meaning in accounts.items()
        if name in ledger.totals
    ]
    return Table([("account", "whole"), ("predicted", "number"), ("what it counts", "words")], rows)


def layers(rows: Sequence[Row], ledger: Ledger) -> Table:
    """A table of `rows` and the total of all layers."""
    total = total_row(ledger)
    parts = [(title, i) for i, (title, _) in enumerate(PARTS) if total.sizes[i]]
    columns: list[tuple[str, Content]] = [
        ("layer", "words"),
        ("type", "words"),
        ("output", "whole"),
    ]
    columns.extend((title, "number") for title in (*(title for title, _ in parts), "all"))
    cells = [
        [
            "  " * row.depth + row.name,
            row.type_name,
            row.output,
            *(format_bytes(size) if (size := row.sizes[i]) else "" for _, i in parts),
            format_bytes(row.total_bytes),
        ]
        for row in (*rows, total)
    ]
    return Table(columns, cells, _OMISSIBLE)


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
    """Holdings, with those of alike layers merged, largest first: `blocks.*.up (12 alike)`."""
    alike: dict[tuple[str, str, int, int], list[Holding]] = {}
    for one in held:
        name = numbered(one.module)
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
    """A table of the maximum bytes in use, and held by the allocator, in each phase of a step."""
    moments = ledger.curve or (ledger.peak,)
    rows: list[tuple[str, str, str]] = []
    for phase, run in groupby(moments, key=lambda moment: moment.phase):
        found = list(run)
        used = max(moment.used_bytes for moment in found)
        rows.append((phase, format_bytes(used), format_bytes(max(m.num_bytes for m in found))))
    return Table([("phase", "whole"), ("in use", "number"), ("held", "number")], rows)


def _knobs(knobs: Iterable[Knob], peak_bytes: int) -> Table:
    """A table of the predicted peak and step time with each knob alone. `peak_bytes` is the peak
    without any."""
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
