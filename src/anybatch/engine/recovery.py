"""Recovery: the plan that a run follows, and the one it changes to when memory runs out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import final

from anybatch.engine.context import PassContext
from anybatch.engine.ladder import Ladder, nothing_leaner
from anybatch.errors import NoPlanFits
from anybatch.events import Replanned, Sink
from anybatch.parallel.failures import RankReport, first_error, memory_events
from anybatch.plans import Plan


@final
class Recovery:
    """Follows the same `plan` on all ranks."""

    def __init__(self, plan: Plan, context: PassContext, sink: Sink) -> None:
        self.plan: Plan = plan
        self._replica, self._group = context.replica, context.group
        self._limit, self._meter = context.limit, context.meter
        self._thread = context.thread
        self._sink = sink
        self._limit.follow(plan.choice.freed_memory)
        self._ladder = Ladder()

    def committed(self) -> None:
        self._ladder.committed()

    def follow(self, plan: Plan, step: int, reason: str, tells: bool) -> None:
        self._ladder = Ladder()
        self._change(plan, step, reason, tells=tells and plan.choice != self.plan.choice)

    def grow(self, step: int) -> bool:
        """As `Transactions.grow`. `step` is the number of the next step."""
        before = self.plan
        found = self._ladder.up(before)
        if found is None:
            return False
        plan, num_steps = found
        self._change(plan, step, f"tried again after {num_steps} steps")
        return self.plan is not before

    def make_room(self, everyone: Sequence[RankReport], step: int) -> None:
        """Continue in `step` under the next leaner plan. Raises `NoPlanFits`, on all ranks, if there is
        none."""
        mine = everyone[self._group.rank].failure
        if mine is not None:
            self._thread.recover(mine)
        before = self.plan
        found = self._ladder.down(before)
        then = "" if found is None else found[0].choice.describe()
        for event in memory_events(everyone, step, before.choice.micro_batch, before, then):
            self._sink(event)
        worst = next(report for report in everyone if report.failure)
        assert worst.failure is not None
        if found is None:
            raise NoPlanFits(nothing_leaner(before, worst.phase, worst.failure, step))
        leaner, seconds = found
        if leaner is before:
            time.sleep(seconds)
        else:
            self._change(leaner, step, f"memory ran out in {worst.phase}")

    def _change(self, plan: Plan, step: int, reason: str, tells: bool = True) -> None:
        """Follow `plan` from `step` on, or the next leaner one if some rank has no room for the
        optimizer states where the plan places them."""
        before, self.plan = self.plan, plan
        self._replica.switch(plan.choice, plan.kernels)
        self._limit.follow(plan.choice.freed_memory)
        everyone = self._move_states(plan, step)
        if tells:
            self._sink(
                Replanned(
                    time=time.time(),
                    step=step,
                    reason=reason,
                    before=before.choice.describe(),
                    after=plan.choice.describe(),
                    plan=plan.model_dump(mode="json"),
                )
            )
        if any(report.failure for report in everyone):
            self.make_room(everyone, step)

    def _move_states(self, plan: Plan, step: int) -> Sequence[RankReport]:
        """Move the optimizer states to where `plan` places them. Returns the reports of all ranks."""
        report, wrong = RankReport(), None
        try:
            self._replica.updater.keep_states(plan.choice.optimizer_states)
            self._replica.updater.reserve()
        except Exception as error:
            report = RankReport.of(error, "update", self._meter)
            wrong = None if report.can_be_mended else error
        if self._group.diverges:  # each rank changes its plan by itself
            everyone = [RankReport()] * self._group.size
            everyone[self._group.rank] = report
        else:
            everyone = self._group.exchange(report)
        first_error(wrong, everyone, step)
        return everyone
