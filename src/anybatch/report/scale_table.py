"""The table of `anybatch scale`: a row for each number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from anybatch.insight.scaling import Scaled, efficiency, limit
from anybatch.report.terminal import bullets, pairs, print_section
from anybatch.units import format_count, format_seconds

MODEL = (
    "Predicted steps: computing + exchange + update of the plan for so many ranks; computing is"
    " corrected by what was measured, and the exchange is a ring all-reduce over the link that the plan"
    " names."
)


def print_scale(console: Console, rows: Sequence[Scaled], global_batch: int) -> None:
    """Print `rows`, what limits each of them, and how predictions were made."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for title in ("ranks", "step", "samples/s", "exchange", "efficiency", ""):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, _cells(row, rows, global_batch)))
    print_section(
        console, f"A global batch of {format_count(global_batch)} on several ranks", table
    )
    print_section(
        console, "Limited by", pairs([(str(row.ranks), limit(row, rows)) for row in rows])
    )
    if any(row.step_seconds and not row.is_measured for row in rows):
        print_section(console, "Notices", bullets([MODEL]))


def _cells(row: Scaled, rows: Sequence[Scaled], global_batch: int) -> tuple[str, ...]:
    if row.step_seconds is None:
        return (format_count(row.ranks), "", "", "", "", "not possible")
    share, part = row.exchange_share or 0.0, efficiency(row, rows)
    return (
        format_count(row.ranks),
        format_seconds(row.step_seconds),
        f"{global_batch / row.step_seconds:,.3g}",
        f"{share:.0%}" if row.ranks > 1 else "",
        "" if part is None else f"{part:.0%}",
        "measured" if row.is_measured else "predicted",
    )
