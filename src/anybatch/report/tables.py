"""Sections of terminal output: a title, followed by a table, pairs of words, or sentences.

Sections are read at 80 columns, in logs and without color, so structure is expressed by words, space
and alignment, and color only repeats it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rich import box
from rich import table as rich_table
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.text import Text

Content: TypeAlias = Literal["words", "number", "whole"]
"""Type of the content of a column; `"whole"`: words that are not wrapped."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table. Each of `columns` is a (title, content) pair."""

    columns: Sequence[tuple[str, Content]]
    rows: Sequence[Sequence[str]]


def printed(table: Table) -> rich_table.Table:
    """Return `table` as a rich table for a terminal."""
    found = rich_table.Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False
    )
    for number, (title, content) in enumerate(table.columns):
        if content == "words":
            longest = max((len(row[number]) for row in table.rows), default=0)
            least = min(12 if number else 18, longest)  # the first column names the row
            found.add_column(title, overflow="fold", min_width=least, max_width=38)
        else:
            justify = "right" if content == "number" else "left"
            found.add_column(title, justify=justify, no_wrap=True)
    for row in table.rows:
        found.add_row(*map(Text, row))
    return found


def print_section(console: Console, title: str, body: RenderableType) -> None:
    # A console without a width (a file, a pipe) has 80 columns.
    console.print(Text(title, "bold"), soft_wrap=True)
    console.print(_Trimmed(Padding(body, (0, 0, 0, 2), expand=False)))
    console.print()


class _Trimmed:
    """A renderable with trailing blanks removed from its lines, so that it can be copied cleanly."""

    def __init__(self, body: RenderableType) -> None:
        self._body = body

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in console.render_lines(self._body, options, pad=False):
            while line and not line[-1].text.rstrip():
                line.pop()
            if line:
                last = line.pop()
                line.append(Segment(last.text.rstrip(), last.style, last.control))
            yield from line
            yield Segment.line()


def pairs(lines: Iterable[tuple[str, str]]) -> rich_table.Table:
    table = rich_table.Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for what, how in lines:
        table.add_row(Text(what), Text(how))
    return table


def bullets(sentences: Iterable[str]) -> rich_table.Table:
    table = rich_table.Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="yellow", no_wrap=True)
    table.add_column(overflow="fold")
    for sentence in sentences:
        table.add_row("*", Text(sentence))
    return table
