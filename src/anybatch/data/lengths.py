"""Samples of unequal length: their lengths, and how they are grouped.

Micro-batches are cut by padded size (number of samples times the longest length), ranks take parts of
equal total length, and the samples of a global batch are sorted by length, longest first:

    lengths         9 9 8 | 4 4 3 3 2 2 | 1 1 1 ...      micro-batches of at most 27 padded tokens

In steps that measure the noise of gradients, some samples precede the sorted ones, in the order in
which they were drawn, since the longest samples are not representative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from numbers import Integral
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from anybatch.data.cut import share
from anybatch.data.order import Order
from anybatch.data.schedule import Steps, measures_noise
from anybatch.errors import InputError

LengthsOf: TypeAlias = "Sequence[int] | Callable[[Any], Sequence[int]]"
"""The lengths of a data set's samples, or a function that returns them for a data set."""


@dataclass(frozen=True, eq=False)
class Extent:
    """The size of a global batch, or of another sequence of samples.

    Attributes:
        num_samples: number of samples.
        lengths: their lengths, in order: int64, shape `[num_samples]`; None if samples do not differ in
            length.
        num_drawn: number of leading samples in the order in which they were drawn, regardless of their
            length. The noise of gradients is measured on them. 0 if samples do not differ in length.
    """

    num_samples: int
    lengths: np.ndarray | None = None
    num_drawn: int = 0

    def share(self, shares: Sequence[float | int], rank: int, ghost: int | None = None) -> range:
        """Returns the part that `rank` takes: by total length if lengths are known, otherwise by number
        of samples; see `share_by_length` and `share`."""
        if self.lengths is None:
            return share(self.num_samples, shares, rank, ghost or 1)
        return share_by_length(self.lengths, shares, rank, ghost)

    def amount(self, part: range) -> int:
        """Returns the total length of the samples at positions `part`, or their number if there are no
        lengths."""
        return (
            len(part) if self.lengths is None else int(self.lengths[part.start : part.stop].sum())
        )


def lengths_of(given: LengthsOf | None, dataset: Any, name: str) -> Tensor | None:
    """Returns the lengths of the samples of the map-style `dataset`: int64, shape `[num_samples]`; None
    if none are given. A length of zero counts as one: such a sample is computed like any other.

    Args:
        given: see `Task.lengths`.
        dataset: the data set.
        name: its name, for messages.

    Raises `InputError` if they are not one nonnegative integer per sample.
    """
    if given is None:
        return None
    try:
        known = _known.get(dataset)
    except TypeError:  # a list, say
        known = None
    for source, lengths in known or ():
        if source is given and len(lengths) == len(dataset):
            return lengths
    lengths = _checked(given(dataset) if callable(given) else given, dataset, name)
    with suppress(TypeError):
        _known[dataset] = [*(known or ())[-1:], (given, lengths)]
    return lengths


_known: WeakKeyDictionary[Any, Sequence[tuple[LengthsOf, Tensor]]] = WeakKeyDictionary()
"""The last lengths found for a data set, by `Task.lengths` and by `Tokens.of`. They are cached since
finding them may require reading the whole data set."""


def _checked(found: Any, dataset: Any, name: str) -> Tensor:
    array = np.asarray(found.cpu() if isinstance(found, Tensor) else found)
    if array.dtype.kind not in "iu" or array.ndim != 1 or (array < 0).any():
        pairs = enumerate(found) if isinstance(found, list | tuple) else ()
        at = next((it for it in pairs if not isinstance(it[1], Integral) or it[1] < 0), None)
        fault = f"they are {array.dtype} of shape {array.shape}"
        raise InputError(
            f"the lengths of the {name} samples cannot be used"
            f" ({f'that of sample {at[0]} is {at[1]!r}' if at else fault}): give one whole number of at"
            " least zero for each sample, or a function from a data set to the lengths of its samples."
        )
    if len(array) != len(dataset):
        raise InputError(
            f"there are {len(array)} lengths for {len(dataset)} {name} samples: give one for each"
            " (or a function from a data set to the lengths of its samples)."
        )
    return torch.from_numpy(array.astype(np.int64, copy=False)).clamp(min=1)


def longest_first(lengths: Tensor, steps: Steps, order: Tensor, epoch: int) -> Tensor:
    """Returns `order`, the samples of `epoch`, with the samples of each global step sorted by
    `lengths`, longest first; ties keep their order. In a step that measures noise, the first samples
    (`num_drawn`) keep their order, and stay before all others."""
    step = steps.steps_in(epoch)
    first = torch.from_numpy(_is_drawn(steps, step))
    keys = lengths[order].masked_fill(first, torch.iinfo(torch.int64).max)
    by_length = torch.argsort(keys, descending=True, stable=True)
    return order[by_length[torch.argsort(torch.from_numpy(step)[by_length], stable=True)]]


