"""Trial: which of the choices that are predicted to be nearly as fast as each other is the fastest.

A few passes on the device tell what no prediction does. They are the first passes of the step that
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
from anybatch.events import Sink, Tried
from anybatch.parallel import Group
from anybatch.plans import Choice, Plan, Prediction, Rival

ROUNDS = 4
"""Passes of each choice that count."""

MOST_OF_THE_RUN = 0.02
"""A trial takes no larger part of a run than this, as far as predicted."""

MOST_SECONDS = 20.0
"""And no longer than this where the length of the run is not known."""

_OUT = 1.3
"""Slower by this factor than the fastest so far: tried no further."""

_PAYS = 0.98
"""Another choice has to take less than this part of the time: differences below are the machine's."""


@dataclass(slots=True)
class _Tried:
    """A choice on trial: seconds per sample of its passes; `failed`: memory ran out, or something else
    did not work."""

    choice: Choice
    seconds: list[float] = field(default_factory=list)
    failed: bool = False

    @property
    def typical(self) -> float:
        """Seconds per sample; infinite if it failed."""
        return math.inf if self.failed or not self.seconds else statistics.median(self.seconds)


class Trial:
    """The trial of `plan` and its rivals.

    Args:
        plan: with rivals.
        engine: runs the passes.
        group: the ranks, which all make the trial.
        num_steps: that are left of the run; None: not known.
        sink: is told of what was found.
    """

    def __init__(
        self, plan: Plan, engine: Transactions, group: Group, num_steps: int | None, sink: Sink
    ) -> None:
        self._plan = plan
        self._engine = engine
        self._group = group
        self._sink = sink
        apart = not (group.lockstep or group.diverges or group.in_one_process)
        self._rivals = affordable(plan, num_steps) if apart else ()

    def run(self, step: int, source: Source) -> Plan:
        """The plan to follow, the same on all ranks: with the choice that was fastest. The engine
        follows it already.

        Args:
            step: number of the step that comes next.
            source: its samples.

        Raises `PeerLost` if another rank is gone. What else goes wrong counts against the choice.
        """
        if not self._rivals:
            return self._follow(self._plan, step)
        begun = time.perf_counter()
        tried = [_Tried(choice) for choice in self._choices()]
        for number in range(1 + ROUNDS):
            for one in tried:
                self._pass(one, step, source, counts=number > 0)
            fastest = min(one.typical for one in tried)
            for one in tried:
                one.failed |= number > 0 and one.typical > _OUT * fastest
        return self._decided(step, tried, time.perf_counter() - begun)

    def _choices(self) -> list[Choice]:
        return [self._plan.choice, *(rival.choice for rival in self._rivals)]

    def _pass(self, one: _Tried, step: int, source: Source, counts: bool) -> None:
        if one.failed:
            return
        try:
            found = self._engine.rehearsal.run(
                step, source, one.choice, self._plan.choice.recompute
            )
        except Exception:  # the step itself will meet it, and tell
            found = None
        if found is None:
            one.failed = True
        elif counts:
            one.seconds.append(found.seconds)

    def _decided(self, step: int, tried: Sequence[_Tried], seconds: float) -> Plan:
        with self._engine.crossing.open():
            everyone = self._group.exchange([one.typical for one in tried])
        # Ranks wait for the slowest of them.
        slowest = [max(times) for times in zip(*everyone, strict=True)]
        best = min(range(len(slowest)), key=lambda number: slowest[number])
        if not slowest[best] < _PAYS * slowest[0]:
            best = 0
        plan = self._plan if best == 0 else self._plan.taking(self._rivals[best - 1])
        told = self._with_kernels(plan.prediction, best)
        plan = plan.model_copy(update={"prediction": told})
        share = self._plan.largest_share
        self._sink(
            Tried(
                time=time.time(),
                step=step,
                choices=tuple(choice.describe() for choice in self._choices()),
                pass_seconds=tuple(each * share if each < math.inf else None for each in slowest),
                taken=plan.choice.describe(),
                seconds=seconds,
            )
        )
        return self._follow(plan, step)

    def _follow(self, plan: Plan, step: int) -> Plan:
        """`plan`, from now on; its rivals have had their trial."""
        plan = plan.model_copy(update={"rivals": ()})
        self._engine.follow(plan, step, "it was faster in a trial")
        return plan

    def _with_kernels(self, told: Prediction | None, best: int) -> Prediction | None:
        """`told`, with what the trial of the others has left in the process."""
        sizes = [rival.kernel_bytes for rival in self._rivals]
        left = sum(size for number, size in enumerate(sizes, 1) if number != best)
        if told is None or not left:
            return told
        name = "kernels of a trial"
        return told.model_copy(
            update={
                "peak_bytes": told.peak_bytes + left,
                "evaluation_peak_bytes": told.evaluation_peak_bytes + left,
                "by_kind": {**told.by_kind, name: told.by_kind.get(name, 0) + left},
            }
        )


def affordable(plan: Plan, num_steps: int | None) -> tuple[Rival, ...]:
    """The rivals of `plan`, the fastest first, as many as a trial may take of a run of that many
    steps."""
    own = plan.prediction
    if own is None or not plan.rivals:
        return ()

    def cost(choice: Choice, told: Prediction) -> float:
        passes = max(1, -(-plan.largest_share // choice.micro_batch))
        return (1 + ROUNDS) * told.step_seconds / passes

    allowed = MOST_SECONDS if num_steps is None else MOST_OF_THE_RUN * num_steps * own.step_seconds
    spent = cost(plan.choice, own)
    taken: list[Rival] = []
    for rival in plan.rivals:
        more = cost(rival.choice, rival.prediction)
        if spent + more <= allowed:
            spent += more
            taken.append(rival)
    return tuple(taken)
