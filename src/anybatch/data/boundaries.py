"""Boundaries: where global steps begin that are no fixed number of samples.

The samples of all epochs, end to end in the global order, form one line, and a step is a stretch of it.
A step has a target that follows from what comes before it, and ends with the sample that reaches it:

    lengths         3 5 | 2 2 4 | 6 || 2 5 | 1 3 4 | 6 ||      a target of 7 tokens, epochs of 6
    steps            0  |   1   | 2 ||  3  |   4   | 5 ||      keep
                     0  |   1   | 2 ..  2  |...                wrap: 6 and 2

It depends on the task alone: no rank, plan or restart changes it. Steps of a fixed number of samples
have a formula instead, in `Steps`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import final

import numpy as np

Reached = Callable[[int], np.ndarray]
"""From an epoch to the total length of its first n samples, for each n: int64, shape `[length + 1]`."""


@final
class Boundaries:
    """The first sample of each step, found as far as it is asked for.

    Args:
        target: from a step's index and first sample to the target: samples, or their total length.
        length: samples of an epoch; None: it is not known, and no step ends with an epoch.
        wraps: whether steps go across the ends of epochs.
        reached: of the samples of an epoch, where targets are a total length.
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
        """The first sample of the step `index`, in the line of samples."""
        while len(self._starts) <= index:
            self._add()
        return self._starts[index]

    def count(self, stop: int) -> int:
        """How many steps begin before the sample `stop`."""
        while self._starts[-1] < stop:
            self._add()
        return bisect_left(self._starts, stop)

    def steps(self, first: int, stop: int) -> np.ndarray:
        """The index of the step of each of the samples `first` to `stop`."""
        starts = self._starts[: self.count(stop)]
        return np.searchsorted(starts, np.arange(first, stop), side="right") - 1

    def sizes(self, stop: int) -> np.ndarray:
        """Samples of the steps that begin before the sample `stop`, the last one up to there."""
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
        """The sample after the one with which the total length from `first` on is the `target`."""
        epoch, position = divmod(first, length)
        total = reached(epoch)
        wanted = target + int(total[position])
        while self._wraps and wanted > total[-1]:
            wanted -= int(total[-1])
            epoch += 1
            total = reached(epoch)
        return epoch * length + min(length, int(np.searchsorted(total, wanted)))


def most_samples(lengths: np.ndarray, target: int, wraps: bool) -> int:
    """The most samples that a step of a total length of `target` can have, in whatever order they come:
    the shortest ones. `wraps`: as in `Boundaries`."""
    shortest = np.sort(lengths)
    reached = np.cumsum(shortest)
    # Of the epochs that a step meets, all but the first and the last are whole.
    times = target // int(reached[-1]) + 2 if wraps else 1
    at = int(np.searchsorted(times * reached, target))
    if at == len(lengths):
        return at
    before = times * int(reached[at - 1]) if at else 0
    return times * at + -(-(target - before) // int(shortest[at]))
