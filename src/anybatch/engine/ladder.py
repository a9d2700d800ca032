"""Ladder: the plan to use when memory runs out, and when to return to the previous one.

Memory may be short only for a while: another program uses it, a batch of long samples is being
processed, or the heap is fragmented. So a plan that failed is tried again, one rung at a time:

    plan 0   x
    plan 1    | 64 steps |  x  128 steps                |
    plan 2               |  |                           | plan 1 again ...

A failed try costs one attempt at a step, and the next try comes after twice as many steps. So a plan
that never fits costs less than one attempt in 64 steps, and less and less over time. When to try
depends only on steps and failures, which are the same on all ranks, so all ranks reach the same plan
without communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from anybatch.oom import MemoryFailure
from anybatch.plans import Plan
from anybatch.units import format_bytes, format_count

STEPS = 64
"""Steps after which a failed plan is tried again for the first time."""

WAITS = (0.1, 1.0, 10.0)
"""Seconds to wait before the leanest plan is tried again in the same step, if it has worked before: the
memory that it used has been taken elsewhere, and may be released."""


@final
class Patience:
    """Decides when to try again what has failed, by the number of successes since then."""

    def __init__(self) -> None:
        self._wait = STEPS
        self._since = 0
        self._trying = False

    @property
    def waited(self) -> int | None:
        """Number of successes since the last failure or try if it is time to try again, else None."""
        return self._since if self._since >= self._wait and not self._trying else None

    def begin(self) -> None:
        self._trying, self._since = True, 0

    def succeeded(self) -> None:
        self._since += 1
        if self._trying and self._since >= self._wait:  # the try is considered successful
            self._trying, self._wait = False, STEPS

    def failed(self) -> None:
        if self._trying:
            self._wait *= 2
        self._trying, self._since = False, 0


@final
class Waits:
    """Limits how often, and after which delays, the leanest choice is tried again."""

    def __init__(self) -> None:
        self.worked: bool = False
        self._num = 0

    def succeeded(self) -> None:
        self.worked, self._num = True, 0

    def seconds(self) -> float | None:
        """Returns the seconds to wait now; None if waiting is of no use."""
        if not self.worked or self._num >= len(WAITS):
            return None
        self._num += 1
        return WAITS[self._num - 1]


@dataclass(frozen=True, slots=True)
class _Rung:
    """A plan that failed, and the evaluation batch of the plan that replaced it."""

    plan: Plan
    evaluation_after: int


@final
class Ladder:
    """Tracks the position of a run on the ladder of its plan."""

    def __init__(self) -> None:
        self._above: list[_Rung] = []
        self._below: Plan | None = None  # the plan that worked before the current try
        self._patience = Patience()
        self._waits = Waits()

    def committed(self) -> None:
        self._patience.succeeded()
        self._waits.succeeded()

    def down(self, plan: Plan) -> tuple[Plan, float] | None:
        """Memory ran out under `plan`. Returns the plan to use and the seconds to wait before; None if
        there is no leaner plan and waiting is of no use."""
        self._patience.failed()
        leaner = plan.leaner()
        if leaner is None:
            seconds = self._waits.seconds()
            return None if seconds is None else (plan, seconds)
        self._above.append(_Rung(plan, leaner.choice.evaluation_batch))
        self._waits.worked = self._below is not None and self._below.choice == leaner.choice
        self._below = None
        return leaner, 0.0

    def up(self, plan: Plan) -> tuple[Plan, int] | None:
        """Called between two steps under `plan`. Returns the plan to try again and the number of steps
        since the last failure or try, or None."""
        waited = self._patience.waited
        if not self._above or waited is None:
            return None
        rung = self._above.pop()
        self._patience.begin()
        self._below = plan
        choice, size = rung.plan.choice, plan.choice.evaluation_batch
        if size != rung.evaluation_after:  # changed by an evaluation in the meantime
            choice = choice.model_copy(update={"evaluation_batch": size})
        return plan.model_copy(update={"choice": choice, "ladder": rung.plan.ladder}), waited


def nothing_leaner(plan: Plan, phase: str, failure: MemoryFailure, step: int = 1) -> str:
    """Returns the error message for a run that has no leaner plan in `step`."""
    budget = "" if plan.budget_bytes is None else f" of {format_bytes(plan.budget_bytes)}"
    # Samples may be loaded in another process: the failure itself says where memory was refused.
    why = (
        failure.message
        if failure.requested_bytes is None or phase == "loading"
        else f"{format_bytes(failure.requested_bytes)} more were asked for"
    )
    ghost = plan.task.ghost_batch
    remedy = (
        f"give it more memory, a smaller ghost batch than {ghost}, or lower precision"
        if ghost and plan.choice.micro_batch <= ghost
        else "give it more memory, or lower precision"
    )
    kept = (
        f" If memory in use grew until step {format_count(step)}, code of the task keeps something of"
        " each step (losses with their graphs in a list, a cache): keep numbers (loss.item()) or"
        " detached tensors."
    )
    return (
        f"the budget{budget} is too small even for the leanest plan ({plan.choice.describe()}):"
        f" memory ran out in {phase} ({why}). To train this, {remedy}.{kept if step > 1 else ''}"
    )
