"""Transaction: a global step either commits entirely or leaves no trace.

    stage    micro-batch by micro-batch: forward, backward; gradients, losses, weights are sums
    vote     all ranks learn whether all succeeded, and the totals
    commit   divide by the total weight, unscale, clip, update

Whatever fails before commit, on any rank, all ranks recover in the same way: discard the staged state,
restore what forward wrote, use a leaner plan (or a smaller loss scale), and run the step again. If bad
samples are skipped, they are removed from the step in the same way, which leaves a step of fewer
samples. The peak memory of commit is allocated, and freed, before the ranks agree: if memory is refused
after that, the rank ends.

`run` identifies a step by its index, from 0, which keys random state. Events and messages identify it
by its number, from 1 (see `events`), which is what `step` means in the engine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from anybatch.compute import Replica
from anybatch.compute.loss_reduction_check import warn_of_no_gradient
from anybatch.data import Bad, BadSamples
from anybatch.engine.bad_sample_search import OneByOne
from anybatch.engine.context import ComputeTimer, PassContext
from anybatch.engine.limit import Limit
from anybatch.engine.meter import Meter
from anybatch.engine.nonfinite_policy import NonfinitePolicy, not_applied
from anybatch.engine.outcome import Again, Committed, PassedOver, Staged, by_rank
from anybatch.engine.randomness import Randomness
from anybatch.engine.recovery import Recovery
from anybatch.engine.rehearsal import Rehearsal
from anybatch.engine.rollback import SavedBuffers
from anybatch.engine.skips import Skips
from anybatch.engine.source import Source
from anybatch.engine.staging import Staging
from anybatch.engine.step_thread import StepThread
from anybatch.engine.totals import Means, Names, Totals, over_parts
from anybatch.engine.update_room import UpdateRoom
from anybatch.errors import LossError, NoPlanFits, PeerLost, RankLost
from anybatch.events import Overflowed, Sink, step_number
from anybatch.oom import as_memory_failure
from anybatch.parallel import Agreed, Group, PassAbandoned, Wish
from anybatch.parallel.failures import Outdated, RankReport, first_error
from anybatch.plans import Plan
from anybatch.process.interrupts import held

LEAST_LOSS_SCALE = 2.0**-14
"""Smallest loss scale, equal to float16's smallest normal number. Gradients that overflow below it
overflow by themselves, not because they were scaled up."""


class Transactions:
    """Runs global steps on one replica, one after the other.

    Args:
        plan: followed until memory runs out, then replaced by a leaner one until it is tried again; see
            `plan`, `grow`.
        limit: the memory budget, already entered.
        commit_bytes: peak bytes that the update allocates: (in the first step, in later ones).
        blame: finds the samples that make a loss not finite; None: samples are not searched.
        skips: records bad samples and steps that are left out; None: they are errors.

    Attributes:
        thread: cleans up after failed passes.
        rehearsal: runs passes that are undone.
        wish: what this rank requests; all ranks know it after the vote of the next step.
        stops: whether this rank also requests to stop; separate, so that a signal handler can set it.
        failed_together: whether all ranks met the error that `run` raised last at the same point, so
            that they can still act together.
    """

    def __init__(
        self,
        replica: Replica,
        group: Group,
        plan: Plan,
        *,
        randomness: Randomness,
        limit: Limit,
        meter: Meter,
        device: torch.device,
        sink: Sink,
        clip_norm: float | None = None,
        commit_bytes: tuple[int, int] = (0, 0),
        blame: OneByOne | None = None,
        skips: Skips | None = None,
    ) -> None:
        self._replica = replica
        self._group = group
        self._randomness = randomness
        self._meter = meter
        self._device = device
        self._sink = sink
        self._clip_norm = clip_norm
        self._skips = skips
        self._names = Names(group)
        self.thread: StepThread = StepThread()
        self._buffers = SavedBuffers(replica.model, replica.loss_as_given, replica.parameter_writes)
        self._timer = ComputeTimer(device)
        context = PassContext(
            replica=replica,
            group=group,
            device=device,
            randomness=randomness,
            limit=limit,
            meter=meter,
            thread=self.thread,
            buffers=self._buffers,
            timer=self._timer,
        )
        self._judge = NonfinitePolicy(group, blame, skips is not None)
        self._staging = Staging(context, blame)
        self.rehearsal: Rehearsal = Rehearsal(context, blame)
        self._room = UpdateRoom(context, commit_bytes)
        self._recovery = Recovery(plan, context, sink)
        replica.guard_outside_gradients()
        self.wish: Wish = Wish.NOTHING
        self.stops: bool = False
        self.failed_together: bool = False
        self._index = 0
        self._step = 0  # number of the last step that was run; 0: none
        # In the current attempt:
        self._has_voted = self._is_updating = self._is_applied = False

    @property
    def plan(self) -> Plan:
        """The current plan. Evaluations may change its evaluation batch."""
        return self._recovery.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._recovery.plan = plan

    def follow(self, plan: Plan, step: int, reason: str, tells: bool = True) -> None:
        """Follow `plan` from `step` on and forget the plans that failed before; on all ranks. If
        `tells`, an event is emitted when the choice changes."""
        self._recovery.follow(plan, step, reason, tells)

    def grow(self) -> bool:
        """Between two steps: return to the plan that ran out of memory, if it is time to and there is
        room for what it keeps. All ranks do, or none. Returns whether the plan has changed."""
        return self._recovery.grow(self._step + 1)

    def settle(self) -> None:
        """Make the weights the same on all ranks and apply any gradient that is still being exchanged.
        An interrupt is delayed until this is done.

        Raises `LossError` if the last gradient is not finite, `PeerLost` if a rank is lost.
        """
        with held():
            weight = self._group.settle(self._replica)
            if not weight:
                return
            norm = float(self._replica.finish(weight, self._clip_norm))
            if not math.isfinite(norm):
                self._replica.drop()
                raise not_applied(norm, f"step {self._step}")
            self._replica.apply()

    def run(
        self, index: int, source: Source, before_update: Callable[[], None], whole: ExitStack
    ) -> Committed | PassedOver:
        """Run the global step `index` in as many attempts as it takes. It can be left out only if bad
        samples are skipped.

        Args:
            index: the number of steps before it.
            source: its samples.
            before_update: called right before the update (to set the learning rate).
            whole: closed by the caller when the step has been counted. That raises the interrupt
                (Ctrl-C) if one arrived when the step was certain to be committed.

        Raises:
            NoPlanFits: memory ran out under the leanest plan.
            LossError: the loss, its weight or the gradient cannot be learned from.
            DataError: a sample is bad and may not be skipped, or too many samples are bad.
            PeerFailed: another rank raised an error from which no plan recovers.
            PeerLost: another rank is lost.
            RankLost: this rank ran out of memory during or after the vote of the ranks on the step, or
                oneDNN was refused memory.

        Except for `PeerLost` and `RankLost`, errors leave parameters, optimizer and buffers as they
        were before the step.
        """
        self._index, self._step = index, step_number(index)
        self.failed_together = False
        self._randomness.begin(index)
        while True:
            result = self._attempt(source, before_update, whole)
            if not isinstance(result, Again):
                return result
            if not self._is_mended(result, source):
                return PassedOver("each of its samples is bad")
            self._randomness.redo(index)

    def _attempt(
        self, source: Source, before_update: Callable[[], None], whole: ExitStack
    ) -> Committed | PassedOver | Again:
        """Run one attempt: the step is committed, or nothing changes and the result says what to do."""
        totals = Totals(self._device, self._group.num_parts)
        staged = Staged(self._index, source, totals)
        report, wrong = self._stage(staged)
        # The error has been dropped, so the tensors that its traceback kept alive are freed.
        if report.failed:
            self.thread.clear()  # makes room for reporting the failure
        try:
            with ExitStack() as sure:  # no rank is interrupted while others commit
                voted = self._vote(staged, report, wrong, sure)
                if isinstance(voted, Again):
                    return voted
                means, agreed = voted
                done: Committed | Again | float | None = None
                if self._judge.accepts(means):
                    done = self._commit(means, before_update, agreed)
                if isinstance(done, Committed):
                    self._recovery.committed()
                    whole.push(sure.pop_all())
                    return replace(done, agreed_seconds=staged.seconds, outputs=staged.outputs)
            if isinstance(done, Again):
                return done
            staged.empty = self._replica.empty_mean()
            self._put_back()
            if done is None:
                return self._judge.totals(means, staged)
            return self._judge.gradient(done, means.loss, staged)
        except BaseException as error:
            self._put_back()
            failure = as_memory_failure(error)
            alone = self._group.diverges or isinstance(error, PeerLost) or failure is not None
            together = self._has_voted and not self._is_updating
            self.failed_together = together and isinstance(error, Exception) and not alone
            if failure is None:
                raise
            where = "in the update of" if self._has_voted else "while ranks spoke to each other in"
            raise RankLost(
                f"memory ran out {where} step {self._step}, where there is no way back"
                f" ({failure.message}): the run goes on from its last checkpoint when it is started"
                " again; a plan made by anybatch, or more memory, keeps this from happening."
            ) from error

    def _stage(self, staged: Staged) -> tuple[RankReport, Exception | None]:
        """Run the passes, and make sure that there is room for the update. Returns this rank's report,
        and its error if no plan recovers from it."""
        begun = time.perf_counter()
        replica, group, buffers = self._replica, self._group, self._buffers
        buffers.forget()  # until this attempt has saved them, there is nothing to restore
        self._has_voted = self._is_updating = self._is_applied = False
        self._staging.joint.begin()
        try:
            group.expect(staged.source.num_samples)
            group.begin()
            buffers.save()
            self._check_up_to_date()
            replica.take_edits()
            replica.drop()  # gradients of the user's own backward passes between two steps
            self._room.tidy()
            self._staging.run(staged, self.plan)
            replica.phase = "reduction"
            group.staged(buffers.held)
            replica.phase = "update"
            self._room.reserve()
        except PassAbandoned:  # another rank failed, and reports it in the vote
            staged.sums = None
        except Exception as error:
            report = RankReport.of(error, replica.phase, self._meter)
            if self._skips is not None and isinstance(error, BadSamples):
                report = replace(report, bad=error.bad)
            return report, None if report.can_be_mended else error
        except BaseException:  # interrupted by the user: no rank waits for a vote
            self._put_back()
            raise
        finally:
            staged.seconds = time.perf_counter() - begun
        return RankReport(), None

    def _vote(
        self, staged: Staged, report: RankReport, wrong: Exception | None, sure: ExitStack
    ) -> tuple[Means, Agreed] | Again:
        """Returns what the ranks agree on, if all have staged their parts; otherwise the reports of all
        ranks, after this one was rolled back. Raises `wrong`, this rank's error from which no plan
        recovers."""
        begun = time.perf_counter()
        if staged.sums is None:
            self._staging.joint.fail()
        try:
            self._group.gather(failed=report.failed)
            sure.enter_context(held())
            wish = self.wish | Wish.STOP if self.stops else self.wish
            sums = None if report.failed else staged.sums
            agreed = self._group.agree(sums, self._timer.last_seconds, wish)
        except Exception as error:
            # A single rank can still redo the step; with several, the others would not know of it.
            if self._group.size > 1 or as_memory_failure(error) is None:
                raise
            agreed, report = None, RankReport.of(error, "reduction", self._meter)
        self._has_voted = True
        staged.seconds += time.perf_counter() - begun
        if agreed is None:
            self._put_back()
            everyone = self._group.exchange(report)
            first_error(wrong, everyone, self._step)
            return Again(everyone, by_rank(report.bad for report in everyone))
        agreed = over_parts(agreed, self._group.num_parts)
        means = Means(agreed.totals, self._names.common(staged.totals.names, agreed))
        if self._judge.accepts(means):
            self._group.accepted(agreed)
        return means, agreed

    def _commit(
        self, means: Means, before_update: Callable[[], None], agreed: Agreed
    ) -> Committed | Again | float:
        """Apply the update. If it was not applied, returns the norm of a gradient that is not finite,
        or `Again` with a smaller loss scale."""
        replica, room = self._replica, self._room
        norm = float(replica.finish(means.weight, self._clip_norm))
        scale = replica.loss_scale
        if scale is None and not math.isfinite(norm):
            return norm
        is_first = not room.has_updated and self._group.rank == 0
        # A hook may already have updated the parameters and cleared the gradients.
        # The first step of a stale exchange has no gradient to apply.
        is_expected = replica.gradients_are_hooked or self._group.delays
        if norm == 0.0 and is_first and not is_expected:
            warn_of_no_gradient(replica.loss_as_given, self._step)
        self._randomness.begin_update(self._index)
        before_update()
        self._is_updating = True  # an error may be that of one rank, and leave half an update
        if replica.apply():
            room.has_updated = self._is_applied = True
            self._group.committed(replica)
            return Committed(
                means.loss,
                means.weight,
                means.metrics,
                norm,
                agreed.notes,
                agreed.wished,
                part_weight=means.part_weight,
                part_grad_norm=means.part_grad_norm,
            )
        self._is_updating = False
        assert scale is not None
        self._put_back()
        after = replica.loss_scale or 0.0
        if after < LEAST_LOSS_SCALE:
            raise LossError(
                f"the gradient of step {self._step} is not finite at any loss scale (down to"
                f" {after:.3g}), so float16 is not to blame: look for a division by zero in backward."
            )
        self._sink(
            Overflowed(
                time=time.time(),
                step=self._step,
                loss_scale_before=scale,
                loss_scale_after=after,
            )
        )
        return Again()

    def _is_mended(self, failed: Again, source: Source) -> bool:
        """Take a leaner plan and omit bad samples, on all ranks. Returns whether samples are left."""
        if any(report.failure for report in failed.reports):
            try:
                self._recovery.make_room(failed.reports, self._step)
            except NoPlanFits:
                self.failed_together = not self._group.diverges
                raise
        return not failed.bad or self._leave_out(failed.bad, source) > 0

    def _leave_out(self, found: Sequence[tuple[int, Bad]], source: Source) -> int:
        """Leave these samples out of the step. Returns the number of samples left."""
        assert self._skips is not None
        self.failed_together = not self._group.diverges
        self._skips.leave_out(self._step, found)
        self.failed_together = False
        return source.leave_out([bad for _, bad in found])

    def _put_back(self) -> None:
        self.thread.clear()
        self._replica.drop()
        if not self._is_applied:  # otherwise they belong to the updated parameters
            self._buffers.put_back()
            self._group.undone()

    def _check_up_to_date(self) -> None:
        """Raises `Outdated` if the optimizer has other parameters than at the beginning, whose
        gradients would be neither divided nor summed over ranks."""
        if self._replica.is_outdated:
            raise Outdated(
                f"the optimizer trains other parameters in step {self._step} than at the beginning:"
                " some were added, taken out or unfrozen. Let the task give it all of them, unfrozen,"
                " with a learning rate of 0 for as long as they are to rest; or use Step, which begins"
                " anew."
            )
