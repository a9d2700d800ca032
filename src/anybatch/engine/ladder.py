"""Ladder: the plan to take when memory runs out, and the way back up when it is there again.

Memory may be short for a while only: another program has it, a batch of long samples is under way,
the heap is in pieces. So a plan that failed is tried again, one rung at a time:

    plan 0   x
    plan 1    | 64 steps |  x  128 steps                |
    plan 2               |  |                           | plan 1 again ...

A try that fails costs one attempt at a step, and the next one comes after twice as many steps. So a
plan that never fits costs less than one attempt in 64 steps, and ever less. When to try is a function
of steps and failures, which all ranks have in common: they come to the same plan without a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from anybatch.oom import MemoryFailure
from anybatch.plans import Plan
from anybatch.units import format_bytes, format_count

STEPS = 64
"""Steps after which a plan that failed is tried again for the first time."""

WAITS = (0.1, 1.0, 10.0)
"""Seconds to wait before the leanest plan is tried again in the same step, if it has worked before: the
memory that it had has gone elsewhere, and may come back."""


@final
class Patience:
    """When to try again what has failed. Counts successes since."""

    def __init__(self) -> None:
        self._wait = STEPS
        self._since = 0
        self._trying = False

    @property
    def waited(self) -> int | None:
        """How many successes there were, if it is time to try again."""
        return self._since if self._since >= self._wait and not self._trying else None

    def begin(self) -> None:
        """A try begins."""
        self._trying, self._since = True, 0

    def succeeded(self) -> None:
        """Once more."""
        self._since += 1
        if self._trying and self._since >= self._wait:  # the try has shown that it works
            self._trying, self._wait = False, STEPS

    def failed(self) -> None:
        """Memory ran out."""
        if self._trying:
            self._wait *= 2
        self._trying, self._since = False, 0


@final
class Waits:
    """How often the leanest choice is tried again at once, and after how long."""

    def __init__(self) -> None:
        self.worked: bool = False
        self._num = 0

    def succeeded(self) -> None:
        self.worked, self._num = True, 0

    def seconds(self) -> float | None:
        """To wait now; None: it is of no use."""
        if not self.worked or self._num >= len(WAITS):
            return None
        self._num += 1
        return WAITS[self._num - 1]


@dataclass(frozen=True, slots=True)
class _Rung:
    """A plan that failed, and the evaluation batch of the one that was taken instead."""

    plan: Plan
    evaluation_after: int


@final
class Ladder:
    """Where a run is on the ladder of its plan."""

    def __init__(self) -> None:
        self._above: list[_Rung] = []
        self._below: Plan | None = None  # what worked before the try that is under way
        self._patience = Patience()
        self._waits = Waits()

    def committed(self) -> None:
        """A step was done under the present plan."""
        self._patience.succeeded()
        self._waits.succeeded()

    def down(self, plan: Plan) -> tuple[Plan, float] | None:
        """Memory ran out under `plan`: the plan to take, and how many seconds to wait before. None:
        there is nothing leaner, and waiting is of no use."""
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
        """Between two steps under `plan`: the plan to try again, and after how many steps, or None."""
        waited = self._patience.waited
        if not self._above or waited is None:
            return None
        rung = self._above.pop()
        self._patience.begin()
        self._below = plan
        choice, size = rung.plan.choice, plan.choice.evaluation_batch
        if size != rung.evaluation_after:  # an evaluation has had its own reasons since
            choice = choice.model_copy(update={"evaluation_batch": size})
        return plan.model_copy(update={"choice": choice, "ladder": rung.plan.ladder}), waited


@dataclass(frozen=True, slots=True)
class Leak:
    """Memory in use between two steps, early in the run and late.

    Attributes:
        since, before: number of a step, and the bytes in use after it.
        until, after: the same of a later one.
    """

    since: int
    before: int
    until: int
    after: int

    @property
    def is_one(self) -> bool:
        """Whether most of what is in use late has come with the steps."""
        return self.until > self.since and self.after > 2 * self.before

    @property
    def bytes_per_step(self) -> int:
        """On average."""
        return round((self.after - self.before) / (self.until - self.since))


def nothing_leaner(plan: Plan, phase: str, failure: MemoryFailure, leak: Leak | None = None) -> str:
    """The sentence for the end of the ladder. `leak`: how memory in use has grown."""
    if leak is not None and leak.is_one:
        return (
            f"memory ran out in {phase} even under the leanest plan ({plan.choice.describe()}), since"
            f" memory in use has grown by {format_bytes(leak.bytes_per_step)} a step:"
            f" {format_bytes(leak.before)} after step {format_count(leak.since)},"
            f" {format_bytes(leak.after)} after step {format_count(leak.until)}. Code of the task keeps"
            " something of each step, such as losses with their graphs in a list, or a cache in the"
            " model or the data set: keep numbers (loss.item()) or detached tensors, or empty it."
        )
    budget = "" if plan.budget_bytes is None else f" of {format_bytes(plan.budget_bytes)}"
    # Samples need not be loaded in this process: the failure itself says where memory was refused.
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
    return (
        f"the budget{budget} is too small even for the leanest plan ({plan.choice.describe()}):"
        f" memory ran out in {phase} ({why}). To train this, {remedy}."
    )
