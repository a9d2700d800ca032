"""Pace: uses the time that each rank took for its part of a step. Adapts the shares to the measured
speeds if the plan allows it, and reports a rank that falls behind the others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from anybatch.data import Extent
from anybatch.engine import Balance, Stragglers
from anybatch.events import Rebalanced, Sink, Straggler
from anybatch.parallel import Group
from anybatch.plans import Plan
from anybatch.rank.passes import Cutting


class Pace:
    """Balances the shares of `group` and reports stragglers. All ranks see the same times, so they
    compute the same shares."""

    def __init__(self, plan: Plan, group: Group, cutting: Cutting, sink: Sink) -> None:
        self._group = group
        self._cutting = cutting
        self._sink = sink
        # If ranks communicate inside passes, all take as long as the slowest.
        apart = group.size > 1 and not group.lockstep and plan.norms == "ghosts"
        self._balance = Balance() if plan.balance == "measured" and apart else None
        self._stragglers = Stragglers(group.size)

    def observe(self, step: int, extent: Extent, seconds: Sequence[float]) -> bool:
        """Record the `seconds` of each rank for `step`, which had `extent`, and emit events.

        Returns whether the shares of the group have changed.
        """
        for rank, mine, others in self._stragglers.observe(seconds):
            self._sink(
                Straggler(time=time.time(), step=step, rank=rank, seconds=mine, others=others)
            )
        if self._balance is None:
            return False
        before = tuple(self._group.shares)
        amounts = partial(self._cutting.amounts, extent)
        found = self._balance.observe(amounts, before, seconds)
        if found is None:
            return False
        self._group.shares = found.shares
        taken = found.seconds
        slowest = max(range(len(taken)), key=lambda rank: taken[rank])
        self._sink(
            Rebalanced(
                time=time.time(),
                step=step + 1,
                reason=f"rank {slowest} takes {taken[slowest]:.3g} s and the fastest"
                f" {min(s for s in taken if s):.3g} s for their shares, as measured over several steps",
                before=before,
                after=found.shares,
            )
        )
        return True
