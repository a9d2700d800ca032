"""Reserve: what a plan leaves free of its budget."""

from __future__ import annotations

_LEAST, _PARTS = 512 << 10, 40
"""So many bytes at least, and one part in so many."""


def reserve_of(budget_bytes: int) -> int:
    """Bytes of the budget that a plan leaves free: for what a trace does not see, such as the heap of
    the interpreter."""
    return max(_LEAST, budget_bytes // _PARTS)


def budget_for(peak_bytes: int) -> int:
    """The least budget that leaves `peak_bytes` beside its reserve."""
    least = max(peak_bytes + _LEAST, peak_bytes * _PARTS // (_PARTS - 1))
    while least - reserve_of(least) < peak_bytes:  # what rounding has left out
        least += 1
    return least
