"""Samples: the information about a task's data that a trace needs.

A few real samples form one batch, and batches of any size are created from its shapes. If samples
differ in size, the largest ones determine the cost of a pass. With given lengths the longest
samples are known. Without lengths, some samples, spread over the data, are inspected one by one if
the task has its own `collate`, since PyTorch's accepts only samples of equal shape.

Also computed: the padded size of a mean global batch, if lengths are given, and the memory that a
step holds in addition to its batch. For a stream these are all samples of a global step until it is
committed, since it may have to be repeated; with a joint loss, the samples that wait for their
second pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anybatch.batch_rule import tokens_of
from anybatch.data import (
    BadSamples,
    Order,
    Piece,
    Steps,
    batch_size,
    evaluation_batches,
    is_map_style,
    largest_batch,
    lengths_of,
    lengths_of_step,
    micro_batches_by_length,
    open_fetch,
    ordered,
    padded_size,
    parts_of,
    sizes_alone,
    steps_of,
)
from anybatch.data.batch_slices import samples_left
from anybatch.data.cut import positions
from anybatch.errors import DataError
from anybatch.task import JointLoss, Task


@dataclass(frozen=True, slots=True)
class Samples:
    """Bytes of samples that a step holds in host memory in addition to its batch.

    Attributes:
        held_bytes: bytes of all samples of a global step of a stream, for the duration of the step.
        waiting_bytes: bytes of each sample that waits during a joint loss (see `compute.joint`).
    """

    held_bytes: int = 0
    waiting_bytes: int = 0


def samples_of(task: Task, batch: Any) -> Samples:
    """Return the memory of the samples of `task`, computed from a `batch` of it."""
    sample_bytes = sum(_blocks(batch)) // samples_left(batch, NUM_SAMPLES)
    return Samples(
        held_bytes=0 if is_map_style(task.train) else largest_batch(task) * sample_bytes,
        waiting_bytes=sample_bytes if isinstance(task.loss, JointLoss) else 0,
    )


def _blocks(node: Any) -> Iterator[int]:
    """Yield the bytes of the elements of each tensor and array in a batch."""
    parts = parts_of(node)
    if parts is not None:
        for _, part in parts:
            yield from _blocks(part)
    elif isinstance(node, Tensor) and node.is_nested:
        yield sum(one.nbytes for one in node.unbind())
    elif isinstance(node, Tensor) and node.layout is not torch.strided:
        yield node.to_sparse_coo()._nnz() * (node.element_size() + 8 * node.dim())  # and indices
    elif isinstance(node, Tensor):
        yield node.untyped_storage().nbytes()
    elif isinstance(node, np.ndarray):
        yield node.nbytes


NUM_SAMPLES = 2
"""Number of samples in a template, if the data has as many."""

_MOST_BAD = 100  # samples skipped, if the task allows it, in search of two to plan with

_FIRST, _MOST = 8, 64
"""Number of samples that are inspected: to detect whether they differ, and then if they do."""

_NO_BATCHES = (bool, int, float, str, bytes, type(None))


def template_of(task: Task) -> tuple[Any, int]:
    """Return the first samples, or the largest, as one batch, and the number of samples that were
    inspected if they differ in size and no lengths are given, otherwise 0. Samples are fetched as
    in training, so errors have the same messages.

    Raises `DataError` if the samples cannot be read or collated.
    """
    gaps: list[int] = []
    while True:
        try:
            batch, looked_at = _first_batch(task, gaps)
            # A custom collate may return batches that do not show their size.
            if task.collate is None or isinstance(batch, _NO_BATCHES):
                batch_size(batch)
            return batch, looked_at
        except BadSamples as error:
            if task.bad_data == "stop" or len(gaps) >= _MOST_BAD:
                raise
            gaps = sorted({*gaps, *(bad.place.position for bad in error.bad)})


def _first_batch(task: Task, gaps: Sequence[int]) -> tuple[Any, int]:
    """Like `template_of`, without the samples at `gaps` (indices)."""
    data, looked_at = task.train, 0
    if is_map_style(data):
        part = range(min(NUM_SAMPLES, len(data) - len(gaps)))
        if not part:
            raise DataError(f"every training sample of task {task.name!r} is bad: mend the data.")
        fetch = open_fetch(data, task.collate, task.seed)
        lengths = lengths_of(task.lengths, data, "training")
        if lengths is not None:
            lengths = lengths.index_fill(0, torch.tensor(gaps, dtype=torch.int64), 0)
            indices = lengths.topk(len(part)).indices
        else:
            indices = torch.tensor(positions(part, gaps))
            if task.collate is not None:
                indices, looked_at = _largest(fetch, len(data), indices)
        try:
            return fetch([Piece(0, indices)]), looked_at
        except BadSamples as error:
            raise BadSamples(str(error), error.at(indices.tolist())) from error.__cause__
    batches = evaluation_batches(data, task.collate, NUM_SAMPLES, seed=task.seed, gaps=gaps)
    batch, _ = next(batches, (None, 0))
    if batch is None:
        raise DataError(
            f"the training data of task {task.name!r} gives no sample: give it at least one."
        )
    return batch, 0


def _largest(fetch: Any, num_samples: int, first: Tensor) -> tuple[Tensor, int]:
    """Return the samples to plan with, as many as in `first`, and the number of samples inspected;
    `first` and 0 if all samples are alike, or cannot be inspected one by one."""
    for count in (_FIRST, _MOST):
        spread = torch.linspace(0, num_samples - 1, min(count, num_samples)).long()
        sizes = torch.tensor(sizes_alone(fetch, spread))
        if not len(sizes) or bool((sizes == sizes[0]).all()):
            return first, 0
    return spread[sizes.topk(min(len(first), len(sizes))).indices], len(sizes)


_STEPS_SEEN = 32
"""Number of global batches that are cut to determine the mean."""


def padded_of(task: Task, ghost: int | None = None) -> int | None:
    """Return the padded size of a mean global batch of `task`, in samples of the maximum length,
    rounded up to whole ghost batches of `ghost` samples. None if the lengths of the samples are not
    given and the global batch is in samples. If the batch grows, the largest batches are used."""
    if not is_map_style(task.train):
        return None
    steps = steps_of(task)
    first = _first_steps(task, steps, ghost)
    if first is not None:
        lengths, longest = first
        sizes = [_padded(of_step, longest, ghost) for of_step in lengths]
    elif tokens_of(task.global_batch) is not None:  # samples are alike, steps differ in number
        sizes, longest = [steps.num_samples_of(index) for index in _steps_seen(steps)], 1
    else:
        return None
    unit = ghost or 1
    return -(-sum(sizes) // (len(sizes) * longest * unit)) * unit


def _first_steps(
    task: Task, steps: Steps, ghost: int | None
) -> tuple[tuple[np.ndarray, ...], int] | None:
    """Return the lengths of the samples of the first global batches, in order, and the maximum
    length of all samples."""
    lengths = lengths_of(task.lengths, task.train, "training")
    if lengths is None:
        return None
    order = (
        Order(task.seed, len(lengths), task.shuffle)
        if ghost
        else ordered(task.seed, lengths, steps, task.shuffle)
    )
    seen = _steps_seen(steps)
    first = tuple(lengths_of_step(index, lengths, steps, order) for index in seen)
    return first, int(lengths.max())


def _steps_seen(steps: Steps) -> range:
    first = steps.largest_step
    return range(first, min(steps.total_steps or 1, first + _STEPS_SEEN))


def _padded(lengths: np.ndarray, longest: int, ghost: int | None) -> int:
    pieces = micro_batches_by_length(lengths, range(len(lengths)), longest, ghost)
    return sum(padded_size(lengths, piece) for piece in pieces)
