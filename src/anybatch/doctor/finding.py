"""Finding: one thing that was looked at, what it is, and if it is not as it should be, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Level: TypeAlias = Literal["ok", "note", "warning", "problem"]
"""`note`: worth knowing; `warning`: training goes on, but not as well or not as predicted; `problem`:
something does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found.

    Attributes:
        name: what was looked at.
        value: what it is.
        level: see `Level`.
        place: where the value stands, if that is not clear from the name.
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
