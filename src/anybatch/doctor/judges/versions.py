"""Versions, as far as they have to be compared."""

from __future__ import annotations

import re


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
