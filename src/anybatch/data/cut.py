"""How a global batch is cut: shares of ranks, ghost batches of BatchNorm, micro-batches.

Pure functions of integers; positions count from the start of the global batch. Cuts nest: a share
never cuts a ghost batch, nor does a micro-batch, so BatchNorm sees the same samples together
whatever the number of ranks and the micro-batch.

    global batch   0 1 2 3 4 5 6 7 8 9 10 11 12     13 samples
    ghosts of 4    |-------|-------|------------|   a rest of one joins its neighbour
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
    """The contiguous part of a global batch that `rank` takes, in proportion to `shares`.

    Largest remainder over whole units, ties to the lower rank. Boundaries lie at multiples of
    `unit` (the ghost batch); a last unit of one sample stays with its neighbour. A rank may get
    nothing. The parts of all ranks together are exactly `range(num_samples)`.

    Raises `InputError` if the shares are not numbers of at least zero with a sum above zero.
    """
    bounds = _boundaries(num_samples, tuple(shares), unit)
    if not 0 <= rank < len(bounds) - 1:
        raise InputError(f"rank {rank} has no share: there are {len(bounds) - 1} ranks, from 0.")
    return range(bounds[rank], bounds[rank + 1])


@lru_cache(maxsize=64)  # every step of a run asks for the same few
def _boundaries(num_samples: int, shares: tuple[float | int, ...], unit: int) -> tuple[int, ...]:
    if not shares or not all(math.isfinite(s) and s >= 0 for s in shares) or sum(shares) <= 0:
        raise InputError(
            f"the shares of the ranks are {list(shares)}: give each rank a number of at least zero,"
            " and at least one of them a number above zero."
        )
    weights = [Fraction(s) for s in shares]  # exact: every rank must find the same boundaries
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
    """Where samples `part` of a batch without those at `gaps` (sorted) lie in the whole batch:

    whole   0 1 2 3 4 5 6 7        gaps 2 and 5
    kept    0 1   2 3   4 5        part 1 to 4 lies at 1, at 3 and 4, and at 6
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
    """`around`, one by one."""
    return [at for stretch in around(part, gaps) for at in stretch] if gaps else part


def divided_ghosts(
    num_samples: int, ghost: int, shares: Sequence[float | int], rank: int
) -> list[range]:
    """The passes of `rank` where each ghost batch is divided over the ranks: its part of every ghost
    batch in turn, empty where it has none. All ranks have equally many."""
    parts, start = [], 0
    for size in ghosts(num_samples, ghost):
        part = share(size, shares, rank)
        parts.append(range(start + part.start, start + part.stop))
        start += size
    return parts


def ghosts(num_samples: int, size: int) -> list[int]:
    """Sizes of the ghost batches of one global batch: all `size`, the rest a ghost of its own.

    A rest of one joins the ghost before it, where there is one: BatchNorm cannot normalise a single
    value (its variance is zero).
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
    """The cut of a part into micro-batches, each a range of positions. Worked out as it is asked for:
    a step may have a million of them."""

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
    """`part` of a global batch of `total` samples, cut into pieces of `micro_batch`.

    All pieces but the last have that size: fixed shapes suit allocators and compilers. With `ghost`
    no piece cuts a ghost batch, so the last one of the global batch may be one sample larger.

    Raises `InputError` if `micro_batch` cuts ghost batches: it must be a multiple of `ghost`, or
    hold all `total` samples.
    """
    if micro_batch < 1 or (ghost and micro_batch % ghost and micro_batch < total):
        raise InputError(
            f"a micro-batch of {micro_batch} samples cannot hold whole ghost batches of {ghost}:"
            " make it a multiple."
            if micro_batch >= 1
            else f"the micro-batch is {micro_batch}: make it at least 1."
        )
    starts = range(part.start, part.stop, micro_batch)
    joined = ghost is not None and total > ghost and total % ghost == 1 and part.stop == total
    if joined and len(starts) > 1 and starts[-1] == total - 1:
        starts = starts[:-1]
    return Pieces(starts, part.stop)
