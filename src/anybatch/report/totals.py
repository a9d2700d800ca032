"""Totals: the predicted peak as each account of a device's memory has it."""

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
    """The most bytes at any time by one account."""

    name: str
    predicted: int
    meaning: str


def totals_of(device: str, predicted: Mapping[str, int]) -> list[Total]:
    """Every account of `device` (`"cpu"`, `"cuda:1"`) that has a figure."""
    meanings = _MEANINGS.get(device.partition(":")[0], {})
    return [
        Total(name, predicted[name], meaning)
        for name, meaning in meanings.items()
        if name in predicted
    ]
