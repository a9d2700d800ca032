"""Trial: how long the passes of a step take on this device, and which of the choices that are predicted
to be nearly as fast as each other is the fastest.

A few passes tell what no prediction does. They are the first passes of the step that
comes next, under each choice in turn, in several rounds, so that what disturbs the machine disturbs all
of them; and they are a step that is not committed: weights, buffers and random state are as before.

    warm-up    A  B  C      kernels are made, memory is taken
    round 1    A  B  C
    round 2    A  B         C was far slower
    ...

A trial is made only if it costs little of the run, and ranks meet when it is over, not in it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from anybatch.engine.source import Source
from anybatch.engine.transaction import Transactions
from anybatch.events import Sink, Tried, step_number
from anybatch.parallel import Group
from anybatch.plans import Choice, Plan, Prediction, Rival

ROUNDS = 4
"""In which each choice is tried, after the warm-up. Where a run is too short for that, the plan alone
is tried in fewer."""

PASSES = 2
"""Run at each try of the largest choice, where a step has as many. Others run as many samples: a few
small passes alone would be judged by memory and caches that are not warm yet."""

MOST_OF_THE_RUN = 0.02
"""A trial takes no larger part of a run than this, as far as predicted."""

MOST_SECONDS = 20.0
"""And no longer than this where the length of the run is not known."""

OUT = 1.3
"""Slower by this factor than the fastest so far: tried no further."""

PAYS = 0.96
"""Another choice has to take less than this part of the plan's time, and less than that in every round:
what differs by less, or in some rounds only, is the machine's doing."""


@dataclass(slots=True)
class _Tried:
    """A choice on trial: seconds of its passes as `Rehearsed` has them; `failed`: memory ran out, or
    something else did not work."""

    choice: Choice
    seconds: list[float] = field(default_factory=list)
    failed: bool = False

    @property
    def typical(self) -> float:
        """The median of them; infinite if it failed."""
        return math.inf if self.failed else typical(self.seconds)


