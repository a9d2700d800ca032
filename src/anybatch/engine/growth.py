"""Growth: memory in use after the steps, in which a leak of the user's code shows.

A list of losses with their graphs, a cache in the model or the data set: memory in use grows a little
with each step, until no plan fits. That is no small budget, and more memory only delays it. So a few
dozen samples of the memory that is in use between two steps are kept, evenly over the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import final

_MOST_SAMPLES = 64
_LEAST_SAMPLES = 6
_LEAST_PART = 0.1
"""Of the bytes in use at the end, that have to be grown for a leak to be named."""

_LEAST_RISING = 0.8
"""Of the intervals between samples."""


@dataclass(frozen=True, slots=True)
class Leak:
    """Memory in use that has grown with the steps.

    Attributes:
        since, until: numbers of steps.
        before, after: bytes in use after these steps.
    """

    since: int
    until: int
    before: int
    after: int

    @property
    def bytes_per_step(self) -> int:
        """On average."""
        return round((self.after - self.before) / (self.until - self.since))


@final
class Growth:
    """Samples of the memory in use after steps."""

    def __init__(self) -> None:
        self._samples: list[tuple[int, int]] = []
        self._stride = 1
        self._num_steps = 0

    def is_due(self) -> bool:
        """A step was committed: whether `add` is to be called for it."""
        self._num_steps += 1
        return self._num_steps % self._stride == 0

    def add(self, step: int, num_bytes: int) -> None:
        """After `step` so many bytes are in use."""
        self._samples.append((step, num_bytes))
        if len(self._samples) > _MOST_SAMPLES:
            self._samples = self._samples[1::2]
            self._stride *= 2

    def leak(self) -> Leak | None:
        """The longest stretch of steps up to the last one in which memory has grown steadily; None: it
        has not, or by little."""
        for start in range(len(self._samples) - _LEAST_SAMPLES + 1):
            window = self._samples[start:]
            if _is_steady([num_bytes for _, num_bytes in window]):
                (since, before), (until, after) = window[0], window[-1]
                return Leak(since, until, before, after)
        return None


def _is_steady(used: list[int]) -> bool:
    """Whether it rises in nearly all intervals, in both halves alike, and by much."""
    grown = used[-1] - used[0]
    if grown < _LEAST_PART * used[-1]:
        return False
    rising = sum(after > before for before, after in pairwise(used))
    first_half = used[len(used) // 2] - used[0]
    return rising >= _LEAST_RISING * (len(used) - 1) and 0.25 <= first_half / grown <= 0.75
