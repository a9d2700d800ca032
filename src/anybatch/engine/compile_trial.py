"""Compile trial: whether the blocks of a model are faster compiled, on this device.

No prediction knows what a compiler makes of a model, compiling takes tens of seconds, and compiled
kernels round otherwise. So where a plan leaves it open, the first passes of the step that comes next
are run both ways in turns, and leave no trace, as in a `Trial`:

    warm-up    plain  compiled      the compiler works, memory is taken
    round 1    plain  compiled
    round 2    plain  compiled
    ...

Compiled blocks have to be faster in every round, and to fit the budget. Whatever speaks against them,
that the compiler fails included, leaves the run as it would be without: uncompiled, and told why.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from anybatch.compute import kernel_choices
from anybatch.engine.source import Source
from anybatch.engine.transaction import Transactions
from anybatch.engine.trial import (
    MOST_OF_THE_RUN,
    OUT,
    PAYS,
    ROUNDS,
    as_measured,
    is_faster,
    of_the_slowest,
    runs_apart,
    tried_amount,
    typical,
)
from anybatch.events import CompileDecided, Sink, step_number
from anybatch.parallel import Group
from anybatch.plans import Plan
from anybatch.units import format_bytes, format_seconds

T = TypeVar("T")

COMPILE_SECONDS = 30.0
"""What compiling is reckoned with: 2 s for a small block on a CPU, some tens for a large model."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What one rank has found. Crosses the network.

    Attributes:
        plain, compiled: seconds as `Rehearsed` has them, by round.
        against: what speaks against compiling; empty: nothing.
    """

    plain: tuple[float, ...]
    compiled: tuple[float, ...]
    against: str


class CompileTrial:
    """Decides whether the run compiles blocks, for a plan that leaves it open. All ranks do alike.

    Args:
        engine: runs the passes, under the plan that it follows.
        group: the ranks.
        device: of this rank.
        num_steps: that are left of the run; None: not known.
        state_bytes: what the optimizer's states will take on the device, and do not yet.
        sink: is told of what was decided.

    Attributes:
        was_made: whether any passes were run.
    """

    def __init__(
        self,
        engine: Transactions,
        group: Group,
        device: torch.device,
        num_steps: int | None,
        state_bytes: int,
        sink: Sink,
    ) -> None:
        self._plan = engine.plan
        self._engine = engine
        self._group = group
        self._device = device
        self._num_steps = num_steps
        self._state_bytes = state_bytes
        self._sink = sink
        self.was_made: bool = False

    def run(self, index: int, source: Source) -> Plan:
        """The plan to follow, the same on all ranks: it says whether blocks are compiled. The engine
        follows it already.

        Args:
            index: of the step that comes next: the number of those before it.
            source: its samples.

        Raises `PeerLost` if another rank is gone.
        """
        step = step_number(index)
        against = self._unfit() or too_short(self._plan, self._num_steps) or self._missing()
        if against:
            return self._decided(step, compiled=False, reason=against)
        begun, self.was_made = time.perf_counter(), True
        mine = self._tried(index, source)
        gc.collect()  # a compiler leaves its graphs behind, in circles
        everyone = self._exchanged(mine if self._plan.shares[self._group.rank] else None)
        return self._judged(step, everyone, time.perf_counter() - begun)

    def keep(self, index: int, compiled: bool) -> Plan:
        """As `run`, where the run has decided before it was stopped and resumed."""
        against = (self._held() or self._missing()) if compiled else ""
        reason = against or "that was decided before the run was resumed"
        return self._decided(step_number(index), compiled and not against, reason)

    def _unfit(self) -> str:
        """What in the plan speaks against a trial, or against compiling."""
        if not runs_apart(self._group, self._plan):
            return "the ranks cannot run passes each by itself, so none can be timed"
        return self._held()

    def _held(self) -> str:
        """Whether the compiler would not get memory."""
        if self._plan.enforced and self._device.type == "cpu":
            return "on a CPU the compiler would take from the budget, which is enforced"
        return ""

    def _missing(self) -> str:
        """What the compiler needs and some rank does not have."""
        everyone = self._exchanged(kernel_choices.missing(self._device) or None)
        return self._on_ranks(everyone)

    def _tried(self, index: int, source: Source) -> _Found:
        plain: list[float] = []
        compiled: list[float] = []
        for number in range(1 + ROUNDS):
            for ways, seconds in ((False, plain), (True, compiled)):
                found = self._passes(index, source, ways)
                if isinstance(found, str):
                    return _Found(tuple(plain), tuple(compiled), found)
                if number > 0:
                    seconds.append(found)
            if number > 0 and typical(compiled) > OUT * typical(plain):
                break
        return _Found(tuple(plain), tuple(compiled), "")

    def _passes(self, index: int, source: Source, compiled: bool) -> float | str:
        """Seconds as `Rehearsed` has them; or why compiling does not come to anything."""
        choice, budget = self._plan.choice, self._plan.budget_bytes
        kernels = self._plan.kernels.model_copy(update={"compile": compiled})
        most = -(-tried_amount(self._plan, [choice]) // choice.micro_batch)
        how = "compiled" if compiled else "uncompiled"
        try:
            found = self._engine.rehearsal.run(index, source, choice, choice, most, kernels)
        except (
            Exception
        ) as error:  # what is not of the compiler the step itself will meet, and tell
            return f"{how} passes failed with {_first_line(error)}"
        if found is None:
            return f"{how} passes ran out of memory"
        peak = found.peak_bytes + self._state_bytes
        if compiled and budget is not None and peak > budget:
            return (
                f"compiled passes take training to {format_bytes(peak)} of a budget of"
                f" {format_bytes(budget)}"
            )
        return found.seconds

    def _judged(self, step: int, everyone: Sequence[_Found | None], seconds: float) -> Plan:
        found = [one for one in everyone if one is not None]
        # Ranks wait for the slowest of them.
        plain = of_the_slowest([one.plain for one in found])
        compiled = of_the_slowest([one.compiled for one in found])
        against = self._on_ranks([one.against if one else None for one in everyone])
        taken = not against and is_faster([plain, compiled], 1)
        whole = self._plan.largest_amount
        times = [typical(plain) * whole, typical(compiled) * whole]
        reason = against or ("" if taken else _shortfall(plain, compiled))
        return self._decided(step, taken, reason, times, seconds)

    def _decided(
        self,
        step: int,
        compiled: bool,
        reason: str,
        times: Sequence[float] = (math.inf, math.inf),
        seconds: float = 0.0,
    ) -> Plan:
        """`times`: of the passes of a step, plain and compiled; infinite where not known."""
        kernels = {"compile": compiled, "compile_if_faster": "decided"}
        told = self._plan.prediction
        if told is not None and times[compiled] < math.inf:
            told = as_measured(told, times[compiled])
        plan = self._plan.model_copy(
            update={
                "kernels": self._plan.kernels.model_copy(update=kernels),
                "prediction": told,
            }
        )
        plain, faster = (each if each < math.inf else None for each in times)
        self._sink(
            CompileDecided(
                time=time.time(),
                step=step,
                compiled=compiled,
                reason=reason,
                plain_seconds=plain,
                compiled_seconds=faster,
                seconds=seconds,
                plan=plan.model_dump(mode="json"),
            )
        )
        self._engine.follow(plan, step, "it was decided whether to compile")
        return plan

    def _exchanged(self, mine: T) -> Sequence[T]:
        return self._group.exchange(mine)

    def _on_ranks(self, told: Sequence[str | None]) -> str:
        """The first of what ranks tell, and whose it is."""
        for rank, one in enumerate(told):
            if one:
                return f"on rank {rank} {one}" if self._group.size > 1 else one
        return ""


def too_short(plan: Plan, num_steps: int | None) -> str:
    """Why a run of so many steps is none to try a compiler in; empty: it is long enough."""
    own = plan.prediction
    if own is None or not own.step_parts:
        return "how long a step takes is not predicted, so nothing tells whether it can pay"
    if num_steps is None:
        return "how long the run will be is not known: give the task steps=... or samples=..."
    passes = 2 * (1 + ROUNDS) * tried_amount(plan, [plan.choice]) / plan.largest_amount
    cost, left = COMPILE_SECONDS + passes * own.step_seconds, num_steps * own.step_seconds
    if cost <= MOST_OF_THE_RUN * left:
        return ""
    return (
        f"what is left of the run takes about {format_seconds(left)}, and trying it out about"
        f" {format_seconds(cost)}, more than {MOST_OF_THE_RUN:.0%} of that"
    )


def _shortfall(plain: Sequence[float], compiled: Sequence[float]) -> str:
    """What compiled blocks lack to be surely faster."""
    before, after = typical(plain), typical(compiled)
    if after >= before:
        return "that is no faster"
    if after >= PAYS * before:
        return f"that is less than {1 - PAYS:.0%} faster"
    return "that was not so in every round"


def _first_line(error: Exception) -> str:
    """Type and message, of what the compiler has wrapped where it has."""
    inner = getattr(error, "inner_exception", None)
    cause = inner if isinstance(inner, BaseException) else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return ": ".join([type(cause).__name__, *lines[:1]]).rstrip(".")
