"""Pieces: what BatchNorm over ghost batches leaves in glibc's heap.

A trace cuts a pass into a few ghost batches, since each is traced operation by operation. The real ones
are more and smaller. Each has objects of its own in the graph, and results below the threshold for
mappings lie in the heap, between those objects:

    | result | objects | result | objects | ...     while the norm runs
    | free   | objects | free   | objects | ...     once the results are joined

The next norm's results do not fit there: glibc aligns a block by asking for up to 96 bytes more, and
gives them back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from anybatch.estimate.trace import Block, Timeline

OBJECT_BYTES = 2800
"""C++ objects of one piece until backward is done with it: views, nodes of the graph, what they save
(by what glibc says is in use: 39 KiB for each further ghost batch of 13 norms, of which 0.2 KiB a norm
are statistics)."""

OBJECTS = "libraries"
"""Their kind in a ledger, where all that C++ keeps beside tensors is."""

_NORM, _BACKWARD = "batch_norm", "backward"


def cut_finer(timeline: Timeline, traced: int, real: int, threshold: int) -> Timeline:
    """`timeline` with the blocks of each norm's `traced` pieces divided into those of `real` ones, and
    with their objects.

    Pieces of `threshold` bytes and more leave nothing, so they need not be divided.
    """
    if real <= 1:
        return timeline
    return replace(timeline, blocks=list(_divided(timeline, traced, real, threshold)))


def tensors(timeline: Timeline) -> Timeline:
    """`timeline` without objects."""
    return replace(timeline, blocks=[b for b in timeline.blocks if b.kind != OBJECTS])


def _divided(timeline: Timeline, traced: int, real: int, threshold: int) -> Iterator[Block]:
    number: Counter[str] = Counter()
    for _, group in groupby(timeline.blocks, lambda block: block.born):
        result, *others = group
        name = _maker(result, timeline)
        if _NORM not in name:
            yield from (result, *others)
            continue
        number[name] += 1
        pieces = real * number[name] // traced - real * (number[name] - 1) // traced
        yield from _of_one(result, others, max(1, pieces), threshold, _BACKWARD in name)


def _of_one(
    result: Block, others: list[Block], pieces: int, threshold: int, backward: bool
) -> Iterator[Block]:
    """The blocks of one norm's operation, as those of so many: each has its result, and what backward
    needs of it."""
    size = -(-result.num_bytes // pieces)
    for i in range(pieces):
        if size < threshold:
            yield replace(result, num_bytes=size)
        elif i == 0:
            yield result
        if i == 0 or not backward:  # gradients are added up
            yield from (replace(block) for block in others)
        if others and not backward:
            yield replace(others[0], num_bytes=OBJECT_BYTES, kind=OBJECTS)


def _maker(block: Block, timeline: Timeline) -> str:
    is_made = block.phase == "compute" and 0 < block.born <= len(timeline.operations)
    return timeline.operations[block.born - 1].name if is_made else ""
