"""The global step as a transaction: it commits whole or leaves no trace.

    stage    micro-batch by micro-batch: forward, backward; gradients, losses, weights are sums
    vote     all ranks learn whether all succeeded, and the totals
    commit   divide by the total weight, unscale, clip, update

Whatever fails before commit, on whichever rank, recovery is the same move on all of them: drop what is
staged, put back what forward wrote, take a leaner plan (or a smaller loss scale), and run the step
again. Where bad samples are to be skipped they are taken out of the step in the same way: what is left
is a step of fewer samples. What commit needs at its peak is allocated, and freed, before the ranks
agree: if memory is refused after that, the rank ends.

`run` is asked for a step by its index, from 0, which keys random state. Events and sentences tell it by
its number, from 1 (see `events`), which is what `step` means in the engine.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from anybatch.compute import Replica
from anybatch.compute.joint import Ask
from anybatch.compute.loss_check import LOOKED_AT
from anybatch.compute.loss_reduction_check import warn_of_collate, warn_of_no_gradient
from anybatch.data import Bad, BadSamples, to_device, told_samples
from anybatch.data.evaluation import join
from anybatch.data.generators import Borrowed
from anybatch.engine.bad_sample_search import OneByOne
from anybatch.engine.joint import JointPasses
from anybatch.engine.ladder import Ladder, Leak, nothing_leaner
from anybatch.engine.limit import Limit, uncounted
from anybatch.engine.meter import Meter
from anybatch.engine.nonfinite_policy import NonfinitePolicy, Staged, not_applied
from anybatch.engine.outcome import Again, Committed, PassedOver, by_rank
from anybatch.engine.randomness import Randomness
from anybatch.engine.rehearsal import ComputeTimer, Rehearsal
from anybatch.engine.rollback import SavedBuffers
from anybatch.engine.skips import Skips
from anybatch.engine.source import MicroBatch, Source
from anybatch.engine.step_thread import StepThread
from anybatch.engine.totals import Means, Names, Totals, over_parts
from anybatch.errors import DataError, LossError, NoPlanFits, PeerLost, RankLost
from anybatch.events import Overflowed, Replanned, Sink, step_number
from anybatch.oom import as_memory_failure, is_limited
from anybatch.parallel import Agreed, Group, PassAbandoned, Wish
from anybatch.parallel.failures import Outdated, RankReport, first_error, memory_events
from anybatch.plans import Plan
from anybatch.process.cuda_driver import release_unused
from anybatch.process.interrupts import held

LEAST_LOSS_SCALE = 2.0**-14
"""Below this scale, which is that of float16's smallest normal number, gradients that still overflow
do so of themselves, not because they were scaled up."""

ALL_MEASURED, MEASURED_EVERY = 256, 4
"""The noise of gradients is measured in each of so many steps at first, then in one of so many."""


_SETTLED_AFTER = 3
"""Steps after which memory in use grows no more, unless the task's code keeps something of each."""


@dataclass(frozen=True, slots=True)
class _Steep:
    """An update that was not made, since the gradient has this norm."""

    norm: float


