"""Totals: the peak as each account of a device's memory has it, predicted beside measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_MEANINGS = {
    "cuda": {
        "allocated": "in tensors: torch.cuda.max_memory_allocated()",
        "active": 'torch.cuda.memory_stats()["active_bytes.all.peak"]',
        "reserved": "with the allocator's cache: torch.cuda.max_memory_reserved()",
        "total": "with context and libraries: nvidia-smi; the budget is of this",
    },
    "cpu": {
        "allocated": "in tensors and in kernels' scratch",
        "reserved": "as allocated: what malloc adds is not predicted",
        "total": "resident, beyond what the process had; the budget is of this",
    },
}


@dataclass(frozen=True, slots=True)
class Total:
    """The most bytes at any time by one account; None: not known."""

    name: str
    predicted: int | None
    measured: int | None
    meaning: str


def totals_of(
    device: str, predicted: Mapping[str, int], measured: Mapping[str, int] | None = None
) -> list[Total]:
    """Every account of `device` (`"cpu"`, `"cuda:1"`) that has a figure."""
    known = measured or {}
    meanings = _MEANINGS.get(device.partition(":")[0], {})
    return [
        Total(name, predicted.get(name), known.get(name), meaning)
        for name, meaning in meanings.items()
        if name in predicted or name in known
    ]
