"""The global order of samples: a pure function of (seed, epoch, number of samples) alone, and of their
lengths where they are put in order of these inside a global batch.

It knows no rank, no micro-batch and no step, so that every plan, restart and redo sees one order.
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
    """One 64-bit key from whole numbers, so that neighbouring numbers give unrelated keys.

    Each value is folded in by a round of splitmix64 (Steele, Lea, Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014). Order matters: `mix(1, 2) != mix(2, 1)`.
    """
    state = 0
    for value in values:
        state = (state ^ (value & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def permutation(seed: int, epoch: int, length: int, shuffle: bool = True) -> Tensor:
    """The order of samples in `epoch`: int64 indices, shape `[length]`, on the CPU.

    Drawn under a generator of its own: torch's default one is neither read nor advanced.
    """
    if not shuffle:
        return torch.arange(length, device="cpu")
    generator = torch.Generator(device="cpu").manual_seed(mix(seed, epoch))
    return torch.randperm(length, generator=generator, device="cpu")


@final
class Order:
    """The permutations of a run, each drawn when it is first asked for; the last two are kept.

    `arranged`: from a permutation and its epoch to one in which the samples of each global step stand
    in another order.
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
        """Indices of the samples at positions `start` to `stop` of `epoch`: int64, a view."""
        return self._drawn(epoch)[start:stop]
