"""Ranges of a recipe's options: every option out of range is named in one error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from anybatch.errors import InputError


class Range(NamedTuple):
    """Values that an option may have, in words and as a test."""

    words: str
    has: Callable[[Any], bool]


ABOVE_ZERO = Range("a number above zero", lambda value: 0 < value < math.inf)
AT_LEAST_ZERO = Range("a number of at least zero", lambda value: 0 <= value < math.inf)
COUNT = Range("a whole number of at least 1", lambda value: value >= 1)
PART = Range("a number from 0 up to, not including, 1", lambda value: 0 <= value < 1)


def check(recipe: str, options: dict[str, tuple[Any, Range]], more: Iterable[str] = ()) -> None:
    """Raises `InputError` naming every one of `options` that is out of its range (None is in any), and
    the faults in `more`."""
    faults = [
        f"{name} is {value!r}; give {allowed.words}"
        for name, (value, allowed) in options.items()
        if value is not None and not allowed.has(value)
    ]
    if faults := [*faults, *more]:
        raise InputError(f"the recipe {recipe!r} cannot be made: {'; '.join(faults)}.")