class Transactions:
    """Runs global steps on one replica, one after the other.

    Args:
        replica: model and optimizer.
        group: the ranks.
        plan: followed until memory runs out, then replaced by a leaner one, until the one before is
            tried again; see `plan`, `grow`.
        randomness: how random state follows the steps.
        limit: the memory budget, entered.
        meter: of the memory in use.
        device: of the replica.
        sink: gets the events of recovery.
        clip_norm: see `Task`.
        commit_bytes: most that the update allocates: (in the first step, in later ones).
        blame: finds the samples that make a loss not finite; None: nobody looks.
        skips: is told of bad samples and of steps that are left out; None: they are errors.

    Attributes:
        thread: where steps are computed.
        rehearsal: passes that are undone.
        wish: what this rank wishes; all know with the next step's vote.
        stops: whether it wishes to stop, too: by itself, for a signal handler to write.
        failed_together: whether the error that `run` raised last was met by all ranks at the same
            place, so that they can still do something together.
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
        self.plan: Plan = plan
        limit.follow(plan.choice.freed_memory)
        self._replica = replica
        self._group = group
        self._randomness = randomness
        self._limit = limit
        self._meter = meter
        self._device = device
        self._sink = sink
        self._clip_norm = clip_norm
        self._commit_bytes = commit_bytes
        self._skips = skips
        self._buffers = SavedBuffers(replica.model, replica.loss_as_given, replica.parameter_writes)
        self._joint = JointPasses(
            replica,
            group,
            randomness=randomness,
            limit=limit,
            buffers=self._buffers,
            device=device,
        )
        self._judge = NonfinitePolicy(group, blame, skips is not None)
        self._ladder = Ladder()
        self._settled: tuple[int, int] | None = None  # a step, and bytes in use after it
        self.thread: StepThread = StepThread()
        replica.guard_outside_gradients()
        self._names = Names(group)
        self._timer = ComputeTimer(device)
        self.rehearsal: Rehearsal = Rehearsal(
            replica,
            group,
            randomness=randomness,
            limit=limit,
            meter=meter,
            thread=self.thread,
            buffers=self._buffers,
            timer=self._timer,
            device=device,
        )
        self.wish: Wish = Wish.NOTHING
        self.stops: bool = False
        self.failed_together: bool = False
        self._index = 0
        self._step = 0  # the number of the step that was run last; 0: none was
        self._has_updated = False
        self._has_voted = self._is_applied = False  # in the attempt that is under way
        self._is_loss_checked = False
        self._committed: Committed | None = None  # what came of the step that was run last
        self._is_tidy = device.type != "cuda"  # see `_reserve`

    def run(
        self, index: int, source: Source, before_update: Callable[[], None], whole: ExitStack
    ) -> Committed | PassedOver:
        """Do the global step `index`, however many attempts it takes. Only where bad samples are
        skipped it may be left out.

        Args:
            index: the number of steps before it.
            source: its samples.
            before_update: called right before the update (to set the learning rate).
            whole: to be closed when the step has been counted. That raises the interrupt (Ctrl-C), if
                one came when the step was sure to be committed.

        Raises:
            NoPlanFits: memory ran out under the leanest plan.
            LossError: the loss, its weight or the gradient is not one to learn from.
            DataError: a sample is bad, or more are than may be skipped.
            PeerFailed: another rank raised an error that no plan mends.
            PeerLost: another rank is gone.

        Whatever is raised, parameters, optimizer and buffers are those of the step before.
        """
        self._index, self._step = index, step_number(index)
        self._committed = None
        self.failed_together = False
        self._randomness.begin(index)
        try:
            return self._done(source, before_update, whole)
        except BaseException as error:
            if self._committed is None:
                raise
            # This thread was interrupted while another one had the step done.
            whole.enter_context(held())
            whole.callback(_raise, error)
            return self._committed

    def follow(self, plan: Plan, step: int, reason: str, tells: bool = True) -> None:
        """From `step` on, follow `plan`, and none of those that were left before; all ranks do. An
        event `tells` of it, if its choice is another."""
        self._ladder = Ladder()
        self._change(plan, step, reason, tells=tells and plan.choice != self.plan.choice)

    def grow(self) -> bool:
        """Between two steps: take the plan again that ran out of memory, if it is time to, and there is
        room for what it keeps. All ranks do, or none. Whether the plan has changed."""
        before = self.plan
        found = self._ladder.up(before)
        if found is None:
            return False
        plan, num_steps = found
        self._change(plan, self._step + 1, f"tried again after {num_steps} steps")
        return self.plan is not before

    def settle(self) -> None:
        """Bring the weights to where all ranks have the same ones and no gradient is under way. An
        interrupt waits for it.

        Raises `LossError` if the last gradient is not finite, `PeerLost` if a rank is gone.
        """
        with held():
            self._settle()

    def close(self) -> None:
        """No further step will be run."""
        self.thread.close()

    def _settle(self) -> None:
        weight = self._group.settle(self._replica)
        if not weight:
            return
        norm = float(self._replica.finish(weight, self._clip_norm))
        if not math.isfinite(norm):
            self._replica.drop()
            raise not_applied(norm, f"step {self._step}")
        self._replica.apply()

    def _done(
        self, source: Source, before_update: Callable[[], None], whole: ExitStack
    ) -> Committed | PassedOver:
        while True:
            result = self.thread.run(lambda: self._attempt(source, before_update, whole))
            if not isinstance(result, Again):
                return result
            if any(told.failure for told in result.told):
                self._make_room(result.told, self._step)
            if result.bad and not self._leave_out(result.bad, source):
                return PassedOver("each of its samples is bad")
            self._randomness.redo(self._index)

    def _attempt(
        self, source: Source, before_update: Callable[[], None], whole: ExitStack
    ) -> Committed | PassedOver | Again:
        """One try: the committed step, or nothing changed and what is to be done about it."""
        staged = Staged(self._step, source, Totals(self._device, self._group.num_parts))
        told, wrong = self._stage(staged)
        # The error is gone here, and with its traceback the tensors that the failed pass held.
        if told.failed:
            self.thread.clear()  # so that there is room to tell of it
        try:
            with ExitStack() as sure:  # no rank is interrupted when others go on to commit
                voted = self._vote(staged, told, wrong, sure)
                if isinstance(voted, Again):
                    return voted
                means, agreed = voted
                done: Committed | Again | _Steep | None = None
                if self._judge.accepts(means):
                    done = self._commit(means, before_update, agreed)
                if isinstance(done, Committed):
                    self._ladder.committed()
                    if self._settled is None and self._index >= _SETTLED_AFTER:
                        self._settled = self._step, self._meter.kept_bytes()
                    self._committed = replace(
                        done, agreed_seconds=staged.seconds, outputs=staged.outputs
                    )
                    whole.push(sure.pop_all())
                    return self._committed
            if isinstance(done, Again):
                return done
            staged.empty = self._replica.empty_mean()
            self._put_back()
            if done is None:
                return self._judge.totals(means, staged)
            return self._judge.gradient(done.norm, means.loss, staged)
        except BaseException as error:
            self._put_back()
            failure = as_memory_failure(error)
            alone = self._group.diverges or isinstance(error, PeerLost) or failure is not None
            together = self._has_voted and not self._is_applied
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
        """Run the passes, and make sure that the update will have room. What this rank has to tell of
        that, and its error if no plan mends it."""
        begun = time.perf_counter()
        self._buffers.forget()  # until this attempt has saved them, they are as they should be
        self._is_applied = self._has_voted = False
        self._joint.begin()
        try:
            self._group.expect(staged.source.num_samples)
            self._group.begin()
            self._buffers.save()
            self._accumulate(staged)
            staged.sums = staged.totals.tensor()
            self._replica.phase = "reduction"
            self._group.staged(self._buffers.held)
            self._reserve()
        except PassAbandoned:  # another rank failed, and will say so in the vote
            staged.sums = None
        except Exception as error:
            told = RankReport.of(error, self._replica.phase, self._meter)
            if self._skips is not None and isinstance(error, BadSamples):
                told = replace(told, bad=error.bad)
            return told, None if told.can_be_mended else error
        except BaseException:  # stopped by hand: nobody waits for a vote
            self._put_back()
            raise
        finally:
            staged.seconds = time.perf_counter() - begun
        return RankReport(), None

    def _vote(
        self, staged: Staged, told: RankReport, wrong: Exception | None, sure: ExitStack
    ) -> tuple[Means, Agreed] | Again:
        """What the ranks agree on, if all have staged their parts; else what each has to tell, with
        nothing left of this one's. Raises `wrong`, this rank's error that no plan mends."""
        begun = time.perf_counter()
        if staged.sums is None:
            self._joint.fail()
        try:
            self._group.gather(failed=told.failed)
            sure.enter_context(self.thread.sure())
            wish = self.wish | Wish.STOP if self.stops else self.wish
            sums = None if told.failed else staged.sums
            agreed = self._group.agree(sums, self._timer.last_seconds, wish)
        except Exception as error:
            if not self._is_common(error):
                raise
            agreed, told = None, RankReport.of(error, "reduction", self._meter)
        self._has_voted = True
        staged.seconds += time.perf_counter() - begun
        if agreed is None:
            self._put_back()
            everyone = self._group.exchange(told)
            first_error(wrong, everyone, self._step)
            return Again(everyone, by_rank(told.bad for told in everyone))
        agreed = over_parts(agreed, self._group.num_parts)
        means = Means(agreed.totals, self._names.common(staged.totals.names, agreed))
        if self._judge.accepts(means):
            self._group.accepted(agreed)
        return means, agreed

    def _is_common(self, error: Exception) -> bool:
        """Whether all ranks have met `error`, a lack of memory, at the same place: then they can still
        tell each other, and do the step again."""
        return self._group.size == 1 and as_memory_failure(error) is not None

    def _accumulate(self, staged: Staged) -> None:
        """The passes of this rank, whose gradients are added up."""
        replica, group = self._replica, self._group
        if replica.is_outdated:  # their gradients would be neither divided nor added up over ranks
            raise Outdated(
                f"the optimizer trains other parameters in step {self._step} than at the beginning:"
                " some were added, taken out or unfrozen. Let the task give it all of them, unfrozen,"
                " with a learning rate of 0 for as long as they are to rest; or use Step, which begins"
                " anew."
            )
        replica.take_edits()
        replica.drop()  # what the user's own backward passes left between two steps
        if self._has_updated and not self._is_tidy:
            release_unused(self._device)
            self._is_tidy = True
        replica.phase = "loading"
        choice = self.plan.choice
        outputs: list[tuple[Any, int]] = []
        # The bits of a reproducible run do not depend on how its step is cut.
        alone = group.size == 1 and self.plan.task.grain is None and not replica.is_joint
        with self._timer.running():
            for number, (micro, ask) in enumerate(self._passes(staged)):
                if not self._is_loss_checked and micro.num_samples:
                    self._check_loss(micro, staged.source)
                measured = self._is_measured(micro, staged)
                if micro.grain is not None:
                    self._randomness.begin_grain(self._index, micro.grain)
                with (
                    self._naming(staged, number),
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
                        staged.totals.add_part(norm, loss.weight, micro.part)
                    staged.numbers.append(number)
                elif micro.batch is not None:  # run for the others' sake, before all that count
                    self._buffers.put_back_buffers()
                if micro.ends_part:
                    group.part_staged(micro.part, self._buffers.held)
                    if not micro.last:
                        self._buffers.put_back_buffers()
                del micro, ask, loss  # so that they are gone while the next one is loaded
                self.thread.look()
                replica.phase = "loading"
        if outputs:
            staged.outputs = join(*zip(*outputs, strict=True), place="Loss.outputs")

    def _check_loss(self, micro: MicroBatch, source: Source) -> None:
        """Before the first pass of a step that is cut: whether the loss adds up over its samples.
        A joint loss need not, and where the model is divided the other ranks would wait inside the
        pass."""
        is_cut = not micro.last or self._group.size > 1
        if not is_cut or self._group.lockstep or self._replica.is_joint:
            return
        self._is_loss_checked = True
        others = [self._device] if self._device.type == "cuda" else []
        try:
            with (
                uncounted(),
                self._meter.aside(),
                torch.random.fork_rng(others, enabled=bool(others)),
                Borrowed(),
            ):
                # Of one or two samples little can be seen; a few fit without gradients. A loss that
                # asks for more (the hardest k) is given as many as it will be.
                few = min(LOOKED_AT, max(4, micro.num_samples))
                for most, cut in ((few, few // 3), (2 * micro.num_samples - 1, micro.num_samples)):
                    take, size = source.first_samples(most, micro.batch)
                    if self._replica.check_loss(take, size, min(cut, size - 1)):
                        break
                if source.is_coupled(micro.batch):
                    warn_of_collate(self._replica.loss_as_given)
        finally:
            self._buffers.put_back()

    def _passes(self, staged: Staged) -> Iterator[tuple[MicroBatch, Ask | None]]:
        source, choice = staged.source, self.plan.choice
        if self._replica.is_joint:
            return self._joint.of(self._index, source, choice, partial(self._naming, staged))
        return ((micro, None) for micro in source.micro_batches(choice))

    def _is_measured(self, micro: MicroBatch, staged: Staged) -> bool:
        """Whether to look, after this pass, how large the gradient of so few samples is: after the
        first one on this rank, if its samples are a part of the step, and one like any other, not the
        longest of all, and if its loss is its own. It reads every gradient once, which costs some
        percent of a step that does little else: so later on only some steps are measured."""
        is_due = self._index < ALL_MEASURED or self._index % MEASURED_EVERY == 0
        is_first = bool(micro.num_samples) and not staged.numbers
        is_whole = micro.last and self._group.size == 1
        is_alone = micro.padded is None and not self._replica.is_joint
        return is_due and is_first and not is_whole and is_alone

    @contextmanager
    def _naming(self, staged: Staged, number: int) -> Iterator[None]:
        """Around micro-batch `number`: what is wrong with a sample of it is said of that sample."""
        try:
            yield
        except BadSamples:
            raise
        except DataError as error:
            raise _of_its_sample(error, staged.source, number) from error
        except Exception as error:
            with suppress(Exception):  # what is to be told is the error
                self._judge.raised(error, number, staged)
            raise

    def _commit(
        self, means: Means, before_update: Callable[[], None], agreed: Agreed
    ) -> Committed | Again | _Steep:
        replica = self._replica
        norm = float(replica.finish(means.weight, self._clip_norm))
        scale = replica.loss_scale
        if scale is None and not math.isfinite(norm):
            return _Steep(norm)
        is_first = not self._has_updated and self._group.rank == 0
        # A hook may have updated already, and cleared.
        if norm == 0.0 and is_first and not replica.gradients_are_hooked:
            warn_of_no_gradient(replica.loss_as_given, self._step)
        self._randomness.begin_update(self._index)
        before_update()
        if replica.apply():
            self._has_updated = self._is_applied = True
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

    def _leave_out(self, found: Sequence[tuple[int, Bad]], source: Source) -> int:
        """Do the step without these samples. How many are left."""
        assert self._skips is not None
        self.failed_together = not self._group.diverges
        self._skips.leave_out(self._step, found)
        self.failed_together = False
        return source.leave_out([bad for _, bad in found])

    def _reserve(self) -> None:
        """Fail now, while failing is harmless, if the update would not have room."""
        first, later = self._commit_bytes
        need = later if self._replica.optimizer.state else first
        self._replica.phase = "update"
        if not (self._has_updated or self._is_tidy):
            # What the optimizer makes now stays. It shall not lie among what the passes have left
            # free, or none of that can be given back, or be used for anything larger, any more; nor
            # shall gradients keep what lies around them. So the second step begins with parameters
            # and states alone. After the first steps no more, since the device waits for it.
            release_unused(self._device)
        self._limit.reserve(need)
        on_host = self._device.type == "cpu"
        if is_limited() if on_host else need:
            try_out(need or self._replica.update_bytes(), self._replica.part_bytes(), self._device)

    def _put_back(self) -> None:
        self.thread.clear()
        self._replica.drop()
        if not self._is_applied:  # else they go with the parameters as they are by now
            self._buffers.put_back()
            self._group.undone()

    def _make_room(self, everyone: Sequence[RankReport], step: int) -> None:
        """Go on in `step` under the next leaner plan, on all ranks alike."""
        mine = everyone[self._group.rank].failure
        if mine is not None:
            self.thread.recover(mine)
        before = self.plan
        found = self._ladder.down(before)
        then = "" if found is None else found[0].choice.describe()
        for event in memory_events(everyone, step, before.choice.micro_batch, before, then):
            self._sink(event)
        worst = next(told for told in everyone if told.failure)
        assert worst.failure is not None
        if found is None:
            self.failed_together = not self._group.diverges
            leak = self._settled and Leak(*self._settled, step - 1, self._meter.kept_bytes())
            raise NoPlanFits(nothing_leaner(before, worst.phase, worst.failure, leak))
        leaner, seconds = found
        if leaner is before:
            time.sleep(seconds)
        else:
            self._change(leaner, step, f"memory ran out in {worst.phase}")

    def _change(self, plan: Plan, step: int, reason: str, tells: bool = True) -> None:
        """Follow `plan` from `step` on; or the next leaner one, if on any rank there is no room for the
        optimizer's states where it has them. All ranks call it."""
        before, self.plan = self.plan, plan
        self._replica.switch(plan.choice, plan.kernels)
        self._limit.follow(plan.choice.freed_memory)
        everyone = self._move_states(plan, step)
        if tells:
            self._sink(
                Replanned(
                    time=time.time(),
                    step=step,
                    reason=reason,
                    before=before.choice.describe(),
                    after=plan.choice.describe(),
                    plan=plan.model_dump(mode="json"),
                )
            )
        if any(told.failure for told in everyone):
            self._make_room(everyone, step)

    def _move_states(self, plan: Plan, step: int) -> Sequence[RankReport]:
        """Bring the optimizer's states to where `plan` has them. What all ranks tell of it."""
        told, wrong = RankReport(), None
        try:
            self._replica.updater.keep_states(plan.choice.optimizer_states)
            self._replica.updater.reserve()
        except Exception as error:
            told = RankReport.of(error, "update", self._meter)
            wrong = None if told.can_be_mended else error
        if self._group.diverges:  # the others change their plans when they have to
            everyone = [
                told if rank == self._group.rank else RankReport()
                for rank in range(self._group.size)
            ]
        else:
            everyone = self._group.exchange(told)
        first_error(wrong, everyone, step)
        return everyone


