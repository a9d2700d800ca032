"""Frozen: what all parts of a plan are, and how the faults of one that was read are told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError


class Frozen(BaseModel):
    """Plain data that does not change, takes no other fields, and converts nothing silently."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True)


def faults(error: ValidationError) -> str:
    """Every fault that `error` holds, each with its place."""
    return "; ".join(_fault(item) for item in error.errors())


def _fault(item: Mapping[str, Any]) -> str:
    place = ".".join(str(part) for part in item["loc"])
    message = str(item["msg"]).removeprefix("Value error, ")
    if not place:
        return message
    if item["type"] == "extra_forbidden":
        return f"{place} is not a field of a plan"
    if item["type"] == "missing":
        return f"{place} is missing"
    return f"{place} is {item['input']!r}: {message}"
