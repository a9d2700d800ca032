"""Update room: the peak memory of the update is allocated, and freed, before the ranks agree on a step,
while a failure is harmless.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import final

import torch

from anybatch.engine.context import PassContext
from anybatch.oom import is_limited
from anybatch.plans import Plan
from anybatch.process.cuda_driver import release_unused


@final
class UpdateRoom:
    """Checks in each step that there is room for the update, whose peak is `commit_bytes` (in the first
    step, in later ones). `has_updated` is whether an update has been applied."""

    def __init__(self, context: PassContext, commit_bytes: tuple[int, int]) -> None:
        self.has_updated: bool = False
        self._replica, self._limit = context.replica, context.limit
        self._device = context.device
        self._commit_bytes = commit_bytes
        self._is_tidy = context.device.type != "cuda"

    def tidy(self) -> None:
        """Called before the passes of a step. The second step begins with only parameters and optimizer
        states in the allocator; later ones do not wait for the device."""
        if self.has_updated and not self._is_tidy:
            release_unused(self._device)
            self._is_tidy = True

    def reserve(self) -> None:
        """Called after the passes. Raises a memory error if there is no room for the update."""
        first, later = self._commit_bytes
        need = later if self._replica.optimizer.state else first
        if not (self.has_updated or self._is_tidy):
            # Optimizer states that are created now persist. Inside segments that the passes left free
            # they would prevent those from being released, or used for anything larger.
            release_unused(self._device)
        self._limit.reserve(need)
        if is_limited() if self._device.type == "cpu" else need:
            try_out(need or self._replica.update_bytes(), self._replica.part_bytes(), self._device)


def try_out(num_bytes: int, pieces: Sequence[int], device: torch.device) -> None:
    """Allocate `num_bytes` in pieces of the sizes `pieces` (bytes), and free them, so that the tensors
    of an update fit where the pieces were. CUDA's allocator would take a single large piece from the
    driver, in addition to its free memory. Raises a memory error if the allocation fails."""
    held: list[torch.Tensor] = []
    sizes = itertools.cycle(tuple(filter(None, pieces)) or (num_bytes,))
    while num_bytes > 0:
        size = min(next(sizes), num_bytes)
        held.append(torch.empty(size, dtype=torch.uint8, device=device))
        num_bytes -= size


def to_reserve(plan: Plan) -> tuple[int, int]:
    """Returns what the update of `plan` allocates, where running out of memory raises an error that can
    be handled: everywhere except on a CPU without a limit. Otherwise (0, 0)."""
    can_fail = plan.enforced or plan.device != "cpu" or is_limited()
    return plan.prediction.commit_bytes if plan.prediction and can_fail else (0, 0)
