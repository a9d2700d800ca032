"""Judge: what becomes of a step that there is nothing to learn from.

Its loss, its weight or its gradient is not finite, or it weighs nothing. All ranks see the same totals,
ask at the same moment and tell each other what they know of their own samples, so all of them come to
the same. What they staged is put back before: samples are judged by the weights and buffers of the step
before.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import final

from anybatch.compute.lm_loss import wrong_target
from anybatch.data import Bad, told_samples
from anybatch.engine.outcome import Again, PassedOver, by_rank
from anybatch.engine.room import Crossing
from anybatch.engine.source import Blame, Source
from anybatch.engine.totals import Means, Totals
from anybatch.errors import LossError
from anybatch.parallel import Group


@dataclass(frozen=True, slots=True)
class Staged:
    """What this rank has staged in one attempt.

    Attributes:
        step: number of the step.
        source: its samples.
        totals: sums over the micro-batches.
        numbers: of the micro-batches that are in the totals, in that order.
    """

    step: int
    source: Source
    totals: Totals
    numbers: array[int] = field(default_factory=lambda: array("q"))


@dataclass(frozen=True, slots=True)
class _Suspicion:
    """What a rank knows of a loss that is not finite: the micro-batch, in words, and the samples that
    are to blame. The default is that of a rank with nothing to say."""

    where: str = ""
    bad: tuple[Bad, ...] = ()


@final
class Judge:
    """Judges steps. Where bad data is skipped, a step is done again without the samples that are to
    blame, or passed over if none is; else it is an error that names them.

    Args:
        group: the ranks.
        crossing: around what they do together.
        blame: finds the samples; None: nobody looks.
        skips: whether bad data is skipped.
    """

    def __init__(self, group: Group, crossing: Crossing, blame: Blame | None, skips: bool) -> None:
        self._group = group
        self._crossing = crossing
        self._blame = blame
        self._skips = skips

    @staticmethod
    def accepts(means: Means) -> bool:
        """Whether there is something to learn from totals like these."""
        finite = math.isfinite(means.loss_sum) and math.isfinite(means.weight)
        return finite and means.weight != 0 and not means.num_negative

    def totals(self, means: Means, staged: Staged) -> PassedOver | Again:
        """What becomes of totals that are not accepted. Raises `LossError` if that is the end."""
        for what, value in (("loss", means.loss_sum), ("weight", means.weight)):
            if not math.isfinite(value):
                return self._not_finite(what, value, staged)
        if means.num_negative:
            raise LossError(
                f"the loss function returned a negative weight in step {staged.step}: weights are"
                " counts or importances, so they cannot be below zero."
            )
        if self._skips:
            return PassedOver("every sample that is left in it weighs nothing")
        raise LossError(
            f"the total weight of step {staged.step} is zero, so there is no mean to learn from:"
            " every sample of its global batch is ignored or weighs nothing."
        )

    def gradient(self, norm: float, loss: float, staged: Staged) -> PassedOver | Again:
        """What becomes of a gradient whose `norm` is not finite, though its `loss` is. Raises
        `LossError` if that is the end."""
        mine: tuple[Bad, ...] = ()
        if self._blame is not None:
            mine = tuple(self._blame.gradients(staged.numbers, staged.source))
        everyone = [mine]
        if not self._group.diverges:  # else it is this rank's own, and no other has come here
            with self._crossing.open():
                everyone = self._group.exchange(mine)
        found = by_rank(everyone)
        if self._skips:
            why = f"the gradient has the norm {norm}, though the loss is {loss:.6g}"
            return Again(bad=found) if found else PassedOver(why)
        names = [bad.place.name for _, bad in found]
        where = f", {told_samples(names)} to blame" if names else ""
        raise LossError(
            f"the gradient of step {staged.step} has the norm {norm}, though its loss is"
            f" {loss:.6g}{where}: a learning rate that is too large, or a division by zero in"
            " backward, are the usual causes. Nothing of the step was kept."
        )

    def _not_finite(self, what: str, value: float, staged: Staged) -> PassedOver | Again:
        with self._crossing.open():
            everyone = self._group.exchange(self._suspicion(staged))
        found = by_rank(one.bad for one in everyone)
        if self._skips:
            why = f"the {what} is {value}, and none of its samples is to blame alone"
            return Again(bad=found) if found else PassedOver(why)
        # The rank that names samples, or else the first that has a place to name.
        worst = max(
            range(len(everyone)), key=lambda r: (bool(everyone[r].bad), everyone[r].where > "")
        )
        names = [bad.place.name for bad in everyone[worst].bad]
        where = f" in {everyone[worst].where}" if everyone[worst].where else ""
        where += f" of rank {worst}" if where and len(everyone) > 1 else ""
        where += f", and {told_samples(names)} to blame" if names else ""
        raise LossError(
            f"the {what} of step {staged.step} is {value}{where}: look at these samples, or lower the"
            " learning rate. Nothing of the step was kept."
        )

    def _suspicion(self, staged: Staged) -> _Suspicion:
        source = staged.source
        numbers = [staged.numbers[place] for place in staged.totals.not_finite()]
        wrong = wrong_target()  # before any sample is run again
        bad = () if self._blame is None else tuple(self._blame.losses(numbers, source))
        if not numbers:
            return _Suspicion(bad=bad)
        where = f"micro-batch {numbers[0]} ({source.describe(numbers[0])})"
        return _Suspicion(f"{where}: {wrong.rstrip('.')}" if wrong else where, bad)
