"""Copies of batches, taken before passes that may modify them in place (`x.div_(255)` in a loss, or
`batch.pop("labels")`).

A plain training loop applies such an operation once. A step that is redone, and the second pass of a
joint loss, need the original batch. Whether passes modify their batches is determined in the first
pass, for which a copy is always made; later copies are made only if they do.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from anybatch.data.batch_slices import map_leaves, names_of_fields, parts_of


@final
class BatchCopies:
    """Copies of the batches of the current step.

    Attributes:
        writes: whether passes modify their batches in place; None if not known yet.
    """

    def __init__(self) -> None:
        self.writes: bool | None = None
        self._kept: list[tuple[Any, Any, int]] = []
        self._contents: list[tuple[Any, Any]] = []  # containers, and what they held
        self._last = 0, 0

    def keep(self, batch: Any) -> None:
        """Copies `batch` before a pass, unless passes are known not to modify their batches."""
        self._last = len(self._kept), len(self._contents)
        if self.writes is not False:
            self._contents += _contents(batch)
            leaves = map(_once, _leaves(batch))
            self._kept += [(leaf, _copied(leaf), _version(leaf)) for leaf in leaves]

    def passed(self) -> None:
        """Called after the pass: discards the copy unless passes modify their batches."""
        leaves, containers = self._last
        if self.writes is None:
            changed = (not _is_same(*each) for each in self._contents[containers:])
            self.writes = any(changed) or any(map(_is_written, self._kept[leaves:]))
        if not self.writes:
            del self._kept[leaves:], self._contents[containers:]

    def put_back(self) -> None:
        """Restores the batches of this step to their original values."""
        for container, content in self._contents:
            if not _is_same(container, content):
                _fill(container, content)
        for leaf, copy, _ in self._kept:
            if isinstance(leaf, Tensor):
                leaf.data.copy_(copy)  # through .data: a graph may have saved this version
            else:
                np.copyto(leaf, copy)

    def forget(self) -> None:
        """Discards the copies at the end of the step."""
        self._kept.clear()
        self._contents.clear()


def _contents(batch: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the containers in `batch` that can be modified, each with a copy of its content."""
    content = _content(batch)
    if content is not None:
        yield batch, content
    for _, value in parts_of(batch) or ():
        yield from _contents(value)


def _content(node: Any) -> dict[Any, Any] | list[Any] | None:
    if isinstance(node, MutableMapping):
        return dict(node)
    if isinstance(node, list):
        return list(node)
    names = names_of_fields(node)
    return None if names is None else {name: getattr(node, name) for name in names}


def _is_same(container: Any, content: dict[Any, Any] | list[Any]) -> bool:
    """Whether `container` still holds the same objects in the same order."""
    now = _content(container)
    if isinstance(now, dict) and isinstance(content, dict):
        return list(now) == list(content) and all(now[key] is content[key] for key in content)
    assert now is not None
    return len(now) == len(content) and all(a is b for a, b in zip(now, content, strict=True))


def _fill(container: Any, content: Any) -> None:
    """Makes `container` hold `content` again."""
    if isinstance(container, list):
        container[:] = content
    elif isinstance(container, MutableMapping):
        container.clear()
        for key, value in content.items():
            container[key] = value
    else:
        for name, value in content.items():
            object.__setattr__(container, name, value)


def _leaves(batch: Any) -> list[Any]:
    """Returns the tensors and arrays in `batch` that a copy can be written back to."""
    parts = parts_of(batch)
    if parts is not None:
        return [leaf for _, value in parts for leaf in _leaves(value)]
    if isinstance(batch, np.ndarray):
        return [batch] if batch.flags.writeable and not batch.dtype.hasobject else []
    is_plain = type(batch) is Tensor and batch.layout is torch.strided and not batch.is_nested
    return [batch] if is_plain else []


def _once(leaf: Any) -> Any:
    return without_repeats(leaf, leaf) if isinstance(leaf, Tensor) else leaf


def without_repeats(values: Tensor, like: Tensor) -> Tensor:
    """Returns a view of `values` with each memory location of `like` (expanded, say) once:
    `Tensor.copy_` raises an error for tensors that have one several times."""
    for dim, stride in enumerate(like.stride()):
        if stride == 0 and like.size(dim) > 1:
            values = values.narrow(dim, 0, 1)
    return values


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf.copy()


def copied(batch: Any) -> Any:
    """Returns `batch` with its tensors and arrays copied."""
    return map_leaves(batch, lambda leaf: _copied(leaf) if _leaves(leaf) else leaf)


def apart(batch: Any, sample: Any) -> Any:
    """Returns `batch`, which was collated from one `sample`, with copies of the tensors and arrays that
    share memory with the sample. Otherwise a pass that modifies its batch in place would modify the
    data set, which does not happen when samples are stacked."""
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
