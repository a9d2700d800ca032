"""Reserve: what a plan leaves free of its budget."""

from __future__ import annotations

from anybatch.machine import DeviceKind

_LEAST: dict[DeviceKind, int] = {"cpu": 2 << 20, "cuda": 256 << 10}
_PARTS: dict[DeviceKind, int] = {"cpu": 25, "cuda": 40}
"""So many bytes at least, and one part in so many."""


def reserve_of(budget_bytes: int, kind: DeviceKind) -> int:
    """Bytes of the budget that a plan leaves free on a device of that `kind`: for memory that a trace
    does not see, such as that of libraries and of the interpreter."""
    return max(_LEAST[kind], budget_bytes // _PARTS[kind])


def budget_for(peak_bytes: int, kind: DeviceKind) -> int:
    """The least budget that leaves `peak_bytes` beside its reserve."""
    parts = _PARTS[kind]
    least = max(peak_bytes + _LEAST[kind], peak_bytes * parts // (parts - 1))
    while least - reserve_of(least, kind) < peak_bytes:  # what rounding has left out
        least += 1
    return least
