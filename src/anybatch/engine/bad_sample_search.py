"""Blame: which samples a loss that is not finite comes from, or a gradient.

One bad sample makes the loss of its whole micro-batch NaN, and where BatchNorm looks across samples
their statistics too. So each sample of such a micro-batch is judged alone, by the model in evaluation
mode with the weights and buffers of the step before: there samples do not see each other and nothing
is drawn at random, so the verdict is a function of the sample and the weights, under every plan.

Where the loss compares samples, none has one alone, and each is judged by what it is encoded to.

A model that cannot be judged so (in evaluation mode it computes no loss, say) blames nobody. Nor are
gradients judged where ranks meet inside passes: none of them has one by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch

from anybatch.compute import Replica
from anybatch.compute.joint import encodings_of
from anybatch.compute.modes import evaluating
from anybatch.data import Bad, Place
from anybatch.engine.source import Source
from anybatch.parallel import Group
from anybatch.parallel.failures import first_line
from anybatch.task import JointLoss, LossFunction


@final
class OneByOne:
    """Judges the samples of micro-batches, each alone.

    Args:
        replica: the model, and the precision that it computes in.
        group: the ranks.
        loss: see `Task`.
    """

    def __init__(self, replica: Replica, group: Group, loss: LossFunction) -> None:
        self._replica = replica
        self._group = group
        self._loss = encodings_of(loss) if isinstance(loss, JointLoss) else loss
        self._judged_by = "encoding" if replica.is_joint else "loss"

    def raising(self, number: int, source: Source) -> tuple[Bad, ...]:
        """The first sample of micro-batch `number` for which model or loss raise an error though it is
        alone; none if they do for others too."""
        if self._group.lockstep:
            return ()
        found: list[Bad] = []
        some_are_good = number > 0
        with evaluating(self._replica.model):
            for place in source.places(number):
                try:
                    self._replica.evaluate(self._loss, source.alone(place), 1)
                    some_are_good = True
                except Exception as error:
                    found.append(Bad(place, first_line(error)))
                if found and some_are_good:
                    return (found[0],)
                if len(found) == 2:
                    break
        return ()

    def gradients(self, numbers: Sequence[int], source: Source) -> tuple[Bad, ...]:
        """The samples of this rank's micro-batches `numbers` whose own gradient is not finite, though
        their loss is."""
        if self._group.lockstep:
            return ()
        found = []
        try:
            with evaluating(self._replica.model):
                for place in _suspects(numbers, source):
                    if not self._replica.gradient_is_finite(self._loss, source.alone(place)):
                        found.append(Bad(place, "its gradient is not finite"))
        except Exception:  # what is to be told is the gradient of the step, not this
            return ()
        return tuple(found)

    def losses(self, numbers: Sequence[int], source: Source) -> tuple[Bad, ...]:
        """The samples of this rank's micro-batches `numbers` whose own loss is not finite. Every rank
        calls it, each with its own numbers."""
        suspects = _suspects(numbers, source)
        group = self._group
        if not group.lockstep:
            try:
                return self._judged(suspects, source)
            except Exception:  # what is to be told is the loss, not this
                return ()
        # Ranks meet inside passes, so all run as many. Whoever has nobody to judge runs any sample.
        idle = max(group.exchange(len(suspects))) - len(suspects)
        anyone = suspects[:1] or list(source.places(0)[:1])
        found: tuple[Bad, ...] | None = None
        group.begin()
        try:
            self._judged(anyone * idle, source)
            found = self._judged(suspects, source)
        except Exception:
            found = None
        group.gather(failed=found is None)
        everyone = group.agree(None if found is None else torch.zeros(0, dtype=torch.float64))
        return () if found is None or everyone is None else found

    def _judged(self, suspects: Sequence[Place], source: Source) -> tuple[Bad, ...]:
        found = []
        with evaluating(self._replica.model), torch.no_grad():
            for place in suspects:
                loss = self._replica.evaluate(self._loss, source.alone(place), 1)
                for what, value in (
                    (self._judged_by, float(loss.sum)),
                    ("weight", float(loss.weight)),
                ):
                    if not math.isfinite(value):
                        found.append(Bad(place, f"its {what} is {value}"))
                        break
        return tuple(found)


def _suspects(numbers: Sequence[int], source: Source) -> list[Place]:
    return [place for number in numbers for place in source.places(number)]
