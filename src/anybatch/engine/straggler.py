"""Stragglers: ranks that take longer than the others again and again, though they make progress.

One slow step is no slow rank: a page that was not cached, a neighbour on the machine. A rank is told of
once it has been slow in many steps in a row, and the others have lost some time by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import final

_SLOW = 1.5
"""Times the median of the other ranks."""

_PATIENCE = 20
"""Steps in a row."""

_LOST_SECONDS = 1.0
"""That the others have waited for it in these steps, together: less is not worth a word."""


@final
class Stragglers:
    """Watches the times of `size` ranks."""

    def __init__(self, size: int) -> None:
        self._num_slow = [0] * size
        self._lost = [0.0] * size
        self._told: set[int] = set()

    def observe(self, seconds: Sequence[float]) -> list[tuple[int, float, float]]:
        """Take in one step; the ranks to tell of now, each once: (rank, its seconds, the others').

        Args:
            seconds: that each rank computed; 0: it had nothing to compute, or it is not known.
        """
        found: list[tuple[int, float, float]] = []
        for rank, mine in enumerate(seconds):
            others = [s for other, s in enumerate(seconds) if other != rank and s > 0]
            usual = median(others) if others else 0.0
            if not others or mine < _SLOW * usual:
                self._num_slow[rank], self._lost[rank] = 0, 0.0
                continue
            self._num_slow[rank] += 1
            self._lost[rank] += mine - usual
            enough = self._num_slow[rank] >= _PATIENCE and self._lost[rank] >= _LOST_SECONDS
            if enough and rank not in self._told:
                self._told.add(rank)
                found.append((rank, mine, usual))
        return found
