"""A change of the global batch: each setting before and after, by which rule, from which source."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from anybatch.units import format_count

_WIDTH = 80


@dataclass(frozen=True, slots=True)
class Converted:
    """One setting of training.

    Attributes:
        name: as torch's optimizer calls it (`betas[0]` is the first of `betas`), `warmup_steps` or
            `steps`.
        before, after: at the two batches.
        rule: in words or as a formula; `k` is the new batch over the old one.
        source: of the rule; empty where it is arithmetic.
    """

    name: str
    before: float
    after: float
    rule: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class BatchChange:
    """What `rescale` returns. It prints as a table.

    Attributes:
        optimizer: `"SGD"`, `"Adam"` or `"AdamW"`.
        before, after: samples per step.
        rows: every setting, those that stay as they are too.
        limits: sentences that say where the rules end.
    """

    optimizer: str
    before: int
    after: int
    rows: tuple[Converted, ...]
    limits: tuple[str, ...]

    @property
    def times(self) -> float:
        """How many times as large the new batch is: `k` in the rules."""
        return self.after / self.before

    @property
    def settings(self) -> dict[str, Any]:
        """The converted settings of the optimizer, as its constructor in torch takes them."""
        found: dict[str, Any] = {row.name: row.after for row in self.rows}
        if "betas[0]" in found:
            found["betas"] = found.pop("betas[0]"), found.pop("betas[1]")
        return {name: value for name, value in found.items() if name not in _COUNTS}

    @property
    def warmup_steps(self) -> int | None:
        """Steps of warm-up at the new batch; None if those before were not given."""
        return self._count("warmup_steps")

    @property
    def steps(self) -> int | None:
        """Steps of training at the new batch; None if those before were not given."""
        return self._count("steps")

    def _count(self, name: str) -> int | None:
        return next((int(row.after) for row in self.rows if row.name == name), None)

    def __str__(self) -> str:
        sources = list(dict.fromkeys(row.source for row in self.rows if row.source))
        cells = [("setting", "before", "after", "rule")]
        for row in self.rows:
            note = f" [{sources.index(row.source) + 1}]" if row.source else ""
            cells.append((row.name, _figure(row.before), _figure(row.after), row.rule + note))
        widths = [max(len(line[i]) for line in cells) for i in range(3)]
        batches = f"from {format_count(self.before)} to {format_count(self.after)} samples per step"
        told = [f"{self.optimizer}, {batches} (k = {self.times:.6g})"]
        for name, before, after, rule in cells:
            start = f"  {name:<{widths[0]}}  {before:>{widths[1]}}  {after:>{widths[2]}}  "
            told += _wrapped(rule, start, " " * len(start))
        if self.limits:
            told += ["", "Limits"]
            told += [line for limit in self.limits for line in _wrapped(limit, "  * ", "    ")]
        if sources:
            told += ["", "Sources"]
            for number, source in enumerate(sources, start=1):
                told += _wrapped(source, f"  [{number}] ", "      ")
        return "\n".join(told)


_COUNTS = ("warmup_steps", "steps")


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=others)


def _figure(value: float) -> str:
    return format_count(value) if isinstance(value, int) else f"{value:.6g}"
