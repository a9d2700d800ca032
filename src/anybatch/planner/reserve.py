"""Reserve: what a plan leaves free of its budget."""

from __future__ import annotations

from anybatch.machine import DeviceKind

_LEAST = 256 << 10
_PARTS: dict[DeviceKind, int] = {"cpu": 100, "cuda": 40}
"""So many bytes at least, and one part in so many. On a CPU predictions were held against the kernel's
own peak: none of 56 cells (benchmarks/memory) and 3 of 100 random pairs (benchmarks/budgets) were below
it, and none of these ran out of memory. On CUDA they were not yet."""


def reserve_of(budget_bytes: int, kind: DeviceKind) -> int:
    """Bytes of the budget that a plan leaves free on a device of that `kind`: for what a trace does not
    see, such as the heap of the interpreter."""
    return max(_LEAST, budget_bytes // _PARTS[kind])


def budget_for(peak_bytes: int, kind: DeviceKind) -> int:
    """The least budget that leaves `peak_bytes` beside its reserve."""
    parts = _PARTS[kind]
    least = max(peak_bytes + _LEAST, peak_bytes * parts // (parts - 1))
    while least - reserve_of(least, kind) < peak_bytes:  # what rounding has left out
        least += 1
    return least
