"""Samples: what they take beside their batch in the process that puts them together.

Until a batch is put together its samples are there as objects of their own. Blocks that are smaller
than glibc's threshold for mappings come from the heap; and since what stays comes to lie behind them,
the heap keeps what they had when they are gone. Of a stream all samples of a global step are held until
it is committed, since it may have to be redone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from anybatch.data import AT_ONCE, TensorFetch, batch_size, is_map_style, open_fetch, parts_of
from anybatch.errors import AnybatchError
from anybatch.machine import MMAP_THRESHOLD
from anybatch.task import JointLoss, Task

_OBJECT_BYTES = 640
"""Of a tensor or array without its numbers: 270 to 620 bytes were kept, by the peaks of runs with 1,024
and 4,096 samples to a micro-batch."""
_SPREAD = 1.25
"""The numbers of a sample do not find their old places again: of 4 and 12 KiB, up to 1.25 times as much
was kept."""

_BETWEEN = 1.5
"""Of what lies between batches that wait in the heap (8 MiB in 128 and in 512 batches: 2.8 and 3.2 MiB
more)."""


@dataclass(frozen=True, slots=True)
class Samples:
    """What the samples of a run take beside their batches.

    Attributes:
        left_bytes: of the heap, that each of those that are there at a time leaves behind.
        at_once: how many of a micro-batch are there at a time; None: all.
        held_bytes: of all samples of a global step, while it lasts.
        waiting_bytes: of each sample in a micro-batch that waits until it is computed with, once it
            was encoded (see `compute.joint`); tensor by tensor.
    """

    left_bytes: int = 0
    at_once: int | None = None
    held_bytes: int = 0
    waiting_bytes: tuple[int, ...] = ()

    def waiting(self, num_samples: int, micro_batch: int) -> int:
        """What so many take that wait, in micro-batches of that size. In the heap they lie between what
        passes leave free."""
        return sum(
            round(num_samples * each * (1.0 if each * micro_batch >= MMAP_THRESHOLD else _BETWEEN))
            for each in self.waiting_bytes
        )

    def num_there(self, micro_batch: int) -> int:
        """Samples that are there at a time."""
        return micro_batch if self.at_once is None else min(micro_batch, self.at_once)


def samples_of(task: Task, batch: Any) -> Samples:
    """What the samples of `task` take. The arguments are those of `_fetched`."""
    found = _fetched(task, batch)
    if not isinstance(task.loss, JointLoss):
        return found
    size = batch_size(batch)
    waiting = tuple(num_bytes // size for _, num_bytes in _blocks(batch))
    return replace(found, waiting_bytes=waiting)


def _fetched(task: Task, batch: Any) -> Samples:
    """What the samples of `task` take. They leave nothing where batches are taken out of tensors in
    memory or put together by other processes, or where samples cannot be read alone.

    Args:
        task: whose samples. One is read twice; of a stream none, since it may be spent by it.
        batch: of the task, from which it is told what samples of a stream are made of.
    """
    if not is_map_style(task.train):
        size = batch_size(batch)
        parts = [num_bytes // size for _, num_bytes in _blocks(batch)]
        return Samples(held_bytes=task.global_batch * (len(parts) * _OBJECT_BYTES + sum(parts)))
    if task.num_workers:
        return Samples()
    fetch = open_fetch(task.train, task.collate, task.seed)
    if isinstance(fetch, TensorFetch):
        return Samples()
    at_once = AT_ONCE if fetch.stacks else None
    try:
        first, again = fetch.alone(0), fetch.alone(0)
    except AnybatchError:  # told where a batch is made
        return Samples(at_once=at_once)
    held = {address for address, _ in _blocks(again)}
    made, there = [], []
    for address, num_bytes in _blocks(first):
        (there if address in held else made).append(num_bytes)
    return Samples(_left_by(made, there), at_once)


def _left_by(made: Sequence[int], there: Sequence[int]) -> int:
    """Of tensors and arrays whose numbers take so many bytes: made for the sample, or there already."""
    own = sum(num_bytes for num_bytes in made if num_bytes < MMAP_THRESHOLD)
    return (len(made) + len(there)) * _OBJECT_BYTES + round(_SPREAD * own)


def _blocks(node: Any) -> Iterator[tuple[int, int]]:
    """The address and size of the numbers of each tensor and array in a sample."""
    parts = parts_of(node)
    if parts is not None:
        for _, part in parts:
            yield from _blocks(part)
    elif isinstance(node, Tensor):
        storage = node.untyped_storage()
        yield storage.data_ptr(), storage.nbytes()
    elif isinstance(node, np.ndarray):
        yield node.__array_interface__["data"][0], node.nbytes