class Trial:
    """The trial of `plan` and its rivals.

    Args:
        plan: its rivals are tried beside it.
        engine: runs the passes.
        group: the ranks, which all make the trial.
        num_steps: that are left of the run; None: not known.
        sink: is told of what was found.

    Attributes:
        pays: whether it takes a small enough part of the run, and ranks can run passes by themselves.
    """

    def __init__(
        self, plan: Plan, engine: Transactions, group: Group, num_steps: int | None, sink: Sink
    ) -> None:
        self._plan = plan
        self._engine = engine
        self._group = group
        self._sink = sink
        found = affordable(plan, num_steps) if runs_apart(group, plan) else None
        self.pays: bool = found is not None
        self._rivals, self._rounds = found or ((), 0)
        self._choices = [plan.choice, *(rival.choice for rival in self._rivals)]

    def run(self, index: int, source: Source) -> Plan:
        """The plan to follow, the same on all ranks: with the choice that was fastest. The engine
        follows it already. Only where it `pays`.

        Args:
            index: of the step that comes next: the number of those before it.
            source: its samples.

        Raises `PeerLost` if another rank is gone. What else goes wrong counts against the choice.
        """
        begun = time.perf_counter()
        tried = [_Tried(choice) for choice in self._choices]
        for number in range(1 + self._rounds):
            for one in tried:
                self._pass(one, index, source, counts=number > 0)
            fastest = min(one.typical for one in tried)
            for one in tried:
                one.failed |= number > 0 and one.typical > OUT * fastest
        return self._decided(step_number(index), tried, time.perf_counter() - begun)

    def _pass(self, one: _Tried, index: int, source: Source, counts: bool) -> None:
        if one.failed:
            return
        try:
            found = self._engine.rehearsal.run(
                index, source, one.choice, self._plan.choice, self._passes(one.choice)
            )
        except Exception:  # the step itself will meet it, and tell
            found = None
        if found is None or not found.fits:
            one.failed = True
        elif counts:
            one.seconds.append(found.seconds)

    def _passes(self, choice: Choice) -> int:
        return -(-tried_amount(self._plan, self._choices) // choice.micro_batch)

    def _decided(self, step: int, tried: Sequence[_Tried], seconds: float) -> Plan:
        everyone = self._group.exchange([() if t.failed else tuple(t.seconds) for t in tried])
        # Ranks wait for the slowest of them.
        rounds = [of_the_slowest(ranks) for ranks in zip(*everyone, strict=True)]
        slowest = [typical(each) for each in rounds]
        better = [number for number in range(1, len(rounds)) if is_faster(rounds, number)]
        best = min(better, key=lambda number: slowest[number], default=0)
        plan = self._plan if best == 0 else self._plan.taking(self._rivals[best - 1])
        whole = self._plan.largest_amount
        told = plan.prediction
        if told is not None and slowest[best] < math.inf:
            told = as_measured(told, slowest[best] * whole)
        plan = plan.model_copy(update={"prediction": told})
        self._sink(
            Tried(
                time=time.time(),
                step=step,
                choices=tuple(choice.describe() for choice in self._choices),
                pass_seconds=tuple(each * whole if each < math.inf else None for each in slowest),
                taken=plan.choice.describe(),
                seconds=seconds,
            )
        )
        plan = plan.model_copy(update={"rivals": ()})  # they have had their trial
        self._engine.follow(plan, step, "it was faster in a trial")
        return plan


def runs_apart(group: Group, plan: Plan) -> bool:
    """Whether the ranks can run passes of `plan` by themselves, so that they can be timed. Where norms
    meet inside passes, a rank that ends one early leaves the others waiting."""
    meets = group.lockstep or group.diverges
    return plan.norms == "ghosts" and not meets


def typical(seconds: Sequence[float]) -> float:
    """The median; infinite without any."""
    return statistics.median(seconds) if seconds else math.inf


def of_the_slowest(ranks: Sequence[Sequence[float]]) -> Sequence[float]:
    """Seconds by round, of the rank that was slowest in each; none if it failed on any."""
    return [max(times) for times in zip(*ranks, strict=False)]


def is_faster(rounds: Sequence[Sequence[float]], number: int) -> bool:
    """Whether choice `number` is surely faster than the first."""
    plan, other = rounds[0], rounds[number]
    if not plan or not other:
        return bool(other)
    always = all(a < b for a, b in zip(other, plan, strict=False))
    return always and typical(other) < PAYS * typical(plan)


def as_measured(told: Prediction, pass_seconds: float) -> Prediction:
    """`told`, if the passes of a step take so long."""
    parts = dict(told.step_parts)
    passes = [name for name in ("forward", "backward", "recompute") if name in parts]
    factor = pass_seconds / max(1e-12, sum(parts[name] for name in passes))
    parts |= {name: parts[name] * factor for name in passes}
    return told.model_copy(
        update={
            "step_parts": parts,
            "step_seconds": sum(parts.values()),
            "seconds_method": "measured in passes on this device before the first step",
        }
    )


def affordable(plan: Plan, num_steps: int | None) -> tuple[tuple[Rival, ...], int] | None:
    """What a trial may take of a run of that many steps: the rivals of `plan`, the fastest first, and
    the number of rounds. None: not even the plan itself can be tried once."""
    own = plan.prediction
    if own is None or not own.step_parts:
        return None

    def cost(rounds: int, taken: Sequence[Rival]) -> float:
        choices = [plan.choice, *(rival.choice for rival in taken)]
        times = [own.step_seconds, *(rival.prediction.step_seconds for rival in taken)]
        return (1 + rounds) * tried_amount(plan, choices) / plan.largest_amount * sum(times)

    allowed = MOST_SECONDS if num_steps is None else MOST_OF_THE_RUN * num_steps * own.step_seconds
    rounds = next((n for n in range(ROUNDS, 0, -1) if cost(n, ()) <= allowed), None)
    if rounds is None:
        return None
    taken: list[Rival] = []
    for rival in plan.rivals:
        if cost(ROUNDS, [*taken, rival]) <= allowed:  # fewer rounds do not tell which is faster
            taken.append(rival)
    return tuple(taken), rounds


def tried_amount(plan: Plan, choices: Sequence[Choice]) -> int:
    """Of `Plan.largest_amount`, what is run at each try of each of `choices`."""
    return min(plan.largest_amount, PASSES * max(choice.micro_batch for choice in choices))
