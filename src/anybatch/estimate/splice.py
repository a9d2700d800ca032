"""Splice: the head, the passes and the tail of a trace in a row; `stage` tells when that is right."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from anybatch.estimate.trace import Block, Timeline


@dataclass(frozen=True, slots=True)
class Left:
    """What passes have left behind, where that is nothing but gradients.

    Attributes:
        signature: which parameters have one, and their layouts and storages.
        blocks: storages that the passes made, in the order of these parameters.
    """

    signature: tuple[Any, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Tail:
    """The update of a step. Its moments are counted from the end of the passes.

    Attributes:
        signature: of the gradients that it was traced with.
        gradients_died: when each of their storages was freed.
        head: blocks of the head, with what passes say of them.
        head_died: when it freed some of these, by their place.
        timeline: what else there is.
        commit_bytes: what it adds at its peak.
    """

    signature: tuple[Any, ...]
    gradients_died: tuple[int, ...]
    head: tuple[Block, ...]
    head_died: dict[int, int]
    timeline: Timeline
    commit_bytes: int


def growth(timeline: Timeline, start: int) -> int:
    """The most bytes alive at once from `start` on, beyond those alive at `start`."""
    changes: Counter[int] = Counter()
    for block in timeline.blocks:
        if block.born > start:
            changes[block.born] += block.num_bytes
            if block.died is not None:
                changes[block.died + 1] -= block.num_bytes
    most = now = 0
    for moment in sorted(changes):
        now += changes[moment]
        most = max(most, now)
    return most


def moved(block: Block, by: int) -> Block:
    """A copy of `block`, so many moments later."""
    died = None if block.died is None else block.died + by
    told = block.kind, block.module, block.item_bytes
    return Block(block.num_bytes, block.born + by, block.phase, died, *told)


def since(end: int, died: int | None) -> int:
    """The moment `died`, counted from `end`."""
    assert died is not None
    return died - end
