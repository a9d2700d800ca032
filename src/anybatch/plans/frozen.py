"""Frozen: the base class of all parts of a plan; how plans are read and their errors reported."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from anybatch.errors import InputError, shortened


class Frozen(BaseModel):
    """Immutable data without extra fields, implicit type conversion and infinite numbers."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False
    )


_MOST_FAULTS = 8
"""Maximum number of errors that are listed."""


def faults(error: ValidationError) -> str:
    """The errors in `error`, each with its location."""
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


def read(path: str | os.PathLike[str]) -> str:
    """The text of the file `path`. Raises `InputError` if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise InputError(
            f"the plan {path} cannot be read: {why}; give a file that 'anybatch plan --out' wrote."
        ) from None


def _integer(digits: str) -> int:
    """The integer in `digits`. Raises `ValueError` if it has more than 64 bits: sizes and counts are
    converted to floating point numbers, whose range it may exceed."""
    if len(digits) > 20 or abs(int(digits)) >= 2**64:
        raise ValueError(f"the number {shortened(digits, 40)} in it has more than 64 bits")
    return int(digits)


def current(text: str, version: int, source: str) -> str:
    """The plan in `text` without fields that earlier releases wrote and that are no longer read.

    Raises `InputError` unless `text` is a JSON object with this `version` of the format.
    """
    try:
        data = json.loads(text, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{source} is not JSON: {error.msg} at line {error.lineno}, column {error.colno};"
            " mend it there, or plan the task anew."
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source} cannot be read: {error}; plan the task anew.") from None
    if not isinstance(data, dict):
        raise InputError(
            f"{source} holds {type(data).__name__} where a plan (an object) belongs: give a"
            " file that 'anybatch plan --out' wrote."
        )
    if data.get("version") != version:
        raise InputError(
            f"{source} has version {data.get('version')!r}, and this anybatch reads version"
            f" {version}: plan the task anew with this anybatch."
        )
    data.pop("devices", None)
    if isinstance(data.get("exchange"), dict):
        data["exchange"].pop("powersgd_rank", None)
    if isinstance(data.get("kernels"), dict):
        data["kernels"].pop("compile_if_faster", None)
    return json.dumps(data)
