"""A ledger for the terminal: where each byte of a step goes, by layer, by kind and over time.

Read at 80 columns and through pipes: structure comes from words, space and block characters, which a
terminal without Unicode gets as plain ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from anybatch.plans import Plan
from anybatch.report.layers import PARTS, Row, every_row, rows_of, total_row
from anybatch.report.terminal import bullets, pairs, print_section
from anybatch.report.totals import totals_of
from anybatch.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from anybatch.estimate.ledger import Holding, Ledger, Moment
    from anybatch.planner.knobs import Knob

MAX_HELD = 12
_NARROW, _WIDE = 76, 112
_LEAST_FREED = 0.05
"""Of the peak; less is not worth a word."""

_TOLD_ANEW = ("predicted peak", "predicted step", "timing")

_HEIGHT = 8
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_PLAIN = "  ..::###"


def print_ledger(
    console: Console,
    plan: Plan,
    ledger: Ledger,
    knobs: Sequence[Knob],
    in_use: Sequence[Knob] = (),
    depth: int | None = None,
    every_layer: bool = False,
) -> None:
    """Print `ledger`, made for `plan`, what would shrink the peak, and what shrinks it already.

    Layers are unfolded to `depth` levels (None: as far as a page of rows goes), or all of them are
    listed, `every_layer`.
    """
    rows = every_row(ledger) if every_layer else rows_of(ledger, depth)
    layers = _layers(rows, total_row(ledger), console.width)
    unicode = _unicode(console)
    print_section(
        console, f"Memory of a step of {plan.task.name}", pairs(assumptions(plan, ledger))
    )
    print_section(console, "Most bytes at any time", _totals(plan, ledger))
    print_section(console, "By layer", layers)
    print_section(console, "When most is in use, by kind", _kinds(ledger, console.width, unicode))
    if ledger.held:
        print_section(console, "When most is in use, the largest", _held(ledger))
    width = max(24, min(console.width, 100) - 16)
    print_section(console, "Over one step", curve(ledger, width, plan.budget_bytes, unicode))
    if knobs:
        print_section(console, "What would shrink it", knobs_table(knobs, ledger.num_bytes))
    if in_use:
        print_section(console, "In use, and what it saves", knobs_table(in_use, ledger.num_bytes))
    if advice := loss_advice(ledger):
        print_section(console, "What the loss takes", bullets([advice]))
    if plan.notices:
        print_section(console, "Notices", bullets(plan.notices))
    print_section(console, "How it was found", bullets([ledger.method, *ledger.not_counted]))


def knobs_table(knobs: Iterable[Knob], peak_bytes: int) -> Table:
    """The peak and the step with each knob turned, beside a peak that is `peak_bytes` as it is."""
    table = _table()
    table.add_column("one change", overflow="fold", min_width=18)
    for title in ("peak", "bytes", "step"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for knob in knobs:
        table.add_row(
            Text(knob.what),
            format_bytes(knob.peak_bytes),
            changed(knob, peak_bytes),
            format_seconds(knob.step_seconds),
            Text(knob.remark, "dim"),
        )
    return table


def changed(knob: Knob, peak_bytes: int) -> str:
    """What a knob makes of a peak of `peak_bytes`, in percent of it."""
    return f"{knob.peak_bytes / max(1, peak_bytes) - 1:+.0%}"


def curve(ledger: Ledger, width: int, budget: int | None, unicode: bool = True) -> Table:
    """Bytes in use over one step, what the allocator holds above them, and the phases below: `width`
    characters wide."""
    moments = ledger.curve or (ledger.peak,)
    columns = _columns(moments, width)
    top = max(moment.num_bytes for moment in moments) or 1
    in_use = [max(moment.used_bytes for moment in column) / top * _HEIGHT for column in columns]
    held = [max(moment.num_bytes for moment in column) / top * _HEIGHT for column in columns]
    marks, line = (_EIGHTHS, "─") if unicode else (_PLAIN, "-")
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(justify="right", no_wrap=True, style="dim")
    table.add_column(no_wrap=True)
    for row in reversed(range(_HEIGHT)):
        text = Text()
        for used, taken in zip(in_use, held, strict=True):
            filled = marks[round(8 * min(1.0, max(0.0, used - row)))]
            if filled == " " and row < taken <= row + 1:
                text.append(line, "dim")
            else:
                text.append(filled, "cyan")
        text.rstrip()
        label = format_bytes(top) if row == _HEIGHT - 1 else ""
        label = format_bytes(top / 2) if row == _HEIGHT // 2 - 1 else label
        table.add_row(label, text)
    rule, names = _phases([column[0].phase for column in columns], unicode)
    table.add_row("0 B", Text(rule, "dim"))
    table.add_row("", Text(names, "dim"))
    table.add_row("", Text(f"{marks[-1]} in use   {line} held by the allocator", "dim"))
    if budget:
        table.add_row("", Text(f"budget {format_bytes(budget)}", "dim"))
    return table


def plain_name(operation: str) -> str:
    """An operation's name without library and overload: `aten.addmm.default` is `addmm`."""
    return operation.removeprefix("aten.").removesuffix(".default")


