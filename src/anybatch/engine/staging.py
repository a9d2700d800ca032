"""Staging: runs the passes of one rank in a step, forward and backward for each micro-batch. Gradients,
losses and weights are accumulated as sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, final

import torch

from anybatch.compute.joint import Ask
from anybatch.compute.loss_check import LOOKED_AT
from anybatch.compute.loss_reduction_check import warn_of_collate
from anybatch.data import to_device
from anybatch.data.evaluation import join
from anybatch.data.generators import Borrowed
from anybatch.data.schedule import measures_noise
from anybatch.engine.bad_sample_search import OneByOne, naming_samples
from anybatch.engine.context import PassContext
from anybatch.engine.joint import JointPasses
from anybatch.engine.limit import uncounted
from anybatch.engine.outcome import Staged
from anybatch.engine.source import MicroBatch
from anybatch.plans import Plan


@final
class Staging:
    """Runs the passes of a step on one replica. `blame` finds the sample for which a pass raises an
    error."""

    def __init__(self, context: PassContext, blame: OneByOne | None) -> None:
        self._replica, self._group, self._device = context.replica, context.group, context.device
        self._randomness, self._limit = context.randomness, context.limit
        self._meter = context.meter
        self._buffers, self._timer = context.buffers, context.timer
        self._blame = blame
        self._checked: int | None = None  # the step before which the loss was last checked
        self.joint: JointPasses = JointPasses(context)

    def run(self, staged: Staged, plan: Plan) -> None:
        """Run all passes of the step under `plan` and add the results to `staged`. Raises the errors of
        the data, the model and the loss, and `PassAbandoned` if another rank has failed."""
        replica, group, choice = self._replica, self._group, plan.choice
        outputs: list[tuple[Any, int]] = []
        # The bits of a reproducible run do not depend on how its step is divided.
        alone = group.size == 1 and plan.task.grain is None and not replica.is_joint
        replica.phase = "loading"
        with self._timer.running():
            for number, (micro, ask) in enumerate(self._micro_batches(staged, plan)):
                if not number and micro.num_samples:
                    self._check_loss(micro, staged)
                measured = self._is_measured(micro, staged)
                if micro.grain is not None:
                    self._randomness.begin_grain(staged.index, micro.grain)
                with (
                    naming_samples(self._blame, staged.source, number, staged.step),
                    self._limit.watched(choice.kind, micro.batch),
                    group.last_pass(measured) if micro.last else nullcontext(),
                ):
                    size, whole = micro.num_samples, alone and micro.last and not number
                    loss = replica.accumulate(micro.batch, size, micro.ghosts, ask, whole)
                if micro.num_samples:
                    staged.in_float16 |= loss.sum.dtype == torch.float16
                    staged.totals.add(loss, part=micro.part)
                    if loss.outputs is not None:
                        outputs.append((to_device(loss.outputs, "cpu"), micro.num_samples))
                    if measured and (norm := group.sum_norm(replica, micro.last)) is not None:
                        staged.totals.add_part(norm, micro.part)
                    staged.numbers.append(number)
                elif micro.batch is not None:  # run only for the other ranks, before all that count
                    self._buffers.put_back_buffers()
                if micro.ends_part:
                    group.part_staged(micro.part, self._buffers.held)
                    if not micro.last:
                        self._buffers.put_back_buffers()
                del micro, ask, loss  # free them while the next one is loaded
                replica.phase = "loading"
        if outputs:
            staged.outputs = join(*zip(*outputs, strict=True), place="Loss.outputs")
        staged.sums = staged.totals.tensor()

    def _micro_batches(self, staged: Staged, plan: Plan) -> Iterator[tuple[MicroBatch, Ask | None]]:
        source, choice = staged.source, plan.choice
        if self._replica.is_joint:
            naming = partial(naming_samples, self._blame, source, step=staged.step)
            return self.joint.of(staged.index, source, choice, naming)
        return ((micro, None) for micro in source.micro_batches(choice))

    def _check_loss(self, micro: MicroBatch, staged: Staged) -> None:
        """Check, before the first pass of a step that is divided, that the loss is additive over
        samples: in the first such step, and in steps 2, 4, 8, ... if no warning was issued, since the
        first samples may not show it (a term that begins later, weights that are equal by chance).
        Skipped where ranks synchronize inside passes, since the other ranks would wait there."""
        source, step = staged.source, staged.step
        is_cut = not micro.last or self._group.size > 1
        if not is_cut or self._group.lockstep or self._replica.has_warned:
            return
        is_first = self._checked is None
        if not is_first and (step & (step - 1) or step == self._checked):
            return
        self._checked = step
        others = [self._device] if self._device.type == "cuda" else []
        try:
            with (
                uncounted(),
                self._meter.aside(),
                torch.random.fork_rng(others, enabled=bool(others)),
                Borrowed(),
            ):
                # One or two samples show little. Three without gradients fit wherever one with
                # gradients fits. A loss that needs more (the hardest k) gets parts of micro-batch size.
                fits = micro.num_samples
                few = min(LOOKED_AT, max(3, fits))
                # Samples of two micro-batches may differ (those with labels come first).
                crosses = is_first and not (self._replica.is_joint or source.has_collate)
                known = False
                for most, cut in ((few, few // 3), (2 * fits - 1, fits)):
                    is_done = self._replica.has_warned or not crosses
                    if known and (is_done or not few < most <= 2 * LOOKED_AT):
                        break
                    take, size = source.first_samples(most, micro.batch)
                    cut = min(cut, size - 1)
                    known |= self._replica.check_loss(take, size, cut, fits, not known)
                if is_first and source.is_coupled(micro.batch):
                    warn_of_collate(self._replica.loss_as_given)
        finally:
            self._buffers.put_back()
            self._replica.phase = "loading"

    def _is_measured(self, micro: MicroBatch, staged: Staged) -> bool:
        """Returns whether to measure the gradient norm of the samples so far after this pass: after the
        first pass of this rank or, where the longest samples come first, after the unsorted ones before
        them; only if they are not the whole step and the loss is not joint. The measurement reads every
        gradient once."""
        is_first = bool(micro.num_samples) and not staged.numbers
        is_part = is_first if micro.padded is None else micro.ends_drawn
        is_whole = micro.last and self._group.size == 1
        is_due = measures_noise(staged.index)
        return is_due and is_part and not is_whole and not self._replica.is_joint
