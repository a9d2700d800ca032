"""Frozen: what all parts of a plan are, and how the faults of one that was read are told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from anybatch.errors import shortened


class Frozen(BaseModel):
    """Plain data that does not change, takes no other fields, and converts nothing silently."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True)


_MOST_FAULTS = 8
"""As many are listed."""


def faults(error: ValidationError) -> str:
    """Every fault that `error` holds, each with its place."""
    found = [_fault(item) for item in error.errors()]
    more = [f"and {len(found) - _MOST_FAULTS:,} more"] if len(found) > _MOST_FAULTS else []
    return "; ".join([*found[:_MOST_FAULTS], *more])


def _fault(item: Mapping[str, Any]) -> str:
    place = shortened(".".join(str(part) for part in item["loc"]))
    message = shortened(str(item["msg"]).removeprefix("Value error, "), 500)
    if not place:
        return message
    if item["type"] == "extra_forbidden":
        return f"{place} is not a field of a plan"
    if item["type"] == "missing":
        return f"{place} is missing"
    return f"{place} is {shortened(repr(item['input']))}: {message}"
