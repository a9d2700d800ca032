"""Template: a few real samples as one batch, from whose shapes batches of any size are made.

Where samples differ in size, what a pass takes goes by the largest of them. Of given lengths the
longest are known. Without them some samples, spread over the data, are looked at one by one if
`collate` is the task's own: torch's puts together only what is alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anybatch.data import (
    BadSamples,
    Piece,
    batch_size,
    evaluation_batches,
    is_map_style,
    lengths_of,
    open_fetch,
    sizes_alone,
)
from anybatch.data.cut import positions
from anybatch.errors import DataError
from anybatch.task import Task

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