_ONE_OF = 16


def least_drawn(num_samples: int) -> int:
    """Returns the number of samples on which the noise of a step of `num_samples` is measured: few,
    since they are padded like unsorted samples, but one of 16 of a step, so that single outliers do not
    dominate."""
    return -(-num_samples // _ONE_OF) if num_samples > 1 else 0


def num_drawn(index: int, steps: Steps, by_length: bool) -> int:
    """Returns `Extent.num_drawn` of step `index`. `by_length`: whether its samples are sorted by
    `longest_first`."""
    if not measures_noise(index):
        return 0
    if not by_length:
        return steps.num_samples_of(index)
    is_in_one_epoch = len(steps.samples_of(index)) == 1
    return least_drawn(steps.num_samples_of(index)) if is_in_one_epoch else 0


def _is_drawn(steps: Steps, step: np.ndarray) -> np.ndarray:
    """Returns which positions of an epoch stay first in their step, as counted by `num_drawn`. `step`:
    the step of each position, in order."""
    starts = np.flatnonzero(np.diff(step, prepend=-1))
    counts = [num_drawn(int(index), steps, by_length=True) for index in step[starts]]
    sizes = np.diff(np.append(starts, len(step)))
    return np.arange(len(step)) < np.repeat(starts + np.asarray(counts), sizes)


def ordered(seed: int, lengths: Tensor, steps: Steps, shuffle: bool) -> Order:
    """Returns the order in which the samples of each global step are sorted by `longest_first`."""
    return Order(seed, len(lengths), shuffle, partial(longest_first, lengths, steps))


def lengths_of_step(index: int, lengths: Tensor, steps: Steps, order: Order) -> np.ndarray:
    """Returns the lengths of the samples of step `index`, in the order of `order`."""
    return torch.cat([lengths[order.indices(*span)] for span in steps.samples_of(index)]).numpy()


def share_by_length(
    lengths: np.ndarray, shares: Sequence[float | int], rank: int, ghost: int | None
) -> range:
    """Returns the contiguous part of samples with `lengths` that `rank` takes: its share of their total
    length, as nearly as whole samples (or ghost batches) allow. The parts of all ranks together are all
    samples; a rank may get none."""
    sizes, _ = _units(lengths, ghost)
    stops = np.concatenate(([0], np.cumsum(sizes)))
    reached = np.concatenate(([0], np.cumsum(lengths)))[stops]  # total length up to each boundary
    weights = [Fraction(share) for share in shares]  # exact, so that all ranks compute the same
    total = sum(weights, Fraction())
    wanted = [int(reached[-1]) * sum(weights[:n], Fraction()) / total for n in (rank, rank + 1)]
    first, last = (_nearest(reached, value) for value in wanted)
    return range(int(stops[first]), int(stops[last]))


def _nearest(values: np.ndarray, wanted: Fraction) -> int:
    """Returns the index of the nearest of `values`, which are in ascending order; the lower one in a
    tie."""
    above = int(np.searchsorted(values, float(wanted)))
    near = range(max(0, above - 1), min(len(values), above + 2))
    return min(near, key=lambda at: (abs(int(values[at]) - wanted), at))


def micro_batches_by_length(
    lengths: np.ndarray, part: range, most: int, ghost: int | None
) -> list[range]:
    """Cuts `part` of a global batch whose samples have `lengths` into pieces with a padded size (number
    of samples times the longest length) of at most `most`. A sample, or a ghost batch (which is never
    split), that exceeds it alone forms its own piece."""
    sizes, longest = _units(lengths[part.start : part.stop], ghost)
    stops = part.start + np.concatenate(([0], np.cumsum(sizes)))
    pieces: list[range] = []
    first = 0
    while first < len(sizes):
        # Upper bound on the number of units: each has at least one sample, padded to this length.
        window = slice(first, first + max(1, most // int(longest[first])))
        padded = np.maximum.accumulate(longest[window]) * np.cumsum(sizes[window])
        last = first + max(1, int(np.searchsorted(padded, most, side="right")))
        pieces.append(range(int(stops[first]), int(stops[last])))
        first = last
    return pieces


def padded_size(lengths: np.ndarray, piece: range) -> int:
    """Returns the size of `piece` after padding."""
    return len(piece) * int(lengths[piece.start : piece.stop].max()) if piece else 0


def _units(lengths: np.ndarray, ghost: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of samples and the longest length of each indivisible unit: ghost batches, or
    single samples."""
    if not ghost or not len(lengths):
        return np.ones_like(lengths), lengths
    starts = np.arange(0, len(lengths), ghost)
    if len(starts) > 1 and len(lengths) % ghost == 1:
        starts = starts[:-1]  # as in `ghosts`: a remainder of one joins the ghost batch before it
    sizes = np.diff(np.append(starts, len(lengths)))
    return sizes, np.maximum.reduceat(lengths, starts)
