"""Samples: what a trace needs to know of a task's data.

A few real samples as one batch, from whose shapes batches of any size are made. Where samples differ in
size, what a pass takes goes by the largest of them: of given lengths the longest are known; without
them some samples, spread over the data, are looked at one by one if `collate` is the task's own, since
torch's puts together only what is alike.

The padded size of a mean global batch, if lengths are given. And what a step holds in addition to its
batch: of a stream all samples of a global step until it is committed, since it may have to be redone;
under a joint loss those that wait until they are computed with a second time.
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
from anybatch.data.cut import positions
from anybatch.data.microbatch import samples_left
from anybatch.errors import DataError
from anybatch.task import JointLoss, Task


@dataclass(frozen=True, slots=True)
class Samples:
    """Bytes of samples that a step holds in host memory in addition to its batch.

    Attributes:
        held_bytes: of all samples of a global step of a stream, while it lasts.
        waiting_bytes: of each sample that waits under a joint loss (see `compute.joint`).
    """

    held_bytes: int = 0
    waiting_bytes: int = 0


def samples_of(task: Task, batch: Any) -> Samples:
    """What the samples of `task` take, by a `batch` of it."""
    sample_bytes = sum(_blocks(batch)) // samples_left(batch, NUM_SAMPLES)
    return Samples(
        held_bytes=0 if is_map_style(task.train) else largest_batch(task) * sample_bytes,
        waiting_bytes=sample_bytes if isinstance(task.loss, JointLoss) else 0,
    )


def _blocks(node: Any) -> Iterator[int]:
    """Bytes of the numbers of each tensor and array in a batch."""
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
"""That a template has, where there are as many."""

_MOST_BAD = 100  # samples passed over, where that is asked for, in search of two to plan by

_FIRST, _MOST = 8, 64
"""Samples that are looked at: to see whether they differ at all, and where they do."""

_NO_BATCHES = (bool, int, float, str, bytes, type(None))


def template_of(task: Task) -> tuple[Any, int]:
    """The first samples, or the largest, as one batch; and how many were looked at, if they differ in
    size and no lengths are given, else 0. They are fetched as training fetches them, so what is wrong
    with one is told in the same words.

    Raises `DataError` if the samples cannot be read or collated.
    """
    gaps: list[int] = []
    while True:
        try:
            batch, looked_at = _first_batch(task, gaps)
            # Another collate may well make batches that do not show their size.
            if task.collate is None or isinstance(batch, _NO_BATCHES):
                batch_size(batch)
            return batch, looked_at
        except BadSamples as error:
            if task.bad_data == "stop" or len(gaps) >= _MOST_BAD:
                raise
            gaps = sorted({*gaps, *(bad.place.position for bad in error.bad)})


def _first_batch(task: Task, gaps: Sequence[int]) -> tuple[Any, int]:
    """See `template_of`; without the samples at `gaps` (indices)."""
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
    """The samples to plan by, as many as are `first`, and how many were looked at; those and 0 if all
    are alike, or cannot be looked at one by one."""
    for count in (_FIRST, _MOST):
        spread = torch.linspace(0, num_samples - 1, min(count, num_samples)).long()
        sizes = torch.tensor(sizes_alone(fetch, spread))
        if not len(sizes) or bool((sizes == sizes[0]).all()):
            return first, 0
    return spread[sizes.topk(min(len(first), len(sizes))).indices], len(sizes)


_STEPS_SEEN = 32
"""Global batches that are cut to find the mean."""


def padded_of(task: Task, ghost: int | None = None) -> int | None:
    """The padded size of a mean global batch of `task` in samples of the longest, rounded up to whole
    ghost batches of `ghost` samples; None if the lengths of its samples are not given, and the global
    batch is in samples. Of a batch that grows the largest ones are looked at."""
    if not is_map_style(task.train):
        return None
    steps = steps_of(task)
    first = _first_steps(task, steps, ghost)
    if first is not None:
        lengths, longest = first
        sizes = [_padded(of_step, longest, ghost) for of_step in lengths]
    elif tokens_of(task.global_batch) is not None:  # samples are alike, and steps differ in number
        sizes, longest = [steps.num_samples_of(index) for index in _steps_seen(steps)], 1
    else:
        return None
    unit = ghost or 1
    return -(-sum(sizes) // (len(sizes) * longest * unit)) * unit


def _first_steps(
    task: Task, steps: Steps, ghost: int | None
) -> tuple[tuple[np.ndarray, ...], int] | None:
    """Lengths of the samples of the first global batches, in their order, and the longest of all."""
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
