"""The global order of samples: a pure function of (seed, epoch, number of samples), and of the sample
lengths if the samples of a global batch are sorted by length.

This module has no notion of ranks, micro-batches or steps, so every plan, restart and redo uses the
same order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import final

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_EPOCHS_KEPT = 2  # a step of last="wrap" spans two; more would only cost memory


def mix(*values: int) -> int:
    """Mixes integers into one 64-bit key such that neighboring integers give unrelated keys.

    Each value is folded in by a round of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom
    number generators", OOPSLA 2014). Order matters: `mix(1, 2) != mix(2, 1)`.
    """
    state = 0
    for value in values:
        state = (state ^ (value & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def permutation(seed: int, epoch: int, length: int, shuffle: bool = True) -> Tensor:
    """Returns the order of samples in `epoch`: int64 indices, shape `[length]`, on the CPU.

    Uses a separate generator: torch's default generator is neither read nor advanced.
    """
    if not shuffle:
        return torch.arange(length, device="cpu")
    generator = torch.Generator(device="cpu").manual_seed(mix(seed, epoch))
    return torch.randperm(length, generator=generator, device="cpu")


@final
class Order:
    """The permutations of a run, each computed on first use; the last two are cached.

    `arranged`: a function from a permutation and its epoch to a permutation in which the samples of
    each global step are reordered.
    """

    def __init__(
        self,
        seed: int,
        length: int,
        shuffle: bool = True,
        arranged: Callable[[Tensor, int], Tensor] | None = None,
    ) -> None:
        def drawn(epoch: int) -> Tensor:
            order = permutation(seed, epoch, length, shuffle)
            return order if arranged is None else arranged(order, epoch)

        self._drawn = lru_cache(_EPOCHS_KEPT)(drawn)

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        """Returns the indices of the samples at positions `start` to `stop` of `epoch`: int64, a
        view."""
        return self._drawn(epoch)[start:stop]
