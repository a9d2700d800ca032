"""Samples: tensors of samples that a step holds in addition to its batch.

Of a stream all samples of a global step are held until it is committed, since it may have to be redone.
Under a joint loss the samples of a step wait in micro-batches until they are computed with a second
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anybatch.data import is_map_style, largest_batch, parts_of
from anybatch.data.microbatch import samples_left
from anybatch.estimate.template import NUM_SAMPLES
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
