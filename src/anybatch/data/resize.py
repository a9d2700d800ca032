"""A batch of any size that looks like a small one: for planning, where only shapes matter."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from anybatch.data.microbatch import batch_size, has_records, is_samples, parts_of, rebuilt


def resized(batch: Any, num_samples: int) -> Any:
    """`batch` with `num_samples` samples: tensors are new and empty, samples in lists repeat.

    Raises `DataError` as `batch_size` does.
    """
    size = batch_size(batch)
    return _resized(batch, size, num_samples, has_records(batch, size))


def _resized(node: Any, size: int, wanted: int, beside: bool) -> Any:
    if isinstance(node, Tensor):
        if node.dim() and len(node) == size:
            return node.new_empty((wanted, *node.shape[1:]))
        return node
    if isinstance(node, np.ndarray):
        if node.ndim and len(node) == size:
            return np.empty((wanted, *node.shape[1:]), node.dtype)
        return node
    parts = parts_of(node)
    if not parts:
        return node
    if is_samples(node, size, beside):
        return type(node)(node[i % size] for i in range(wanted))
    return rebuilt(node, [_resized(value, size, wanted, beside) for _, value in parts])
