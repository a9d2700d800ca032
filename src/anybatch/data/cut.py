"""Cuts a global batch into rank shares, ghost batches for BatchNorm, and micro-batches.

All functions are pure functions of integers; positions are relative to the start of the global batch.
Cuts are nested: neither a share nor a micro-batch splits a ghost batch (except in `divided_ghosts`), so
BatchNorm sees the same samples together regardless of the number of ranks and the micro-batch size.

    global batch   0 1 2 3 4 5 6 7 8 9 10 11 12     13 samples
    ghosts of 4    |-------|-------|------------|   a remainder of one joins its neighbor
    shares         |---------------|------------|   2 ranks
    micro-batches  |-------|-------|------------|   of 4
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import final, overload

from anybatch.errors import InputError
from anybatch.plans import num_units


def share(num_samples: int, shares: Sequence[float | int], rank: int, unit: int = 1) -> range:
    """Returns the contiguous part of a global batch that `rank` takes, in proportion to `shares`.

    Whole units are apportioned by the largest-remainder method; ties go to the lower rank. Boundaries
    are multiples of `unit` (the ghost batch size); a trailing unit of one sample is merged into its
    neighbor. A rank may receive nothing. The parts of all ranks together are exactly
    `range(num_samples)`.

    Raises `InputError` if the shares are not nonnegative numbers with a positive sum.
    """
    bounds = _boundaries(num_samples, tuple(shares), unit)
    return range(bounds[rank], bounds[rank + 1])


@lru_cache(maxsize=64)  # all steps of a run use the same few arguments
def _boundaries(num_samples: int, shares: tuple[float | int, ...], unit: int) -> tuple[int, ...]:
    if not shares or not all(math.isfinite(s) and s >= 0 for s in shares) or sum(shares) <= 0:
        raise InputError(
            f"the shares of the ranks are {list(shares)}: give each rank a number of at least zero,"
            " and at least one of them a number above zero."
        )
    weights = [Fraction(s) for s in shares]  # exact, so that all ranks compute the same boundaries
    total = sum(weights)
    count = num_units(num_samples, unit)  # as `ghosts` cuts them
    ideal = [count * weight / total for weight in weights]
    units = [math.floor(part) for part in ideal]
    by_remainder = sorted(range(len(shares)), key=lambda r: (units[r] - ideal[r], r))
    for rank in by_remainder[: count - sum(units)]:
        units[rank] += 1

    bounds, taken = [0], 0
    for own in units:
        taken += own
        bounds.append(num_samples if taken == count else taken * unit)
    return tuple(bounds)


def around(part: range, gaps: Sequence[int]) -> list[range]:
    """Returns the ranges of the whole batch that hold the samples `part` of a batch without those at
    `gaps` (sorted):

        whole   0 1 2 3 4 5 6 7        gaps 2 and 5
        kept    0 1   2 3   4 5        kept samples 1 to 4 are at 1, at 3 and 4, and at 6
    """
    stretches, start, shift = [], part.start, 0
    for gap in gaps:
        stop = min(part.stop, gap - shift)
        if stop > start:
            stretches.append(range(start + shift, stop + shift))
            start = stop
        shift += 1
    if part.stop > start:
        stretches.append(range(start + shift, part.stop + shift))
    return stretches


def positions(part: range, gaps: Sequence[int]) -> Sequence[int]:
    """Returns the individual positions in the ranges of `around`."""
    return [at for stretch in around(part, gaps) for at in stretch] if gaps else part


def divided_ghosts(
    num_samples: int, ghost: int, shares: Sequence[float | int], rank: int
) -> list[range]:
    """Returns the passes of `rank` if each ghost batch is divided among the ranks: its part of every
    ghost batch, in order, empty if it has none. All ranks have the same number of passes."""
    parts, start = [], 0
    for size in ghosts(num_samples, ghost):
        part = share(size, shares, rank)
        parts.append(range(start + part.start, start + part.stop))
        start += size
    return parts


def ghosts(num_samples: int, size: int) -> list[int]:
    """Returns the sizes of the ghost batches of one global batch: all are `size`, and a remainder forms
    its own ghost batch.

    A remainder of one joins the preceding ghost batch, if there is one: BatchNorm cannot normalize a
    single value (its variance is zero).
    """
    whole, rest = divmod(num_samples, size)
    sizes = [size] * whole
    if rest == 1 and sizes:
        sizes[-1] += 1
    elif rest:
        sizes.append(rest)
    return sizes


@final
class Pieces(Sequence[range]):
    """A part cut into micro-batches, each a range of positions. Ranges are computed on access, since a
    step may have a million of them."""

    def __init__(self, starts: range, stop: int) -> None:
        self._starts: range = starts
        self._stop: int = stop

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> range: ...
    @overload
    def __getitem__(self, index: slice) -> Pieces: ...
    def __getitem__(self, index: int | slice) -> range | Pieces:
        starts = self._starts
        if isinstance(index, slice):
            first, last, step = index.indices(len(starts))
            if step != 1:
                raise ValueError("micro-batches follow one another: take a slice without a step")
            return Pieces(starts[first:last], self._stop_of(last - 1) if last else self._stop)
        number = range(len(starts))[index]
        return range(starts[number], self._stop_of(number))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pieces):
            return NotImplemented
        return (self._starts, self._stop) == (other._starts, other._stop)

    def __hash__(self) -> int:
        return hash((self._starts, self._stop))

    def _stop_of(self, number: int) -> int:
        return self._starts[number + 1] if number + 1 < len(self._starts) else self._stop


def micro_batches(part: range, micro_batch: int, ghost: int | None, total: int) -> Pieces:
    """Cuts `part` of a global batch of `total` samples into pieces of `micro_batch`.

    All pieces except the last have that size, since fixed shapes suit allocators and compilers. With
    `ghost`, no piece splits a ghost batch, so the last piece of the global batch may be one sample
    larger: `micro_batch` is then a multiple of `ghost`, or holds all `total` samples.
    """
    starts = range(part.start, part.stop, micro_batch)
    joined = ghost is not None and total > ghost and total % ghost == 1 and part.stop == total
    if joined and len(starts) > 1 and starts[-1] == total - 1:
        starts = starts[:-1]
    return Pieces(starts, part.stop)
