"""Balance: shares that follow the speed of the ranks, and detection of slow ranks.

Ranks wait for the slowest one at the end of every step. The duration of a step under other shares
follows from each rank's throughput, so shares proportional to throughput make all ranks finish at the
same time. The result of training does not depend on the shares. They are changed only when it pays off
for several consecutive steps, since every change partitions the data anew.

A single slow step does not make a slow rank: a page may not have been cached, or another process may
have used the machine. A rank is reported once it has been slow in many consecutive steps and has cost
the other ranks some time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import final

_APART = 1.1
"""Shares are changed only if the slowest rank takes at least this many times as long as the fastest."""

_PAYS = 1.03
"""Shares are changed only if the step takes at least this many times as long as under the new shares,
which are rounded to whole samples (and ghost batches)."""

_PATIENCE = 5
"""Consecutive steps in which the imbalance must persist: one slow step does not make a slow rank."""

_SLOW = 1.5
"""A rank is slow if it takes at least this many times the median of the other ranks."""

_SLOW_STEPS = 20
"""Consecutive slow steps before a rank is reported."""

_LOST_SECONDS = 1.0
"""Total seconds that the others must have waited for the rank in these steps; less is not reported."""

Cut = Callable[[Sequence[float]], Sequence[int]]
"""Maps shares to each rank's amount of work in the current step: samples, or their total length."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """New shares proposed by `Balance`.

    Attributes:
        shares: the speeds of the ranks.
        seconds: time that each rank takes under the current shares, at its median speed in the observed
            steps; 0 for a rank without samples.
    """

    shares: tuple[float, ...]
    seconds: tuple[float, ...]


class Balance:
    """Observes the steps of a run and proposes shares."""

    def __init__(self) -> None:
        self._speeds: list[list[float]] = []

    def observe(
        self, cut: Cut, shares: Sequence[float], seconds: Sequence[float]
    ) -> Proposal | None:
        """Record one step. Returns new shares, or None to keep the current ones.

        Args:
            cut: maps shares to the work of this step.
            shares: shares under which the step was run.
            seconds: time that each rank took for its part.

        The speed of a rank without samples is unknown, so it keeps a share of zero.
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
    """Returns the seconds that each rank takes for its amount at its speed."""
    return tuple(n / speed if speed else 0.0 for n, speed in zip(amounts, speeds, strict=True))


@final
class Stragglers:
    """Detects slow ranks among `size` ranks from their step times."""

    def __init__(self, size: int) -> None:
        self._num_slow = [0] * size
        self._lost = [0.0] * size
        self._reported: set[int] = set()

    def observe(self, seconds: Sequence[float]) -> list[tuple[int, float, float]]:
        """Record one step. Returns the ranks to report now as (rank, its seconds, median of the
        others); each rank is reported once.

        Args:
            seconds: compute time of each rank; 0 if it had nothing to compute or the time is unknown.
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
            if enough and rank not in self._reported:
                self._reported.add(rank)
                found.append((rank, mine, usual))
        return found
