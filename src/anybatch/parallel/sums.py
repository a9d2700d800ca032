"""Sums: asynchronous sums of flat tensors over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor


@final
class Sums:
    """All-reduces flat tensors. Every rank must start the same tensors in the same order.

    Args:
        dtype: dtype in which tensors are sent and summed, as in DistributedDataParallel's compression
            hooks; None: their own dtype. Tensors that are no wider than `dtype` are sent unconverted.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._staged: list[Tensor] = []  # kept: an allocation inside a step could fail
        self._started: list[tuple[Tensor, Tensor, Any]] = []

    @property
    def num_started(self) -> int:
        """Number of tensors started since the last `finish`."""
        return len(self._started)

    def reserve(self, flats: Sequence[Tensor]) -> None:
        """Allocate the memory that `start` needs for `flats`, which are started in this order."""
        self._staged = [self._like(flat) for flat in flats]

    def start(self, flat: Tensor) -> None:
        """Start the in-place all-reduce of `flat`, a 1-D tensor. Does not wait for it."""
        number = len(self._started)
        if number == len(self._staged):
            self._staged.append(self._like(flat))
        crossing = flat
        if self._is_narrowed(flat):
            crossing = self._staged[number].copy_(flat)
        self._started.append((flat, crossing, dist.all_reduce(crossing, async_op=True)))

    def finish(self, then: Callable[[int], None] | None = None) -> None:
        """Wait until all started tensors are reduced; `then` is called with the number of each tensor
        when it is reduced, in order. Raises `RuntimeError` if a rank is gone."""
        for number, (flat, crossing, work) in enumerate(self._started):
            work.wait()
            if crossing is not flat:
                flat.copy_(crossing)
            if then is not None:
                then(number)
        self._started.clear()

    def _is_narrowed(self, flat: Tensor) -> bool:
        return self._dtype is not None and flat.itemsize > self._dtype.itemsize

    def _like(self, flat: Tensor) -> Tensor:
        return torch.empty_like(flat, dtype=self._dtype) if self._is_narrowed(flat) else flat[:0]