def _raise(error: BaseException) -> None:
    raise error


def _of_its_sample(error: DataError, source: Source, number: int) -> DataError:
    """`error`, which is about a row of micro-batch `number`, said of its sample too."""
    places = source.places(number)
    alone = error.row is not None and error.row < len(places)
    names = [place.name for place in (places[error.row or 0 :][:1] if alone else places)]
    if not names:
        return error
    where = f"{'Row ' + str(error.row) + ' of micro-batch' if alone else 'Micro-batch'} {number}"
    return DataError(f"{error} {where} is {told_samples(names)}.", error.row)


def try_out(num_bytes: int, pieces: Sequence[int], device: torch.device) -> None:
    """Allocate so many bytes and free them, in pieces as large as the tensors of an update, which then
    find their places where the pieces were: one piece would be taken from the driver, beside all that
    the allocator has free. Raises a memory error if they cannot be had."""
    held: list[torch.Tensor] = []
    sizes = itertools.cycle(tuple(filter(None, pieces)) or (num_bytes,))
    while num_bytes > 0:
        size = min(next(sizes), num_bytes)
        held.append(torch.empty(size, dtype=torch.uint8, device=device))
        num_bytes -= size


def to_reserve(plan: Plan) -> tuple[int, int]:
    """What the update of `plan` allocates, where running out of memory is an error that can be met:
    everywhere but on a CPU without a limit."""
    can_fail = plan.enforced or plan.device != "cpu" or is_limited()
    return plan.prediction.commit_bytes if plan.prediction and can_fail else (0, 0)
