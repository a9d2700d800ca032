"""Padding: the padded size of a mean global batch whose samples differ in length."""

from __future__ import annotations

import numpy as np

from anybatch.batch_rule import tokens_of
from anybatch.data import (
    Order,
    Steps,
    is_map_style,
    lengths_of,
    lengths_of_step,
    micro_batches_by_length,
    ordered,
    padded_size,
    steps_of,
)
from anybatch.task import Task

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
