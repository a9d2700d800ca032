"""Finding: one thing that was checked, its value, and if something is wrong with it, the remedy.
`Report`: all findings in groups, for the terminal and as JSON."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

Level: TypeAlias = Literal["ok", "note", "warning", "problem"]
"""`note`: worth knowing; `warning`: training goes on, but not as well or not as predicted; `problem`:
something does not work."""

Facts: TypeAlias = dict[str, Any]
"""What was seen, as plain values by subject; None where a subject could not be looked at."""

_STYLES: dict[Level, str] = {
    "ok": "green",
    "note": "cyan",
    "warning": "yellow",
    "problem": "bold red",
}
_INDENT, _LEVEL_WIDTH, _NAME_WIDTH = 2, 9, 20


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found.

    Attributes:
        name: what was checked.
        value: what it is.
        level: see `Level`.
        place: where the value comes from, if the name does not say so.
        meaning: what follows from it; empty where all is well.
        remedy: what to do; empty where there is nothing to do.
    """

    name: str
    value: str
    level: Level = "ok"
    place: str = ""
    meaning: str = ""
    remedy: str = ""

    @property
    def sentence(self) -> str:
        """Meaning and remedy; empty where there is neither."""
        text = ": ".join(filter(None, (self.meaning, self.remedy)))
        return f"{text[:1].upper()}{text[1:]}." if text else ""


def note(name: str, value: str, meaning: str, remedy: str = "", place: str = "") -> Finding:
    return Finding(name, value, "note", place, meaning, remedy)


def warning(name: str, value: str, meaning: str, remedy: str = "", place: str = "") -> Finding:
    return Finding(name, value, "warning", place, meaning, remedy)


def problem(name: str, value: str, meaning: str, remedy: str = "", place: str = "") -> Finding:
    return Finding(name, value, "problem", place, meaning, remedy)


@dataclass(frozen=True, slots=True)
class Report:
    """All findings, by the title of their group, and the facts behind them."""

    groups: dict[str, list[Finding]]
    facts: Facts

    def named(self, level: Level) -> list[str]:
        """The names of the findings of a level, in order."""
        return [one.name for group in self.groups.values() for one in group if one.level == level]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: the number of findings of each level, the findings, and the facts."""
        return {
            "counts": {level: len(self.named(level)) for level in reversed(_STYLES)},
            "findings": [
                {"group": title, **asdict(one)}
                for title, group in self.groups.items()
                for one in group
            ],
            "facts": self.facts,
        }

    def print(self, console: Console) -> None:
        """Print groups of rows, and below each row that is not well its meaning and remedy."""
        for title, findings in self.groups.items():
            if not findings:
                continue
            console.print(title, style="bold")
            for finding in findings:
                for line in _lines(finding, console.width):
                    console.print(line, soft_wrap=True)
            console.print()
        levels: tuple[Level, ...] = ("problem", "warning")
        parts = [
            f"{len(names)} {level}{'s' * (len(names) > 1)} ({', '.join(dict.fromkeys(names))})"
            for level in levels
            if (names := self.named(level))
        ]
        summary = f"{', '.join(parts)}." if parts else "No problem was found."
        for line in _wrapped(summary, console.width):
            console.print(line, soft_wrap=True)


def _lines(finding: Finding, width: int) -> Iterator[Text | str]:
    """A finding as lines of at most `width`."""
    from rich.text import Text

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
    yield from others
    if finding.meaning:
        yield from _wrapped(finding.sentence, width, " " * (_INDENT + _LEVEL_WIDTH))


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Lines of whole words, so that commands and paths can be copied."""
    wrapper = textwrap.TextWrapper(
        width, indent, indent, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(text)


# ------------------------------------------------------------------------------------------ versions


def numbers_of(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13, 0); empty where it does not begin with a number."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def is_before(version: str, other: str) -> bool:
    """Whether `version` is an earlier one, where both can be read."""
    one, two = numbers_of(version), numbers_of(other)
    length = max(len(one), len(two))
    padded = [numbers + (0,) * (length - len(numbers)) for numbers in (one, two)]
    return bool(one and two) and padded[0] < padded[1]


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
