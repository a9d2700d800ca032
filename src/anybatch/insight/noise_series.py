"""Series: what the steps of a run tell of the noise in their gradients, in a few hundred blocks.

The gradient of `weight` samples (or tokens, or whatever a loss is weighed by) is the true one, G, plus
noise that averages out: of what has the weight b by itself, the squared norm is expected to be

    |G|^2 + T / b                 T = tr(Sigma), the noise of a unit of weight

A step knows two such squares: that of its whole gradient, of the weight W, and that of a part of it, of
the weight w. Two equations, two unknowns (McCandlish et al. 2018, "An Empirical Model of Large-Batch
Training", appendix A.1):

    |G|^2 = (W |G_W|^2 - w |G_w|^2) / (W - w)          T = (|G_w|^2 - |G_W|^2) / (1/w - 1/W)

Both are without bias, though the part is in the whole. One step tells next to nothing: noise is larger
than what is looked for. So sums over steps are kept, each step by its weight, and nothing is divided
before they are added up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import final

from anybatch.events import StepDone

MOST_BLOCKS = 512
"""Then pairs become one: a run of any length takes as much memory."""


@dataclass(frozen=True, slots=True)
class Block:
    """Steps that followed one another.

    Attributes:
        first_step, last_step: their numbers.
        num_steps: those of them that were measured.
        samples, weight: of these together.
        square: sum of their estimates of |G|^2, each times its weight.
        noise: the same of tr(Sigma), for a unit of weight.
        tokens: total length of the samples, where the global batch is in `Tokens`; else 0.
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
    """One step, from the fields of `StepDone`; None if it was not measured, or is not finite.
    `tokens_per_sample`: on average; 0: the global batch is not in tokens."""
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
    """The blocks of a run, gathered while it goes on.

    A step that is done again (after a resumption) takes the place of what was there from it on, as far
    as blocks allow.
    """

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._size = 1  # steps of a block
        self._open: Block | None = None

    def __call__(self, event: StepDone) -> None:
        """Take in a step."""
        self.add(
            block_of(
                event.step,
                event.samples,
                event.weight,
                event.grad_norm,
                event.part_weight,
                event.part_grad_norm,
                (event.tokens_seen or 0.0) / event.samples_seen,
            )
        )

    def add(self, step: Block | None) -> None:
        """Take in a step, if it was measured."""
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
        """In order, without gaps but for steps that were not measured."""
        return (*self._blocks, *(() if self._open is None else (self._open,)))


def in_unit_of_batch(blocks: Sequence[Block]) -> tuple[Sequence[Block], str]:
    """`blocks`, with `samples` counted as the global batch is, and the name of that unit: `samples`, or
    `tokens`."""
    if not blocks or not all(block.tokens for block in blocks):
        return blocks, "samples"
    return [replace(block, samples=block.tokens) for block in blocks], "tokens"


def joined(blocks: Sequence[Block], count: int) -> list[Block]:
    """`blocks` put together to `count`, of as many each as can be; all of them, if there are fewer."""
    count = min(count, len(blocks))
    edges = [len(blocks) * i // count for i in range(count + 1)] if count else [0]
    return [total(blocks[begin:end]) for begin, end in pairwise(edges)]


def total(blocks: Sequence[Block]) -> Block:
    """All of them as one; there is at least one."""
    whole = blocks[0]
    for block in blocks[1:]:
        whole += block
    return whole
