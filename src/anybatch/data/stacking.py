"""Stacking: what torch's `default_collate` makes of samples, put into the batch a few at a time.

Handed all samples at once, it doubles a batch for a moment. Worse, samples that are made when they
are asked for come from the heap where they are small, what stays comes to lie behind them, and the heap
keeps the memory that they had. Here `AT_ONCE` of them are there at a time:

    samples   | 0 .. 63 | 64 .. 127 | 128 .. 191 |    each group is gone before the next is made
    batch     [ 0 .. 63 | 64 .. 127 | 128 .. 191 ]    allocated with the first group
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from anybatch.data.microbatch import map_leaves

AT_ONCE = 64
"""Samples that are there at a time: enough that a call of `default_collate` is cheap for each."""


class Unlike(Exception):
    """The samples are none that can be put together in groups: something in them is no tensor, or one
    group differs from another."""


def stacked(samples: Iterable[Any], num: int) -> Any:
    """The batch of `num` samples, as `default_collate` would return it for all of them.

    Raises `Unlike` if they cannot be stacked in groups, which does not mean that they cannot be
    collated at once; and what `default_collate` raises for a group.
    """
    rest = iter(samples)
    batch = default_collate(list(islice(rest, AT_ONCE)))
    if num <= AT_ONCE:
        return batch
    batch = map_leaves(batch, lambda leaf: _with_room(leaf, num))
    spaces = _tensors(batch)
    for start in range(AT_ONCE, num, AT_ONCE):
        group = _tensors(default_collate(list(islice(rest, AT_ONCE))))
        if len(group) != len(spaces):
            raise Unlike
        for space, rows in zip(spaces, group, strict=True):
            _fill(space[start : start + AT_ONCE], rows)
    return batch


def _with_room(leaf: Any, num: int) -> Tensor:
    """Room for `num` rows, the first of which are those of `leaf`."""
    if type(leaf) is not Tensor or leaf.requires_grad:
        raise Unlike
    room = leaf.new_empty((num, *leaf.shape[1:]))
    _fill(room[:AT_ONCE], leaf)
    return room


def _fill(space: Tensor, rows: Tensor) -> None:
    if rows.dtype != space.dtype or rows.shape != space.shape:
        raise Unlike
    space.copy_(rows)


def _tensors(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            raise Unlike
        found.append(leaf)
        return leaf

    map_leaves(batch, note)
    return found
