"""Series: measurements of the gradient noise in the steps of a run, in a few hundred blocks.

The gradient of a number of samples (or tokens, or other units of weight of the loss) is the true
gradient G plus noise that averages out. The expected squared norm of a gradient of weight b is

    |G|^2 + T / b                 T = tr(Sigma), the noise of a unit of weight

A step measures two squared norms: that of its whole gradient, of weight W, and that of a part of it, of
weight w. These give two equations for the two unknowns (McCandlish et al. 2018, "An Empirical Model of
Large-Batch Training", appendix A.1):

    |G|^2 = (W |G_W|^2 - w |G_w|^2) / (W - w)          T = (|G_w|^2 - |G_W|^2) / (1/w - 1/W)

Both estimates are unbiased, although the part is contained in the whole. A single step is not
informative, since its noise exceeds the quantities to be estimated. Therefore sums over steps are kept,
weighted by the weight of each step, and ratios are taken only of the sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import final

from anybatch.events import StepDone

MOST_BLOCKS = 512
"""Number of blocks at which pairs of blocks are merged, so that memory does not grow with the length of
a run."""


@dataclass(frozen=True, slots=True)
class Block:
    """Sums over consecutive steps.

    Attributes:
        first_step, last_step: numbers of the first and the last step.
        num_steps: number of measured steps.
        samples, weight: total samples and weight of the measured steps.
        square: sum of the estimates of |G|^2, each times the weight of its step.
        noise: sum of the estimates of tr(Sigma) for a unit of weight, each times the weight of its
            step.
        tokens: total length of the samples if the global batch is in `Tokens`; else 0.
    """

    first_step: int
    last_step: int
    num_steps: int
    samples: float
    weight: float
    square: float
    noise: float
    tokens: float = 0.0

    def __add__(self, later: Block) -> Block:
        return Block(
            self.first_step,
            later.last_step,
            self.num_steps + later.num_steps,
            self.samples + later.samples,
            self.weight + later.weight,
            self.square + later.square,
            self.noise + later.noise,
            self.tokens + later.tokens,
        )


def block_of(
    step: int,
    samples: float,
    weight: float,
    grad_norm: float | None,
    part_weight: float | None,
    part_grad_norm: float | None,
    tokens_per_sample: float = 0.0,
) -> Block | None:
    """Returns the block of one step, from the fields of `StepDone`; None if the noise was not measured,
    or is not finite. `tokens_per_sample` is a mean; 0 if the global batch is not in tokens."""
    if grad_norm is None or part_weight is None or part_grad_norm is None:
        return None
    if not (0 < part_weight < weight and samples > 0):
        return None
    whole, part = grad_norm**2, part_grad_norm**2
    square = (weight * whole - part_weight * part) / (weight - part_weight)
    noise = (part - whole) / (1 / part_weight - 1 / weight)
    if not (math.isfinite(square) and math.isfinite(noise)):
        return None
    tokens = samples * tokens_per_sample
    return Block(step, step, 1, samples, weight, weight * square, weight * noise, tokens)


@final
class Series:
    """Collects the blocks of a run while it is training.

    If a step is repeated (after a resumption), the blocks that contain it or later steps are dropped.
    """

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._size = 1  # steps of a block
        self._open: Block | None = None

    def __call__(self, event: StepDone) -> None:
        """Add a step."""
        self.add(
            block_of(
                event.step,
                event.samples,
                event.weight,
                event.grad_norm,
                event.part_weight,
                event.part_grad_norm,
                (event.tokens_seen or 0.0) / max(1, event.samples_seen),
            )
        )

    def add(self, step: Block | None) -> None:
        """Add a step; None, a step without a measurement, is ignored."""
        if step is None:
            return
        if self._open is not None and self._open.last_step >= step.first_step:
            self._open = None
        while self._blocks and self._blocks[-1].last_step >= step.first_step:
            self._blocks.pop()
        self._open = step if self._open is None else self._open + step
        if self._open.num_steps < self._size:
            return
        self._blocks.append(self._open)
        self._open = None
        if len(self._blocks) == MOST_BLOCKS:
            self._blocks = joined(self._blocks, MOST_BLOCKS // 2)
            self._size *= 2

    @property
    def blocks(self) -> Sequence[Block]:
        """The blocks in order, without gaps except for steps that were not measured."""
        return (*self._blocks, *(() if self._open is None else (self._open,)))


def in_unit_of_batch(blocks: Sequence[Block]) -> tuple[Sequence[Block], str]:
    """Returns `blocks` with `samples` in the unit of the global batch, and the name of that unit:
    `samples` or `tokens`."""
    if not blocks or not all(block.tokens for block in blocks):
        return blocks, "samples"
    return [replace(block, samples=block.tokens) for block in blocks], "tokens"


def joined(blocks: Sequence[Block], count: int) -> list[Block]:
    """Merges `blocks` into `count` groups of nearly equal size; returns all of them if there are
    fewer."""
    return [total(part) for part in cut(blocks, min(count, len(blocks)))]


def cut(blocks: Sequence[Block], count: int) -> list[Sequence[Block]]:
    """Divides `blocks` into `count` consecutive parts of nearly equal size."""
    edges = [len(blocks) * i // count for i in range(count + 1)] if count else []
    return [blocks[begin:end] for begin, end in pairwise(edges)]


def total(blocks: Sequence[Block]) -> Block:
    """Merges all `blocks`, at least one, into a single block."""
    whole = blocks[0]
    for block in blocks[1:]:
        whole += block
    return whole
