"""A ledger for the terminal: where each byte of a step goes, by layer, by kind and over time.

Read at 80 columns and through pipes: structure comes from words, space and block characters, which a
terminal without Unicode gets as plain ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from anybatch.plans import Plan
from anybatch.report.terminal import pairs, print_section
from anybatch.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from anybatch.estimate.ledger import Ledger, Moment
    from anybatch.planner.knobs import Knob

MAX_LAYERS = 40
"""Rows of the table of layers; of a model that has more, the largest."""

MAX_HELD = 12

_HEIGHT = 8
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_PLAIN = "  ..::###"


def print_ledger(console: Console, plan: Plan, ledger: Ledger, knobs: Sequence[Knob]) -> None:
    """Print `ledger`, made for `plan`, and what would shrink the peak."""
    print_section(console, f"Memory of a step of {plan.task.name}", pairs(_facts(plan, ledger)))
    print_section(console, "By layer", _layers(ledger))
    print_section(console, "At the peak, by kind", _kinds(ledger, _unicode(console)))
    if ledger.held:
        print_section(console, "At the peak, the largest", _held(ledger))
    width = max(24, min(console.width, 100) - 16)
    print_section(
        console, "Over one step", curve(ledger, width, plan.budget_bytes, _unicode(console))
    )
    if knobs:
        print_section(console, "What would shrink it", knobs_table(knobs, ledger.peak.num_bytes))


def knobs_table(knobs: Iterable[Knob], peak_bytes: int) -> Table:
    """What each knob buys, and its cost in time."""
    table = _table()
    table.add_column("one change", overflow="fold", min_width=18)
    for title in ("peak", "frees", "step"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for knob in knobs:
        freed = 1 - knob.peak_bytes / max(1, peak_bytes)
        table.add_row(
            Text(knob.what),
            format_bytes(knob.peak_bytes),
            f"{freed:.0%}",
            format_seconds(knob.step_seconds),
            Text(knob.remark, "dim"),
        )
    return table


def curve(ledger: Ledger, width: int, budget: int | None, unicode: bool = True) -> Table:
    """Bytes taken over one step, and the phases below: `width` characters wide."""
    moments = ledger.curve or (ledger.peak,)
    columns = _columns(moments, width)
    top = max(moment.num_bytes for moment in moments) or 1
    levels = [max(moment.num_bytes for moment in column) / top * _HEIGHT for column in columns]
    marks = _EIGHTHS if unicode else _PLAIN
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(justify="right", no_wrap=True, style="dim")
    table.add_column(no_wrap=True)
    for row in reversed(range(_HEIGHT)):
        line = "".join(marks[round(8 * min(1.0, max(0.0, level - row)))] for level in levels)
        label = format_bytes(top) if row == _HEIGHT - 1 else ""
        label = format_bytes(top / 2) if row == _HEIGHT // 2 - 1 else label
        table.add_row(label, Text(line.rstrip(), "cyan"))
    rule, names = _phases([column[0].phase for column in columns], unicode)
    table.add_row("0 B", Text(rule, "dim"))
    table.add_row("", Text(names, "dim"))
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


def _facts(plan: Plan, ledger: Ledger) -> list[tuple[str, str]]:
    peak = ledger.peak
    part = f" ({peak.num_bytes / plan.budget_bytes:.0%} of the budget)" if plan.budget_bytes else ""
    module = f" of {peak.module}" if peak.module else ""
    how = (
        f"{ledger.micro_batch:,} of {plan.task.global_batch:,} samples, {plan.choice.precision},"
        f" recompute {plan.choice.recompute.describe()}"
    )
    lines = [
        ("device", plan.device_name or plan.device),
        ("micro-batch", how),
        ("parameters", f"{ledger.num_parameters:,}"),
    ]
    if plan.budget_bytes:
        lines.append(("budget", format_bytes(plan.budget_bytes)))
    lines.append(("predicted peak", f"{format_bytes(peak.num_bytes)}{part}"))
    lines.append(("its moment", f"{peak.phase}{module}: {plain_name(peak.operation)}"))
    return lines


def _layers(ledger: Ledger) -> Table:
    shown = list(ledger.layers)
    if len(shown) > MAX_LAYERS:
        least = sorted(layer.total_bytes for layer in shown)[-MAX_LAYERS]
        shown = [layer for layer in shown if layer.total_bytes >= least][:MAX_LAYERS]
    table = _table()
    table.add_column("layer", overflow="fold", max_width=30)
    table.add_column("output", no_wrap=True)
    for title in ("parameters", "activations", "all bytes"):
        table.add_column(title, justify="right", no_wrap=True)
    for layer in shown:
        shape = "x".join(map(str, layer.output_shape)) if layer.output_shape else ""
        table.add_row(
            Text(layer.name),
            shape,
            f"{layer.num_parameters:,}" if layer.num_parameters else "",
            format_bytes(layer.activation_bytes) if layer.activation_bytes else "",
            format_bytes(layer.total_bytes),
        )
    hidden = len(ledger.layers) - len(shown)
    if hidden:
        rest = sum(layer.total_bytes for layer in ledger.layers)
        rest -= sum(layer.total_bytes for layer in shown)
        table.add_row(Text(f"{hidden} smaller ones", "dim"), "", "", "", format_bytes(rest))
    table.add_section()
    table.add_row(
        Text("all layers", "bold"),
        "",
        f"{ledger.num_parameters:,}",
        format_bytes(ledger.activation_bytes),
        format_bytes(sum(layer.total_bytes for layer in ledger.layers)),
    )
    return table


def _kinds(ledger: Ledger, unicode: bool) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    total = max(1, ledger.peak.num_bytes)
    full = "█" if unicode else "#"
    for kind, size in sorted(ledger.by_kind.items(), key=lambda item: -item[1]):
        if size:
            bar = full * max(1, round(24 * size / total))
            table.add_row(kind, format_bytes(size), f"{size / total:.0%}", Text(bar, "cyan"))
    return table


def _held(ledger: Ledger) -> Table:
    table = _table()
    table.add_column("kind", no_wrap=True)
    table.add_column("of", overflow="fold", max_width=34)
    table.add_column("tensors", justify="right", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    for holding in ledger.held[:MAX_HELD]:
        table.add_row(
            holding.kind,
            Text(holding.module or "-"),
            f"{holding.num_blocks:,}",
            format_bytes(holding.num_bytes),
        )
    return table


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)


def _unicode(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")
