"""Samples: what they leave in the heap of the process that puts them together.

Until a batch is put together its samples are there as objects of their own. Blocks that are smaller
than glibc's threshold for mappings come from the heap; and since the batch comes to lie behind them,
the heap keeps what they had when they are gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from anybatch.data import TensorFetch, batch_size, is_map_style, open_fetch, parts_of
from anybatch.errors import AnybatchError
from anybatch.machine import MMAP_THRESHOLD
from anybatch.task import Task

_OBJECT_BYTES = 640
"""Of a tensor or array without its numbers: 270 to 620 bytes were kept, by the peaks of runs with 1,024
and 4,096 samples to a micro-batch."""
_SPREAD = 1.25
"""The numbers of a sample do not find their old places again: of 4 and 12 KiB, up to 1.25 times as much
was kept."""


def sample_bytes(task: Task, batch: Any) -> int:
    """Bytes of the heap that each sample of a micro-batch leaves behind; 0 where batches are taken out
    of tensors in memory, or put together by other processes, or where samples cannot be read alone.

    Args:
        task: whose samples. One is read twice; of a stream none, since it may be spent by it.
        batch: of the task, from which it is told what samples of a stream are made of.
    """
    if task.num_workers:
        return 0
    if not is_map_style(task.train):
        size = batch_size(batch)
        return _left_by([num_bytes // size for _, num_bytes in _blocks(batch)], [])
    fetch = open_fetch(task.train, task.collate, task.seed)
    if isinstance(fetch, TensorFetch):
        return 0
    try:
        first, again = fetch.alone(0), fetch.alone(0)
    except AnybatchError:  # told where a batch is made
        return 0
    held = {address for address, _ in _blocks(again)}
    made, there = [], []
    for address, num_bytes in _blocks(first):
        (there if address in held else made).append(num_bytes)
    return _left_by(made, there)


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
