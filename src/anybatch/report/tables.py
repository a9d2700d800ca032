"""Sections of text, figures and tables, for a terminal or a page (see `page.py`).

In a terminal, sections are read at 80 columns, in logs and without color, so structure is expressed by
words, space and alignment, and color only repeats it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rich import box
from rich import table as rich_table
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.text import Text

from anybatch.report.plot import Figure

Content: TypeAlias = Literal["words", "number", "whole"]
"""Type of the content of a column; `"whole"`: words that are not wrapped."""

_INDENT = 2


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        columns: (title, content) pairs.
        omissible: titles of columns that a terminal too narrow for all of them omits, first to last.
    """

    columns: Sequence[tuple[str, Content]]
    rows: Sequence[Sequence[str]]
    omissible: Sequence[str] = ()

    def without(self, title: str) -> Table:
        """The table without one of its columns."""
        kept = [number for number, (name, _) in enumerate(self.columns) if name != title]
        rows = [[row[number] for number in kept] for row in self.rows]
        return Table([self.columns[number] for number in kept], rows)


class Tag(str):
    """A cell that a page shows in the colors of `state`: plain, good, warn or bad."""

    state: str

    def __new__(cls, text: str, state: str) -> Tag:
        tag = super().__new__(cls, text)
        tag.state = state
        return tag


@dataclass(frozen=True, slots=True)
class Section:
    """A section of a page or of terminal output. Its parts are shown in the order of the attributes; a
    section without any is omitted.

    Attributes:
        pairs: (what, how) lines.
        figures: shown only on a page.
        more: title and content of a collapsed table, expanded by a click on its title. Shown only on a
            page.
    """

    title: str
    sentences: Sequence[str] = ()
    pairs: Sequence[tuple[str, str]] = ()
    figures: Sequence[Figure] = ()
    table: Table | None = None
    more: tuple[str, Table] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        tables = (self.table, self.more[1] if self.more else None)
        has_rows = any(table is not None and table.rows for table in tables)
        return not (self.sentences or self.pairs or self.figures or has_rows)


def print_sections(console: Console, sections: Iterable[Section]) -> None:
    """Print `sections`, except for parts that only a page can show."""
    for section in sections:
        if section.is_empty:
            continue
        lines: RenderableType = _grid([("*", one) for one in section.sentences], "yellow", 1)
        if section.table is not None:  # which the sentences introduce
            lines = Group(*map(Text, section.sentences))
        body = Group(
            lines,
            _grid(section.pairs, "dim", 3),
            Group() if section.table is None else _fitting(section.table, console),
        )
        # A console without a width (a file, a pipe) has 80 columns.
        console.print(Text(section.title, "bold"), soft_wrap=True)
        console.print(_Trimmed(Padding(body, (0, 0, 0, _INDENT), expand=False)))
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


def _grid(lines: Iterable[tuple[str, str]], style: str, gap: int) -> rich_table.Table:
    table = rich_table.Table.grid(padding=(0, gap, 0, 0))
    table.add_column(style=style, no_wrap=True)
    table.add_column(overflow="fold")
    for what, how in lines:
        table.add_row(Text(what), Text(how))
    return table


def _fitting(table: Table, console: Console) -> rich_table.Table:
    """`table` without columns for which the console is too narrow."""
    unlimited = console.options.update(width=10_000)  # a measure is no larger than the width
    for title in table.omissible:
        least = Measurement.get(console, unlimited, _printed(table)).minimum
        if least + _INDENT <= console.width:
            break
        table = table.without(title)
    return _printed(table)


def _printed(table: Table) -> rich_table.Table:
    found = rich_table.Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False
    )
    for number, (title, content) in enumerate(table.columns):
        longest = max((len(row[number]) for row in table.rows), default=0)
        if content == "words":
            least = min(12 if number else 18, longest)  # the first column names the row
            found.add_column(title, overflow="fold", min_width=least, max_width=38)
        else:
            justify = "right" if content == "number" else "left"
            least = max(longest, len(title))
            found.add_column(title, justify=justify, no_wrap=True, min_width=least)
    for row in table.rows:
        found.add_row(*map(Text, row))
    return found
