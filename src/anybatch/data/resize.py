"""A batch of any size that looks like a small one: for planning, where only shapes matter."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from anybatch.data.microbatch import batch_size, has_records, is_samples, parts_of, rebuilt
from anybatch.errors import DataError


class NoSizes(Exception):
    """Of a batch none of another size can be made: it does not show how many samples it has, or is of
    a kind that has no empty one."""


def resized(batch: Any, num_samples: int) -> Any:
    """`batch` with `num_samples` samples: tensors are new and empty, samples in lists repeat.

    Raises `NoSizes` if that cannot be done.
    """
    try:
        size = batch_size(batch)
    except DataError as error:
        raise NoSizes(str(error)) from error
    return _resized(batch, size, num_samples, has_records(batch, size))


def _resized(node: Any, size: int, wanted: int, beside: bool) -> Any:
    odd = isinstance(node, Tensor) and (node.layout is not torch.strided or node.is_nested)
    if odd or isinstance(node, PackedSequence):
        raise NoSizes(f"a {type(node).__name__} of another size cannot be made of one")
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
