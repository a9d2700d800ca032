"""Bytes, seconds and counts: parsing of user input, and formatting for display.

Sizes follow the standard prefixes: KiB, MiB, GiB, TiB are powers of 1024; kB, MB, GB, TB are powers of
1000. A bare K, M, G or T means the power of 1024, as in tools that report device memory.
"""

from __future__ import annotations

import math
import re

from anybatch.errors import InputError, setting

_BINARY = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"\s*(?P<number>[0-9]*\.?[0-9]+(?:[eE][0-9]+)?)\s*(?P<unit>[A-Za-z]*)\s*")


def parse_bytes(text: str | int | float, name: str = "memory") -> int:
    """The number of bytes written as `text`: `"10GiB"`, `"1.5 GB"`, `"512M"` or a plain number.

    Raises `InputError` naming `name` and the value if it is not a size above zero.
    """
    remedy = "write a size above zero such as 512MiB, 10GiB or 24GB"
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise InputError(f"{setting(name)} is {text!r}, which is not a size: {remedy}.")
    if isinstance(text, int | float):
        number, factor = float(text), 1
    else:
        match = _SIZE.fullmatch(text)
        factor = _factor(match["unit"]) if match else None
        if match is None or factor is None:
            raise InputError(f"{setting(name)} is {text!r}, which is not a size: {remedy}.")
        number = float(match["number"])
    if not math.isfinite(number) or number * factor < 1:
        raise InputError(f"{setting(name)} is {text!r}, which leaves no room at all: {remedy}.")
    return int(number * factor)


def _factor(unit: str) -> int | None:
    letters = unit.upper()
    if letters in ("", "B"):
        return 1
    if letters[0] in _BINARY and letters[1:] in ("", "IB"):
        return _BINARY[letters[0]]
    if letters[0] in _DECIMAL and letters[1:] == "B":
        return _DECIMAL[letters[0]]
    return None


def check_count(value: object, name: str, least: int = 1) -> None:
    """Raises `InputError` unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{setting(name)} is {value!r}: give a whole number of at least {least}.")


def parse_count(text: str, name: str) -> int:
    """The whole number written as `text`: `"4096"`, `"512K"` (K is 1024, as for bytes), `"1.5M"`.

    Raises `InputError` naming `name` and the value if it is not a whole number of at least 1.
    """
    match = _SIZE.fullmatch(text)
    factor = {"": 1, **_BINARY}.get(match["unit"].upper()) if match else None
    count = float(match["number"]) * factor if match and factor else 0.0
    if count < 1 or not count.is_integer():
        raise InputError(
            f"{setting(name)} is {text!r}: give a whole number of at least 1, such as 4096 or 4K"
            " (4 x 1024)."
        )
    return int(count)


_SECONDS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(text: str, name: str) -> float:
    """The seconds written as `text`: `"30s"`, `"10min"`, `"1.5 h"`, `"2d"`.

    Raises `InputError` naming `name` and the value if it is not a time above zero.
    """
    match = _SIZE.fullmatch(text)
    unit = _SECONDS.get(match["unit"].lower()) if match else None
    seconds = float(match["number"]) * unit if match and unit else 0.0
    if not 0.0 < seconds < math.inf:
        raise InputError(
            f"{setting(name)} is {text!r}, which is not a time: write one above zero such as 30s,"
            " 10min or 2h."
        )
    return seconds


def format_bytes(num_bytes: float) -> str:
    """`num_bytes` with a binary prefix and three digits: `512 B`, `1.50 KiB`, `47.2 MiB`."""
    return _prefixed(num_bytes, 1024, ("KiB", "MiB", "GiB", "TiB"))


def format_rate(bytes_per_second: float) -> str:
    """`bytes_per_second` in the units of network speeds, powers of 1000: `117 MB/s`, `1.31 GB/s`."""
    return f"{_prefixed(bytes_per_second, 1000, ('kB', 'MB', 'GB', 'TB'))}/s"


def _prefixed(num_bytes: float, factor: int, prefixes: tuple[str, ...]) -> str:
    size, unit = abs(float(num_bytes)), "B"
    for larger in prefixes:
        if size < factor - 0.5:
            break
        size, unit = size / factor, larger
    if unit == "B":
        text = f"{size:.0f}"
    else:
        text = f"{size:.2f}" if size < 9.995 else f"{size:.1f}" if size < 99.95 else f"{size:.0f}"
    return f"{'-' if num_bytes < 0 else ''}{text} {unit}"


def format_seconds(seconds: float) -> str:
    """`seconds` in readable units: `350 us`, `4.2 ms`, `1.3 s`, `2 min 05 s`, `1 h 02 min`."""
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    for limit, factor, unit in ((9.995e-4, 1e6, "us"), (0.9995, 1e3, "ms"), (59.95, 1.0, "s")):
        if seconds < limit:
            value = seconds * factor
            return f"{value:.0f} {unit}" if value >= 99.5 else f"{value:.1f} {unit}"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def format_count(count: int) -> str:
    """`count` with a comma between thousands."""
    return f"{count:,}"
