"""Ranks of unequal speed: shares that follow it, and a word on one that has become slow.

Ranks wait for the slowest one at the end of every step. What a step costs under other shares follows
from how much each rank does in a second, so shares in proportion to that make all ranks end together.
The result of training does not depend on shares; they are changed only when it pays for several steps
in a row, since every change is a new cut of the data.

One slow step is no slow rank: a page that was not cached, a neighbour on the machine. A rank is
reported once it has been slow in many steps in a row, and the others have lost some time by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import final

_APART = 1.1
"""The slowest rank has to take this much longer than the fastest before shares are changed."""

_PAYS = 1.03
"""The step has to be this much longer than under the new shares, which whole samples (and ghost
batches) round."""

_PATIENCE = 5
"""Steps in a row in which it has to be so: one slow step is no slow rank."""

_SLOW = 1.5
"""Times the median of the other ranks."""

_SLOW_STEPS = 20
"""Steps in a row."""

_LOST_SECONDS = 1.0
"""That the others have waited for it in these steps, together: less is not worth a word."""

Cut = Callable[[Sequence[float]], Sequence[int]]
"""From shares to what each rank has to do of the step at hand: samples, or their total length."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """New shares.

    Attributes:
        shares: the ranks' speeds.
        seconds: that each rank takes under those so far, in the middle of the steps that were watched;
            0 without a part.
    """

    shares: tuple[float, ...]
    seconds: tuple[float, ...]


class Balance:
    """Watches the steps of a run and proposes shares."""

    def __init__(self) -> None:
        self._speeds: list[list[float]] = []

    def observe(
        self, cut: Cut, shares: Sequence[float], seconds: Sequence[float]
    ) -> Proposal | None:
        """Take in one step; None: leave the shares.

        Args:
            cut: of the step.
            shares: that it was done under.
            seconds: that each rank took for its part.

        A rank without a part keeps its share of none: nobody knows its speed.
        """
        amounts = cut(shares)
        busy = [s for n, s in zip(amounts, seconds, strict=True) if n]
        if len(busy) < 2 or min(busy) <= 0:
            return None
        if max(busy) < _APART * min(busy):
            self._speeds.clear()
            return None
        self._speeds.append([n / s if n else 0.0 for n, s in zip(amounts, seconds, strict=True)])
        if len(self._speeds) < _PATIENCE:
            return None
        middle = [sorted(column)[_PATIENCE // 2] for column in zip(*self._speeds, strict=True)]
        self._speeds.clear()
        after = tuple(float(f"{speed:.3g}") for speed in middle)
        now, then = (_seconds(each, middle) for each in (amounts, cut(after)))
        return Proposal(after, now) if max(now) >= _PAYS * max(then) else None


def _seconds(amounts: Sequence[int], speeds: Sequence[float]) -> tuple[float, ...]:
    """Of each rank."""
    return tuple(n / speed if speed else 0.0 for n, speed in zip(amounts, speeds, strict=True))


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
            enough = self._num_slow[rank] >= _SLOW_STEPS and self._lost[rank] >= _LOST_SECONDS
            if enough and rank not in self._told:
                self._told.add(rank)
                found.append((rank, mine, usual))
        return found
