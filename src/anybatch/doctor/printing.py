"""Findings for the terminal: groups of rows, and below each that is not well what it means and what to
do. Levels are words, which colour only repeats."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from anybatch.doctor.examine import Report
from anybatch.doctor.finding import Finding, Level

_STYLES: dict[Level, str] = {
    "ok": "green",
    "note": "cyan",
    "warning": "yellow",
    "problem": "bold red",
}
_INDENT, _LEVEL_WIDTH, _NAME_WIDTH = 2, 9, 20


def print_findings(console: Console, report: Report) -> None:
    """Print `report` on `console`."""
    for group in report.groups:
        if not group.findings:
            continue
        console.print(Text(group.title, style="bold"))
        for finding in group.findings:
            for line in _lines(finding, console.width):
                console.print(line, soft_wrap=True)
        console.print()
    for line in _wrapped(_summary(report), console.width):
        console.print(line, soft_wrap=True)


def _lines(finding: Finding, width: int) -> Iterator[Text]:
    """A finding as lines of at most `width`."""
    value = f"{finding.value} ({finding.place})" if finding.place else finding.value
    if finding.remedy and not finding.meaning:
        value += f": {finding.remedy}"
    head = " " * _INDENT + f"{finding.level:<{_LEVEL_WIDTH}}{finding.name:<{_NAME_WIDTH - 1}} "
    hanging = " " * (_INDENT + _LEVEL_WIDTH + _NAME_WIDTH)
    first, *others = textwrap.wrap(
        head + value, width, subsequent_indent=hanging, break_on_hyphens=False
    )
    text = Text(first)
    text.stylize(_STYLES[finding.level], _INDENT, _INDENT + len(finding.level))
    yield text
    yield from map(Text, others)
    if finding.meaning:
        indent = " " * (_INDENT + _LEVEL_WIDTH)
        yield from map(Text, _wrapped(finding.sentence, width, indent))


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Lines of whole words: commands and paths can be copied."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _summary(report: Report) -> str:
    """`1 problem (driver), 2 warnings (cores, /dev/shm).`"""
    levels: tuple[Level, ...] = ("problem", "warning")
    parts = [
        f"{len(names)} {level}{'s' if len(names) > 1 else ''} ({', '.join(dict.fromkeys(names))})"
        for level in levels
        if (names := report.named(level))
    ]
    return f"{', '.join(parts)}." if parts else "No problem was found."
