"""NonfinitePolicy: handles steps that the model cannot learn from.

In such a step the loss, its weight or its gradient is not finite, or the total weight is zero. All
ranks see the same totals, ask at the same point, and exchange what they know about their own samples,
so all reach the same decision. Staged state is rolled back first: samples are evaluated with the
weights and buffers of the previous step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from anybatch.compute.lm_loss import wrong_target
from anybatch.data import Bad, format_samples
from anybatch.engine.bad_sample_search import OneByOne
from anybatch.engine.outcome import Again, PassedOver, Staged, by_rank
from anybatch.engine.totals import Means
from anybatch.errors import LossError, skipping
from anybatch.parallel import Group

_CAUSE = (
    "a division by zero, a logarithm of zero, or std or var over a single sample is the usual cause or,"
    " after the first step, a learning rate that is too large."
)


@dataclass(frozen=True, slots=True)
class _Suspicion:
    """What a rank knows about a loss that is not finite: the micro-batch, in words; the samples that
    cause it; what is wrong with a target, if known; and whether every sample of the rank causes it. The
    default is for a rank with nothing to report."""

    where: str = ""
    bad: tuple[Bad, ...] = ()
    wrong: str = ""
    every: bool = False


@final
class NonfinitePolicy:
    """Decides about steps that cannot be learned from. If bad data is skipped, a step is redone without
    the samples that cause the problem, or skipped if none is found; otherwise an error names them.

    Args:
        blame: finds the samples; None: samples are not searched.
        skips: whether bad data is skipped.
    """

    def __init__(self, group: Group, blame: OneByOne | None, skips: bool) -> None:
        self._group = group
        self._blame = blame
        self._skips = skips

    @staticmethod
    def accepts(means: Means) -> bool:
        """Returns whether the model can learn from totals like these."""
        finite = math.isfinite(means.loss_sum) and math.isfinite(means.weight)
        return finite and means.weight != 0 and not means.num_negative

    def totals(self, means: Means, staged: Staged) -> PassedOver | Again:
        """Decide about totals that are not accepted. Raises `LossError` if training cannot go on."""
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
            " every sample of its global batch is ignored or weighs nothing, or there is none."
        )

    def gradient(self, norm: float, loss: float, staged: Staged) -> PassedOver | Again:
        """Decide about a gradient whose `norm` is not finite although its `loss` is. Raises `LossError`
        if training cannot go on."""
        if self._group.delays:  # the samples that it came from are gone
            step = f"step {staged.step}"
            raise not_applied(norm, f"the step before {step}", f", and nothing of {step} was kept")
        mine: tuple[Bad, ...] = ()
        if self._blame is not None:
            mine = tuple(self._blame.gradients(staged.numbers, staged.source))
        everyone = [mine]
        if not self._group.diverges:  # otherwise the gradient is local to this rank
            everyone = self._group.exchange(mine)
        found = by_rank(everyone)
        if self._skips:
            why = f"the gradient has the norm {norm}, though the loss is {loss:.6g}"
            return Again(bad=found) if found else PassedOver(why)
        detail = f", though its loss is {loss:.6g} (look for a division by zero in backward)"
        raise self._error("the norm of the gradient", norm, staged, found, detail)

    def _not_finite(self, what: str, value: float, staged: Staged) -> PassedOver | Again:
        everyone = self._group.exchange(self._suspicion(staged))
        found = by_rank(one.bad for one in everyone)
        if self._skips:
            why = f"the {what} is {value}, and none of its samples is to blame alone"
            return Again(bad=found) if found else PassedOver(why)
        detail = next((f" ({one.wrong.rstrip('.')})" for one in everyone if one.wrong), "")
        every = any(one.every for one in everyone)
        cause = _CAUSE
        if every or not found:
            found = []
            # The first rank that can name a place.
            worst = next((rank for rank, one in enumerate(everyone) if one.where), None)
            if worst is not None:
                rank = f" of rank {worst}" if len(everyone) > 1 else ""
                detail = f" in {everyone[worst].where}{rank}{detail}"
            if self._blame is not None:  # otherwise no sample was evaluated
                who = "each of the samples makes" if every else "no sample makes"
                detail += f", and {who} it so alone"
            if math.isinf(value) and staged.in_float16:
                cause = (
                    "the loss function adds up in float16, whose largest number is 65,504. Add up in"
                    " float32 (loss.float().sum())."
                )
        raise self._error(f"the {what}", value, staged, found, detail, cause)

    def _error(
        self,
        what: str,
        value: float,
        staged: Staged,
        found: Sequence[tuple[int, Bad]],
        detail: str,
        cause: str = _CAUSE,
    ) -> LossError:
        """Returns the error that names the value and the samples `found` or, without any, the cause."""
        what = f"{what} of step {staged.step}"
        if not found:
            return LossError(f"{what} is {value}{detail}: {cause} Nothing of the step was kept.")
        names = format_samples([bad.place.name for _, bad in found])
        ranks = {rank for rank, _ in found}
        where = f" on rank {ranks.pop()}" if self._group.size > 1 and len(ranks) == 1 else ""
        verb, them = ("makes", "it") if len(found) == 1 else ("make", "them")
        return LossError(
            f"{names}{where} {verb} {what} {value}{detail}: mend {them}, or {skipping()} leaves such"
            " samples out. Nothing of the step was kept."
        )

    def _suspicion(self, staged: Staged) -> _Suspicion:
        source = staged.source
        numbers = [staged.numbers[place] for place in staged.totals.not_finite()]
        wrong = wrong_target() or staged.empty  # before any sample is run again
        bad = () if self._blame is None else tuple(self._blame.losses(numbers, source))
        where = f"micro-batch {numbers[0]} ({source.describe(numbers[0])})" if numbers else ""
        every = len(bad) > 1 and sum(len(source.places(n)) for n in staged.numbers) == len(bad)
        return _Suspicion(where, bad, wrong or "", every)


def not_applied(norm: float, step: str, lost: str = "") -> LossError:
    """Returns the error for a gradient that is not finite, whose exchange between ranks overlapped with
    later computation. `step`: the step it belongs to, in words; `lost`: what else was discarded."""
    return LossError(
        f"the gradient of {step}, which was under way, has the norm {norm}: a learning rate that is too"
        f" large, or a division by zero in backward, is the usual cause. It was not applied{lost}."
    )
