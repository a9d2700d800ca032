"""Course: what a run does beside full micro-batches, as far as it takes memory.

A trace shows one micro-batch of one size. A run also meets smaller ones, at the end of a step or of an
epoch, and evaluates. Each size of batch has generated kernels of its own, which stay with the process,
so the sizes are counted here; and so is the order of samples, which is kept for an epoch or two.
"""

from __future__ import annotations

from dataclasses import dataclass

from anybatch.data import is_map_style, num_samples_of
from anybatch.data.schedule import Steps
from anybatch.task import Task

_INDEX_BYTES = 8
_ORDERS_KEPT = 2


@dataclass(frozen=True, slots=True)
class Course:
    """How a run goes.

    Attributes:
        smaller_steps: sizes of global steps below the global batch.
        evaluates_between: it evaluates before its last step, so that later ones have the kernels of
            evaluation beside them.
        order_bytes: indices of the epochs that are kept.
    """

    smaller_steps: tuple[int, ...] = ()
    evaluates_between: bool = False
    order_bytes: int = 0

    def num_sizes(self, micro_batch: int, whole_step: int) -> int:
        """Different sizes of micro-batches, where a whole step is one of `whole_step` samples."""
        steps = (whole_step, *self.smaller_steps)
        return len({size for step in steps for size in _cut(step, micro_batch)})


def num_evaluation_sizes(evaluation_batch: int, num_valid: int | None) -> int:
    """Different sizes of batches of an evaluation; None: of a stream, whose last one is smaller."""
    return 2 if num_valid is None else len(_cut(num_valid, evaluation_batch))


def course_of(task: Task) -> Course:
    """The course of `task`. Of a stream nothing is known, so it is taken to evaluate early."""
    if not is_map_style(task.train):
        return Course(evaluates_between=task.valid is not None)
    steps = Steps(
        num_samples_of(task.train),
        task.global_batch,
        task.last,
        task.epochs,
        task.steps,
        task.samples,
    )
    total = steps.total_steps or 0
    per_epoch = max(1, -(-steps.epoch_samples // task.global_batch))
    # Steps differ at the ends of epochs and of the run; epochs are alike.
    ends = {number for number in (per_epoch - 1, total - 1) if 0 <= number < total}
    sizes = {steps.num_samples_of(number) for number in ends}
    first = task.evaluate_every or per_epoch
    epochs = min(_ORDERS_KEPT, steps.epoch_of(max(0, total - 1)) + 1)
    return Course(
        smaller_steps=tuple(sorted(size for size in sizes if 0 < size < task.global_batch)),
        evaluates_between=task.valid is not None and first < total,
        order_bytes=epochs * _INDEX_BYTES * (steps.num_samples or 0),
    )


def _cut(num_samples: int, size: int) -> set[int]:
    """The sizes of the pieces of so many samples."""
    return {min(num_samples, size), num_samples % size} - {0}
