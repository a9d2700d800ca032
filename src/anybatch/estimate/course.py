"""Course: what a run does beside full micro-batches, as far as it takes memory.

A trace shows one micro-batch of one size. A run also meets smaller ones, at the end of a step or of an
epoch, and evaluates. Each size of batch has generated kernels of its own, which stay with the process,
so the sizes are counted here; and so is the order of samples, which is kept for an epoch or two. Where
samples differ in length, the first steps show which sizes there are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from anybatch.data import (
    Order,
    Steps,
    is_map_style,
    lengths_of,
    lengths_of_step,
    micro_batches_by_length,
    open_fetch,
    ordered,
    padded_size,
    steps_of,
)
from anybatch.task import Task

_INDEX_BYTES = 8
_ORDERS_KEPT = 2

_TO_SPEAK_BYTES, _WORKER_BYTES = 160 << 10, 36 << 10
"""Taken to speak to worker processes: once (modules, objects), and for each a thread, a queue and its
locks (1 to 8 workers, for training and for evaluation, took 0.8 to 1.0 times that, resident)."""

_STEPS_SEEN = 32
"""Global batches of unequal samples that are looked at."""

_MOST_KERNELS = 1024
"""oneDNN keeps no more kernels than these, by default."""


@dataclass(frozen=True, slots=True)
class Course:
    """How a run goes.

    Attributes:
        smaller_steps: sizes of global steps below the global batch.
        evaluates_between: it evaluates before its last step, so that later ones have the kernels of
            evaluation beside them.
        order_bytes: indices of the epochs that are kept, and lengths.
        worker_bytes: taken to speak to the processes that load samples. Their own are not the run's.
        total_steps: of the run; None: not known.
        unequal: how samples differ in length; None: they are alike.
    """

    smaller_steps: tuple[int, ...] = ()
    evaluates_between: bool = False
    order_bytes: int = 0
    worker_bytes: int = 0
    total_steps: int | None = None
    unequal: Unequal | None = None

    def num_sizes(self, micro_batch: int, whole_step: int) -> int:
        """Different sizes of micro-batches, where a whole step is one of `whole_step` samples."""
        if self.unequal is not None:
            return self.unequal.num_sizes(micro_batch)
        return len(self.sizes(micro_batch, whole_step))

    def num_kernels_of_data(self, num_products: int, num_passes: int) -> int:
        """Kernels that are made for products whose sizes are data, where a step has so many passes of
        so many products: hardly any meets a size twice, and oneDNN forgets the oldest."""
        if self.total_steps is None:
            return _MOST_KERNELS
        return min(num_products * num_passes * self.total_steps, _MOST_KERNELS)

    def num_evaluation_sizes(
        self, evaluation_batch: int, num_valid: int | None, seen: Collection[int] = ()
    ) -> int:
        """Different sizes of batches of an evaluation of so many samples, beside those `seen` before;
        None: of a stream, whose last batch is smaller."""
        if self.unequal is not None and num_valid:
            return min(num_valid, self.unequal.num_sizes(evaluation_batch))
        if num_valid is None:
            return 1 + (evaluation_batch not in seen)
        return len(_cut(num_valid, evaluation_batch).difference(seen))

    def sizes(self, micro_batch: int, whole_step: int) -> set[int]:
        """The sizes of micro-batches, as `num_sizes`, where all samples are alike."""
        steps = (whole_step, *self.smaller_steps)
        return {size for step in steps for size in _cut(step, micro_batch)}


@dataclass(frozen=True, eq=False)
class Unequal:
    """How the samples of a run differ in length.

    Attributes:
        steps: lengths of the samples of the first global batches, in their order.
        total_steps: of the run.
        longest: of all lengths.
        ghost: samples that are never parted, or None.
    """

    steps: tuple[np.ndarray, ...]
    total_steps: int
    longest: int
    ghost: int | None

    def num_sizes(self, micro_batch: int) -> int:
        """Different shapes that padded micro-batches of so many of the longest have in the run."""
        seen = {
            (len(piece), int(lengths[piece.start : piece.stop].max()))
            for lengths in self.steps
            for piece in self._cut(lengths, micro_batch)
        }
        in_all = len(seen) * max(1, self.total_steps // max(1, len(self.steps)))
        return min(in_all, _MOST_KERNELS)

    @property
    def padded(self) -> int:
        """The padded size of a mean global batch, in samples of the longest; whole ghost batches."""
        sizes = [
            sum(padded_size(lengths, piece) for piece in self._cut(lengths, 1))
            for lengths in self.steps
        ]
        unit = self.ghost or 1
        return -(-sum(sizes) // (len(sizes) * self.longest * unit)) * unit

    def _cut(self, lengths: np.ndarray, micro_batch: int) -> list[range]:
        most = micro_batch * self.longest
        return micro_batches_by_length(lengths, range(len(lengths)), most, self.ghost)


def course_of(task: Task, ghost: int | None = None) -> Course:
    """The course of `task` with ghost batches of so many samples. Of a stream nothing is known, so it
    is taken to evaluate early."""
    if not is_map_style(task.train):
        return Course(evaluates_between=task.valid is not None)
    steps = steps_of(task)
    total = steps.total_steps or 0
    per_epoch = max(1, -(-steps.epoch_samples // task.global_batch))
    # Steps differ at the ends of epochs and of the run; epochs are alike.
    ends = {index for index in (per_epoch - 1, total - 1) if 0 <= index < total}
    sizes = {steps.num_samples_of(index) for index in ends}
    first = task.evaluate_every or per_epoch
    kept = min(_ORDERS_KEPT, steps.epoch_of(max(0, total - 1)) + 1)
    unequal = _unequal(task, steps, ghost)
    if unequal is not None:
        kept += 1  # the lengths
    return Course(
        smaller_steps=tuple(sorted(size for size in sizes if 0 < size < task.global_batch)),
        evaluates_between=task.valid is not None and first < total,
        order_bytes=kept * _INDEX_BYTES * (steps.num_samples or 0),
        worker_bytes=_worker_bytes(task),
        total_steps=total or None,
        unequal=unequal,
    )


def _worker_bytes(task: Task) -> int:
    sets = [task.train] if task.valid is None else [task.train, task.valid]
    served = [
        one
        for one in sets
        if is_map_style(one) and not open_fetch(one, task.collate, task.seed).in_memory
    ]
    if not (task.num_workers and served):
        return 0
    # Those that load training samples wait while others load held-out ones.
    return _TO_SPEAK_BYTES + len(served) * task.num_workers * _WORKER_BYTES


def _unequal(task: Task, steps: Steps, ghost: int | None) -> Unequal | None:
    lengths = lengths_of(task.lengths, task.train, "training")
    if lengths is None:
        return None
    order = (
        Order(task.seed, len(lengths), task.shuffle)
        if ghost
        else ordered(task.seed, lengths, steps, task.shuffle)
    )
    total = steps.total_steps or 1
    seen = range(min(total, _STEPS_SEEN))
    first = tuple(lengths_of_step(index, lengths, steps, order) for index in seen)
    return Unequal(first, total, int(lengths.max()), ghost)


def _cut(num_samples: int, size: int) -> set[int]:
    """The sizes of the pieces of so many samples."""
    return {min(num_samples, size), num_samples % size} - {0}
