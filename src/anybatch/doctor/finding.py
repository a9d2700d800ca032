"""The results of the checks. `Finding`: one checked item, its value and, if something is wrong, the
remedy. `Report`: all findings in groups, for the terminal and as JSON."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console

Level: TypeAlias = Literal["ok", "note", "warning", "problem"]
"""`note`: worth knowing; `warning`: training works, but not as well or not as predicted; `problem`:
something does not work."""

_STYLES: dict[Level, str] = {
    "ok": "green",
    "note": "cyan",
    "warning": "yellow",
    "problem": "bold red",
}
_MEANING_INDENT, _VALUE_INDENT = 11, 31


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of checking one item.

    Attributes:
        name: name of the checked item.
        value: its value.
        level: severity, see `Level`.
        meaning: consequence of the value; empty if nothing is wrong.
        remedy: how to fix it; empty if there is nothing to do.
        place: source of the value, if not clear from the name.
    """

    name: str
    value: str
    level: Level = "ok"
    meaning: str = ""
    remedy: str = ""
    place: str = ""

    @property
    def sentence(self) -> str:
        """Meaning and remedy as a sentence; empty if there is neither."""
        text = ": ".join(filter(None, (self.meaning, self.remedy)))
        return f"{text[:1].upper()}{text[1:]}." if text else ""


@dataclass(frozen=True, slots=True)
class Report:
    """All findings, by the title of their group."""

    groups: dict[str, list[Finding]]

    def named(self, level: Level) -> list[str]:
        """The names of the findings with this level, in order."""
        return [one.name for group in self.groups.values() for one in group if one.level == level]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data: the number of findings of each level, and the findings."""
        return {
            "counts": {level: len(self.named(level)) for level in reversed(_STYLES)},
            "findings": [
                {"group": title, **asdict(one)}
                for title, group in self.groups.items()
                for one in group
            ],
        }

    def print(self, console: Console) -> None:
        """Print the findings in groups, one row each, with meaning and remedy below the row if there is
        a meaning."""
        for title, findings in self.groups.items():
            if findings:
                console.print(title, style="bold")
                for finding in findings:
                    _print(finding, console)
                console.print()
        levels: tuple[Level, ...] = ("problem", "warning")
        parts = [
            f"{len(names)} {level}{'s' * (len(names) > 1)} ({', '.join(dict.fromkeys(names))})"
            for level in levels
            if (names := self.named(level))
        ]
        summary = f"{', '.join(parts)}." if parts else "No problem was found."
        console.print("\n".join(_wrapped(summary, console.width)), soft_wrap=True)


def _print(finding: Finding, console: Console) -> None:
    from rich.text import Text

    value = f"{finding.value} ({finding.place})" if finding.place else finding.value
    if finding.remedy and not finding.meaning:
        value += f": {finding.remedy}"
    row = f"  {finding.level:<9}{finding.name:<19} {value}"
    hanging = " " * _VALUE_INDENT
    lines = textwrap.wrap(row, console.width, subsequent_indent=hanging, break_on_hyphens=False)
    if finding.meaning:
        lines += _wrapped(finding.sentence, console.width, " " * _MEANING_INDENT)
    text = Text("\n".join(lines))
    text.stylize(_STYLES[finding.level], 2, 2 + len(finding.level))
    console.print(text, soft_wrap=True)


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Wrap `text` without breaking words, so that commands and paths can be copied."""
    return textwrap.wrap(
        *(text, width),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
