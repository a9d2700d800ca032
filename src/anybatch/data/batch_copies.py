"""Batch copies: batches as they were before passes that write to them (`x.div_(255)` in a loss).

A plain loop applies such work once. A step that is done again, and the second pass of a joint loss,
need the batch as it was. Whether passes write to it shows in the first one, of whose batch a copy is
made in any case; after that copies are made only where they do.
"""

from __future__ import annotations

from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from anybatch.data.microbatch import map_leaves, parts_of


@final
class BatchCopies:
    """Copies of the batches of one step.

    Attributes:
        writes: whether passes write to their batches; None: not known yet.
    """

    def __init__(self) -> None:
        self.writes: bool | None = None
        self._kept: list[tuple[Any, Any, int]] = []
        self._last = 0

    def keep(self, batch: Any) -> None:
        """Before a pass over `batch`: copy it, unless passes are known not to write."""
        self._last = len(self._kept)
        if self.writes is not False:
            self._kept += [(leaf, _copied(leaf), _version(leaf)) for leaf in _leaves(batch)]

    def passed(self) -> None:
        """After that pass: let the copy go if it was not written to."""
        if self.writes is None:
            self.writes = any(map(_is_written, self._kept[self._last :]))
        if not self.writes:
            del self._kept[self._last :]

    def put_back(self) -> None:
        """Make the batches of this step as they were."""
        for leaf, copy, _ in self._kept:
            if isinstance(leaf, Tensor):
                leaf.data.copy_(copy)  # through .data: a graph may have saved this version
            else:
                np.copyto(leaf, copy)

    def forget(self) -> None:
        """The step is over."""
        self._kept.clear()


def _leaves(batch: Any) -> list[Any]:
    """The tensors and arrays in `batch` that can be copied into."""
    parts = parts_of(batch)
    if parts is not None:
        return [leaf for _, value in parts for leaf in _leaves(value)]
    if isinstance(batch, np.ndarray):
        return [batch] if batch.flags.writeable and not batch.dtype.hasobject else []
    is_plain = type(batch) is Tensor and batch.layout is torch.strided and not batch.is_nested
    return [batch] if is_plain else []


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf.copy()


def copied(batch: Any) -> Any:
    """`batch` with tensors and arrays of its own."""
    return map_leaves(batch, lambda leaf: _copied(leaf) if _leaves(leaf) else leaf)


def apart(batch: Any, sample: Any) -> Any:
    """`batch`, which was collated from one `sample`, with copies of what they share: else a pass that
    writes to its batch would write to the data set, which is not so where samples are stacked."""
    theirs = {_storage(leaf) for leaf in _leaves(sample)}
    return map_leaves(
        batch,
        lambda leaf: _copied(leaf) if _leaves(leaf) and _storage(leaf) in theirs else leaf,
    )


def _storage(leaf: Any) -> int:
    """The address of the memory that holds `leaf`."""
    if isinstance(leaf, Tensor):
        return leaf.untyped_storage().data_ptr()
    while isinstance(leaf.base, np.ndarray):
        leaf = leaf.base
    return leaf.__array_interface__["data"][0]


def _version(leaf: Any) -> int:
    return leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0


def _is_written(kept: tuple[Any, Any, int]) -> bool:
    leaf, copy, version = kept
    if isinstance(leaf, Tensor):
        return not torch.equal(leaf, copy) if leaf.is_inference() else leaf._version != version
    return leaf.tobytes() != copy.tobytes()
