"""Boundaries of global steps that do not have a fixed number of samples.

The samples of all epochs, concatenated in the global order, form one sequence, and a step is a
contiguous range of it. The target of a step depends only on what comes before it, and the step ends
with the sample that reaches the target:

    lengths         3 5 | 2 2 4 | 6 || 2 5 | 1 3 4 | 6 ||      a target of 7 tokens, epochs of 6
    steps            0  |   1   | 2 ||  3  |   4   | 5 ||      keep
                     0  |   1   | 2 ..  2  |...                wrap: 6 and 2

Boundaries depend only on the task, not on ranks, plans or restarts. For steps with a fixed number of
samples `Steps` uses a formula instead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import final

import numpy as np

Reached = Callable[[int], np.ndarray]
"""A function from an epoch to cumulative lengths: entry n is the total length of the first n samples.
int64, shape `[length + 1]`."""


@final
class Boundaries:
    """The first sample of each step, computed lazily.

    Args:
        target: function from a step's index and first sample to its target, in samples or total length.
        length: number of samples in an epoch; None if it is not known, in which case no step ends with
            an epoch.
        wraps: whether steps cross epoch boundaries.
        reached: cumulative lengths of the samples of an epoch, if targets are total lengths.
    """

    def __init__(
        self,
        target: Callable[[int, int], int],
        length: int | None,
        wraps: bool,
        reached: Reached | None = None,
    ) -> None:
        self._target = target
        self._length = length
        self._wraps = wraps
        self._reached = reached
        self._starts = [0]

    def start(self, index: int) -> int:
        """Returns the first sample of step `index`, counted over the concatenated epochs."""
        while len(self._starts) <= index:
            self._add()
        return self._starts[index]

    def count(self, stop: int) -> int:
        """Returns the number of steps that begin before the sample `stop`."""
        while self._starts[-1] < stop:
            self._add()
        return bisect_left(self._starts, stop)

    def steps(self, first: int, stop: int) -> np.ndarray:
        """Returns the step index of each of the samples `first` to `stop` (exclusive)."""
        starts = self._starts[: self.count(stop)]
        return np.searchsorted(starts, np.arange(first, stop), side="right") - 1

    def sizes(self, stop: int) -> np.ndarray:
        """Returns the number of samples in each step that begins before the sample `stop`; the last
        step is cut off there."""
        return np.diff([*self._starts[: self.count(stop)], stop])

    def _add(self) -> None:
        first = self._starts[-1]
        target = self._target(len(self._starts) - 1, first)
        if self._length is None:
            stop = first + target
        elif self._reached is None:
            end = (first // self._length + 1) * self._length
            stop = first + target if self._wraps else min(first + target, end)
        else:
            stop = self._reaching(first, target, self._length, self._reached)
        self._starts.append(stop)

    def _reaching(self, first: int, target: int, length: int, reached: Reached) -> int:
        """Returns the sample after the one at which the total length since `first` reaches `target`, or
        the end of the epoch if steps do not cross it."""
        epoch, position = divmod(first, length)
        total = reached(epoch)
        wanted = target + int(total[position])
        while self._wraps and wanted > total[-1]:
            wanted -= int(total[-1])
            epoch += 1
            total = reached(epoch)
        return epoch * length + min(length, int(np.searchsorted(total, wanted)))


def most_samples(lengths: np.ndarray, target: int, wraps: bool) -> int:
    """Returns the largest number of samples that a step with a total length of `target` can have under
    any order, which is reached with the shortest samples. `wraps`: as in `Boundaries`."""
    shortest = np.sort(lengths)
    reached = np.cumsum(shortest)
    # All epochs that a step overlaps, except the first and the last, are complete.
    times = target // int(reached[-1]) + 2 if wraps else 1
    at = int(np.searchsorted(times * reached, target))
    if at == len(lengths):
        return at
    before = times * int(reached[at - 1]) if at else 0
    return times * at + -(-(target - before) // int(shortest[at]))