def _columns(moments: Sequence[Moment], width: int) -> list[list[Moment]]:
    """The moments in `width` columns at most, none empty."""
    count = min(width, len(moments))
    edges = [len(moments) * i // count for i in range(count + 1)]
    columns = [list(moments[low:high]) for low, high in pairwise(edges)]
    if count and width >= 2 * count:  # few operations: each as wide as fits
        times = width // count
        return [column for column in columns for _ in range(times)]
    return columns


def _phases(phases: Sequence[str], unicode: bool) -> tuple[str, str]:
    """A rule with a tick where each phase begins, and their names where they have room."""
    starts = [i for i, phase in enumerate(phases) if i == 0 or phase != phases[i - 1]]
    line, tick = ("─", "┴") if unicode else ("-", "+")
    rule = "".join(tick if i in starts else line for i in range(len(phases)))
    names = [" "] * (len(phases) + 12)
    for number, start in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else len(names)
        name = phases[start]
        if len(name) < end - start:
            names[start : start + len(name)] = name
    return rule, "".join(names).rstrip()


def assumptions(plan: Plan, ledger: Ledger) -> list[tuple[str, str]]:
    """(what, how) lines: the plan whose memory is told, without the figures that are told anew."""
    lines = [line for line in plan.explain() if line[0] not in _TOLD_ANEW]
    part = (
        f" ({ledger.num_bytes / plan.budget_bytes:.0%} of the budget)" if plan.budget_bytes else ""
    )
    return [
        *lines,
        ("parameters", f"{ledger.num_parameters:,}"),
        ("predicted peak", f"{format_bytes(ledger.num_bytes)}{part}"),
        ("most in use", where(ledger.peak)),
    ]


def loss_advice(ledger: Ledger) -> str:
    """What the loss in chunks would free; empty where that is not worth a word."""
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


def where(moment: Moment) -> str:
    """The place of a moment in a step: `backward of blocks.3: addmm`."""
    is_plain = not moment.module or moment.module.endswith(moment.phase)
    phase = moment.phase if is_plain else f"{moment.phase} of {moment.module}"
    return f"{phase}: {plain_name(moment.operation)}" if moment.operation else phase


def _totals(plan: Plan, ledger: Ledger) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for total in totals_of(plan.device, ledger.totals):
        table.add_row(total.name, format_bytes(total.predicted or 0), Text(total.meaning, "dim"))
    return table


def _layers(rows: Sequence[Row], total: Row, width: int) -> Table:
    """Columns are left out where the terminal is too narrow for them."""
    parts = [
        (title, (lambda row, i=i: row.sizes[i]))
        for i, (title, _) in enumerate(PARTS)
        if total.sizes[i]
    ]
    if width < _NARROW:
        parts = [part for part in parts if part[0] == "activations"]
    table = _table()
    table.add_column("layer", overflow="fold", max_width=38)
    if width >= _WIDE:
        table.add_column("type", no_wrap=True)
        table.add_column("output", no_wrap=True)
    for title, _ in parts:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("all", justify="right", no_wrap=True)
    for row in (*rows, total):
        if row is total:
            table.add_section()
        texts = [
            Text("  " * row.depth + row.name, "bold" if row is total else ""),
            *([row.type_name, row.output] if width >= _WIDE else ()),
            *(_or_empty(size(row)) for _, size in parts),
            format_bytes(row.total_bytes),
        ]
        table.add_row(*texts, style="dim" if row.is_part else "")
    return table


def _or_empty(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else ""


def _kinds(ledger: Ledger, width: int, unicode: bool) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    total = max(1, ledger.num_bytes)
    most = max(1, min(24, width - 54))
    full = "█" if unicode else "#"
    for kind, size in sorted(ledger.by_kind.items(), key=lambda item: -item[1]):
        if size:
            bar = full * max(1, round(most * size / total))
            table.add_row(kind, format_bytes(size), f"{size / total:.0%}", Text(bar, "cyan"))
    return table


def _held(ledger: Ledger) -> Table:
    table = _table()
    table.add_column("kind", no_wrap=True)
    table.add_column("of", overflow="fold", max_width=34)
    table.add_column("tensors", justify="right", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    for holding in _together(ledger.held)[:MAX_HELD]:
        table.add_row(
            holding.kind,
            Text(holding.module or "-"),
            f"{holding.num_blocks:,}",
            format_bytes(holding.num_bytes),
        )
    return table


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


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)


def _unicode(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")
