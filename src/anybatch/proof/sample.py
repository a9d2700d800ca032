"""The data of a proof, as a whole and in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anybatch.data import (
    Piece,
    Request,
    copied,
    evaluation_batches,
    is_map_style,
    map_leaves,
    open_fetch,
    permutation,
    sizes_alone,
    slice_batch,
)
from anybatch.errors import InputError
from anybatch.task import Task


@dataclass(frozen=True)
class Sample:
    """Some samples of the training data.

    Attributes:
        batch: all samples, collated together.
        order: indices of the samples in the data.
        fetch: collates some of the samples separately, as in training.
        once: whether pieces are sliced from `batch` instead.
        num_smallest: how many samples at the end have fewer elements than all others; 0 if all have the
            same number.
    """

    batch: object
    order: Tensor
    fetch: Callable[[Request], object]
    num_smallest: int = 0
    once: bool = False

    @property
    def size(self) -> int:
        """The number of samples."""
        return len(self.order)

    def cut(self, sizes: Sequence[int], dtype: torch.dtype) -> Iterator[object]:
        """Yield copies of pieces of these sizes, with floating-point values in `dtype`."""

        def cast(leaf: object) -> object:
            return in_precision(leaf, dtype) if isinstance(leaf, Tensor) else leaf

        start = 0
        for size in sizes:
            yield map_leaves(copied(self._piece(start, start + size)), cast)
            start += size

    def largest_first(self, count: int) -> Sample:
        """Return the first `count` samples, sorted by the number of elements that each has when
        collated separately, largest first. Pieces are then padded to different lengths, so that code
        which does not mask padding is detected."""
        order, smallest = self.order[:count], 0
        if elements := sizes_alone(self.fetch, order):
            order = order[torch.tensor(elements).argsort(descending=True, stable=True)]
            smallest = elements.count(min(elements))
        return Sample(self.fetch([Piece(0, order)]), order, self.fetch, smallest % count)

    def repeated(self) -> Sample:
        """Return the same samples, each twice."""
        order = self.order.repeat(2)
        return Sample(self.fetch([Piece(0, order)]), order, self.fetch)

    def _piece(self, start: int, stop: int) -> object:
        if self.once or stop - start == self.size:
            return self.batch if stop - start == self.size else slice_batch(self.batch, start, stop)
        return self.fetch([Piece(0, self.order[start:stop])])


def in_precision(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert `tensor` to `dtype` if it is floating-point, or to the complex dtype of that precision if
    it is complex."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def sample_of(task: Task, wanted: int) -> Sample:
    """Return the first samples of the first epoch of `task`, at most `wanted`. Raises `InputError` if
    there are fewer than two."""
    data = task.train
    if is_map_style(data):
        order = permutation(task.seed, 0, len(data), task.shuffle)[:wanted]
    else:
        data = next(
            (rows for rows, _ in evaluation_batches(data, list, wanted, seed=task.seed)), []
        )
        order = torch.arange(len(data))
    if len(order) > 1:
        fetch = open_fetch(data, task.collate, task.seed)
        return Sample(fetch([Piece(0, order)]), order, fetch)
    raise InputError(
        f"the training data of task {task.name!r} has a single sample, which cannot be cut:"
        " there is nothing to prove."
    )
