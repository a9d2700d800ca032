"""Rank: one rank of a run. Everything between a group of ranks and the readers of events.

The place where data, engine and parallel meet: it knows which samples of a global step are its own,
runs them, and tells what happened. It does not know in which process the other ranks are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from anybatch.batch_rule import Ramp
from anybatch.compute import kernel_choices
from anybatch.compute.determinism import deterministic
from anybatch.compute.modes import into_training
from anybatch.compute.precision import check_available
from anybatch.compute.synchronised_norm import SingleValue
from anybatch.data import (
    Extent,
    StepData,
    StreamLoader,
    is_map_style,
    largest_batch,
    num_samples_of,
    open_training,
)
from anybatch.engine import (
    Committed,
    CompileTrial,
    Evaluation,
    Keyed,
    KeyedByGrain,
    LearningRate,
    Meter,
    OneByOne,
    PassedOver,
    Pulse,
    Rehearsed,
    SetAside,
    Skips,
    Together,
    Transactions,
    Trial,
    at_work,
    make_limit,
    to_reserve,
    uncounted,
)
from anybatch.errors import InputError, PeerLost
from anybatch.events import (
    Evaluated,
    Event,
    Resumed,
    RunEnded,
    RunStarted,
    Sink,
    StepDone,
    step_number,
)
from anybatch.machine import Machine
from anybatch.parallel import Group, Wish
from anybatch.parallel.failures import together
from anybatch.plans import Choice, KernelChoices, Plan
from anybatch.process.threads import Stopwatch
from anybatch.rank.batches import Batches
from anybatch.rank.building import build
from anybatch.rank.checkpoint_manager import CheckpointManager
from anybatch.rank.checks import (
    check_alike,
    check_can_compare,
    check_can_skip,
    compilable,
    single_sample,
    versions,
)
from anybatch.rank.data_wait import DataWait
from anybatch.rank.pace import Pace
from anybatch.rank.passes import Cutting, GlobalStep
from anybatch.rank.position import Position
from anybatch.rank.record import Record
from anybatch.rank.rehearsing import Rehearsing
from anybatch.rank.step_parts import parts_of
from anybatch.state import Checkpoints, TrainingState, load_weights
from anybatch.task import Progress, Task

P = ParamSpec("P")
T = TypeVar("T")

REHEARSED_PASSES = 3
"""Passes of each try of a rehearsal. The first has no gradients to add to, and later ones find the heap
of a CPU as the passes before them leave it."""


def _at_work(
    what: str,
) -> Callable[[Callable[Concatenate[Rank, P], T]], Callable[Concatenate[Rank, P], T]]:
    """A method that the watchdog watches, under the plan's budget; `what` names its beginning."""

    def decorated(
        method: Callable[Concatenate[Rank, P], T],
    ) -> Callable[Concatenate[Rank, P], T]:
        @wraps(method)
        def watched(self: Rank, /, *args: P.args, **kwargs: P.kwargs) -> T:
            with at_work(), self.pulse.at_work(what):
                self.pulse.step = self._position.step
                return method(self, *args, **kwargs)

        return watched

    return decorated


class Rank:
    """One rank of a run of `task` under `plan`, from its construction to `close`.

    Args:
        task: what to train.
        plan: how; made for this task and for as many ranks as `group` has.
        group: the ranks.
        device: of this rank.
        sink: gets the events; only rank 0 should have a reader.
        pulse: told of what the rank does.
        checkpoints: for `save` and `resume`; closed with the rank. They are made before the rank is,
            since what they need of memory is not training's.
        trial: see `Session`.

    Attributes:
        model: the user's module, trained so far.
        last_evaluation: or None if there was none.
        wished: what any rank wished before the last step, the same on all ranks.

    Raises `InputError` if the plan was made for another task, the ranks differ in what they are to do,
    or the model or optimizer cannot be used; `PeerFailed` if that is so on another rank.
    """

    def __init__(
        self,
        task: Task,
        plan: Plan,
        group: Group,
        device: torch.device,
        sink: Sink,
        pulse: Pulse | None = None,
        checkpoints: Checkpoints | None = None,
        trial: bool = False,
    ) -> None:
        self.pulse: Pulse = pulse or Pulse(group.rank)
        self._task = task
        # A ramp begins with its smallest steps, which tell little of the largest.
        self._tries = trial and not isinstance(task.global_batch, Ramp)
        self._group = group
        self._device = device
        self._sink = sink
        self.last_evaluation: Evaluated | None = None
        self.wished: Wish = Wish.NOTHING
        check_can_skip(task, plan)
        check_can_compare(task, plan)
        here = Machine.here(device=str(device)).device
        together(group, lambda: check_available(plan.choice.precision, here))
        check_alike(task, plan, group)
        self._given = plan = compilable(plan, group, device)
        together(group, lambda: kernel_choices.check_available(plan.kernels, device))
        # From here on memory counts, so that what speaks to the other ranks was made before.
        self._limit = make_limit(plan, device, counted=(task.model,))
        with ExitStack() as undo:  # what was done so far is undone if the rest fails
            undo.callback(self._limit.leave)
            self._meter: Meter = self._limit.enter()
            if plan.task.grain is None:
                self._randomness = Keyed(task.seed, group.rank, device)
            else:
                undo.enter_context(deterministic(device))
                self._randomness = KeyedByGrain(task.seed, device)
            undo.callback(self._randomness.close)
            self._set_up(checkpoints, undo)
            self._check_single_sample()
            undo.callback(SetAside().end)
            self._undo = undo.pop_all()

    @_at_work("closing")
    def close(self) -> None:
        """Leave the model and the process as they were found, but for the training; each part of them,
        whatever is raised while another is left."""
        with self._undo:
            self._replica.switch_optimizer(training=False)

    def to_be_evaluated(self) -> AbstractContextManager[None]:
        """See `Replica`."""
        return self._replica.to_be_evaluated()

    @property
    def plan(self) -> Plan:
        """The plan that is followed now, or was at the end."""
        return self._engine.plan

    @property
    def num_steps(self) -> int:
        """Global steps that are committed, those before a resumption included."""
        return self._position.step

    @property
    def total_steps(self) -> int | None:
        """Global steps in all; None for a stream of unknown length."""
        return self._steps.total_steps

    @property
    def evaluated_now(self) -> bool:
        """Whether the model was evaluated since the last step."""
        return self.last_evaluation is not None and self.last_evaluation.step == self._position.step

    @property
    def peak_bytes(self) -> int:
        """Most memory that training has used so far, on the device, above the baseline."""
        return self._meter.peak_bytes()

    @property
    def wish(self) -> Wish:
        """What this rank wishes all to do after a step. To be set; ranks know with the next step."""
        return self._engine.wish

    @wish.setter
    def wish(self, wish: Wish) -> None:
        self._engine.wish = wish

    @property
    def stops(self) -> bool:
        """Whether this rank wishes to stop, beside what it wishes else."""
        return self._engine.stops

    @stops.setter
    def stops(self, stops: bool) -> None:
        self._engine.stops = stops

    @property
    def failed_together(self) -> bool:
        """Whether the error that `step` raised was met by all ranks at the same place, so that they
        can still save."""
        return self._engine.failed_together

    def begin(self) -> None:
        """The next `step` is the first that is not done yet."""
        self._loader.begin(self._position.step, self._cut)

    @_at_work("loading")
    def step(self) -> StepDone | None:
        """Do the next global step, with all other ranks; None when training is over.

        Raises what `Transactions.run` raises, and `DataError` for samples that cannot be read.
        """
        begun = time.perf_counter()
        while (data := self._coming()) is not None:
            done = self._done(data, begun)
            if done is not None:
                return done
            begun = time.perf_counter()
        self._engine.settle()
        return None

    @_at_work("rehearsing")
    def rehearsed(self, is_fixed: bool = False) -> Plan | None:
        """The plan that passes over the first samples confirm, the same on all ranks; nothing of them
        remains. To be called before the first step, where ranks can run passes by themselves.

        Args:
            is_fixed: the choice is only measured, and not replaced by a leaner one.

        Returns None if there are no samples, or if a fixed choice does not fit. Raises `NoPlanFits` if
        nothing fits, and what the data, the model or the loss raises.
        """
        self._loader.begin(max(self._position.step, self._steps.largest_step), self._cut)
        data = self._next()
        if data is None:
            return None
        source, group = self._source(data), self._group
        plan, run = self._engine.plan, self._engine.rehearsal.run

        def rehearse(choice: Choice, kernels: KernelChoices | None) -> Rehearsed | None:
            mine = together(
                group,
                lambda: run(data.index, source, choice, plan.choice, REHEARSED_PASSES, kernels),
            )
            everyone = self._exchanged(mine)
            found = [one for one in everyone if one is not None]
            if len(found) < len(everyone):
                return None
            return Rehearsed(
                max(one.seconds for one in found),
                max(one.peak_bytes for one in found),
                all(one.fits for one in found),
            )

        used = max(self._exchanged(self._meter.used_bytes()))
        return Rehearsing(plan, self._replica, rehearse, used, is_fixed).plan()

    def _exchanged(self, mine: T) -> Sequence[T]:
        """What each rank gives."""
        with self._engine.crossing.open():
            return self._group.exchange(mine)

    @_at_work("saving")
    def save(self, at_once: bool = False) -> None:
        """Save everything that outlives a step; all ranks call it. Training goes on meanwhile where
        there is memory for a copy, unless it is to be there `at_once`. What comes of it is told by
        `saved`."""
        self._engine.settle()
        if self._archive is not None:
            facts = {"plan": self.plan.model_dump(mode="json"), "versions": versions()}
            last = self.last_evaluation if self.evaluated_now else None
            with self.to_be_evaluated():  # as it is evaluated and exported
                self._archive.save(facts, last.loss if last else None, at_once)

    @_at_work("saving")
    def saved(self, wait: bool = False) -> None:
        """Tell what has become of the checkpoints since it was last told; `wait` for those under
        way."""
        if self._archive is not None:
            self._archive.tell(wait)

    @_at_work("resuming")
    def resume(self) -> Resumed | None:
        """Go on from the newest intact checkpoint, if there is one; all ranks call it, before the first
        step. The event that tells of it; nobody has been told.

        Raises `InputError` if it is of another task or model, or none of those that are there is
        intact.
        """
        return None if self._archive is None else self._archive.resume()

    @_at_work("reading weights")
    def take_checkpoint(self, step: int | None) -> Path:
        """Fill the model with the weights of the newest intact checkpoint, or of the one of `step`; all
        ranks call it, and stand after its step. Nothing else of the training goes on, and nothing in
        its folder is touched. Returns where it lies.

        Raises `InputError` if there is none, it is of another model, or it is damaged.
        """
        assert self._archive is not None
        return self._archive.take_weights(step)

    @_at_work("reading weights")
    def take_weights(self, path: Path, step: int, epoch: int) -> None:
        """Fill the model with the weights in the file `path`, which are of `step` in `epoch`; all ranks
        call it. Reading them is nobody's budget.

        Raises `InputError` as `load_weights` does; `PeerFailed` where another rank could not.
        """
        with uncounted(), self._meter.aside():
            together(self._group, lambda: load_weights(self.model, path))
        self._group.restored()
        self._position.step, self._position.epoch = step, epoch

    @_at_work("evaluation")
    def evaluate(self) -> Evaluated:
        """Evaluate on all held-out samples, each once, under the plan's own batch.

        Raises `InputError` if the task has none.
        """
        if self._task.valid is None:
            raise InputError(
                f"the task {self._task.name!r} has no held-out data to evaluate on: give it valid=..."
            )
        self._engine.settle()
        begun = time.perf_counter()
        with self._failing_together(), self.to_be_evaluated():
            found, self._engine.plan = self._evaluation.means(
                self._engine.plan,
                self._position.step,
                partial(self._batches.of, self._task.valid, skips=self._skips),
                self._task.loss,
                self._task.metrics,
                Together(largest_batch(self._task), not is_map_style(self._task.valid)),
            )
        event = Evaluated(
            time=time.time(),
            step=self._position.step,
            epoch=self._position.epoch,
            samples=found.samples,
            loss=found.loss,
            seconds=time.perf_counter() - begun,
            metrics=found.metrics,
        )
        self.last_evaluation = event
        self._sink(event)
        return event

    def predict(self, data: Any, output: Callable[[nn.Module, Any], Any]) -> Iterator[Any]:
        """See `Session.predict`. This rank by itself: it takes all of `data`."""
        outputs = self._evaluation.outputs(
            self._engine.plan,
            self._position.step,
            partial(self._batches.of, data, alone=True),
            output,
        )
        while True:
            with at_work(), self.to_be_evaluated():
                found = next(outputs, None)
            if found is None:
                return
            result, self._engine.plan = found
            yield result

    @_at_work("prediction")
    def predict_all(self, data: Any, output: Callable[[nn.Module, Any], Any]) -> Any:
        """See `Session.predict_all`."""
        with self.to_be_evaluated():
            result, self._engine.plan = self._evaluation.gathered(
                self._engine.plan,
                self._position.step,
                partial(self._batches.of, data),
                output,
                interleaved=not is_map_style(data),
            )
        return result

    def started(self) -> RunStarted:
        """The event that opens a run."""
        return self._record.started(self._given)

    @_at_work("ending")
    def ended(self, seconds: float, finished: bool, reason: str = "") -> RunEnded:
        """The event that closes a run. Ranks speak to each other only if it is `finished`."""
        return self._record.ended(self._given, self.plan, seconds, finished, reason)

    def emit(self, event: Event) -> None:
        """Give `event` to the readers."""
        self._sink(event)

    def _set_up(self, checkpoints: Checkpoints | None, undo: ExitStack) -> None:
        task, plan, group, device = self._task, self._given, self._group, self._device
        frozen: dict[str, int] = {}
        keeps = checkpoints is not None
        self._replica = build(task, plan, group, device, undo, frozen if keeps else None)
        self.model: nn.Module = self._replica.model
        self.pulse.follow(self._replica)
        with uncounted():  # a compiler is no part of training
            together(group, self._replica.rehearse)
        undo.callback(group.close)
        together(group, lambda: group.adopt(self._replica))
        self._rates = LearningRate(
            self._replica.optimizer,
            task.schedule,
            task.scheduler,
            task.scheduler_interval,
            evaluates=task.valid is not None,
            follows=isinstance(task.global_batch, Ramp)
            and task.global_batch.learning_rate is not None,
        )
        self._steps, self._loader = open_training(
            task,
            pin_memory=device.type == "cuda",
            by_length=plan.task.ghost_batch is None,
        )
        undo.callback(self._loader.close)
        epoch = None if self._steps.num_samples is None else self._steps.epoch_samples
        held_out = None if task.valid is None else num_samples_of(task.valid)
        skips = task.bad_data == "skip"
        self._skips = Skips(self._sink, epoch, held_out) if skips else None
        self._engine = Transactions(
            self._replica,
            group,
            plan,
            randomness=self._randomness,
            limit=self._limit,
            meter=self._meter,
            device=device,
            sink=self._sink,
            clip_norm=task.clip_norm,
            commit_bytes=to_reserve(plan),
            blame=OneByOne(self._replica, group, task.loss),
            skips=self._skips,
        )
        undo.callback(self._engine.close)
        self._reads = isinstance(self._loader, StreamLoader)
        self._alone_on_cpu = device.type == "cpu" and group.size == 1
        self._batches = Batches(task, plan.task.longest, group, device, self.pulse)
        self._evaluation = Evaluation(
            self._replica,
            group,
            device=device,
            thread=self._engine.thread,
            crossing=self._engine.crossing,
            limit=self._limit,
            meter=self._meter,
            sink=self._sink,
            leave_out=self._skips.leave_out_of_evaluation if self._skips else None,
        )
        self._cutting = Cutting(plan, group)
        self._pace = Pace(plan, group, self._cutting, self._sink)
        self._position = Position()
        self._record = Record(
            task.name, self._steps, self._position, group, self._meter, self._skips
        )
        self._starving = DataWait(task.num_workers, self._loader.can_have_workers, self._sink)
        self._archive: CheckpointManager | None = None
        if checkpoints is not None:
            self._archive = CheckpointManager(
                checkpoints,
                TrainingState(task, self._replica, group, self._rates, frozen),
                self._position,
                self._skips,
                group,
                self._meter,
                # A copy on the device that trains would be taken from the budget of training.
                stages=device.type != "cpu" or not plan.enforced,
                sink=self._sink,
            )
            undo.callback(self._archive.close)
        into_training(self.model)

    def _check_single_sample(self) -> None:
        """Raises `InputError` if there will be a step of one sample, and BatchNorm cannot do it: now
        rather than at the end of an epoch. Seen where ranks can run passes by themselves."""
        index, plan, group = self._steps.first_of_one, self._given, self._group
        meets = group.lockstep or group.diverges
        if index is None or plan.task.ghost_batch is None or plan.norms != "ghosts" or meets:
            return
        choice = plan.choice

        def rehearse() -> None:
            self._loader.begin(index, self._cut)
            data = self._next()
            if data is None:
                return
            source, run = self._source(data), self._engine.rehearsal.run
            try:
                run(index, source, choice, choice, most=1)
            except SingleValue as error:
                raise InputError(single_sample(self._steps, index, error.norm)) from None

        together(group, rehearse)

    def _coming(self) -> StepData | None:
        """The step that comes next, which the pulse is of from now on; None when training is over."""
        done = self._position.step
        self.pulse.step = step_number(done)
        data = self._next()
        if data is None:
            self.pulse.step = done
        return data

    def _next(self) -> StepData | None:
        # A stream is read here, so this can fail on one rank alone.
        work = self._loader.next_step
        with self._failing_together():
            return together(self._group, work) if self._reads else work()

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Around what fails on all ranks if it does on one."""
        try:
            yield
        except Exception as error:
            self._engine.failed_together = not isinstance(error, PeerLost)
            raise

    def _done(self, data: StepData, begun: float) -> StepDone | None:
        """The step that was done, or None if it was left out whole. It was `begun` when its samples
        were asked for."""
        reading = time.perf_counter() - begun if self._reads else 0.0
        progress = Progress(
            step=self._position.step,
            samples=self._position.samples_seen,
            epoch=data.epoch,
            total_steps=self._steps.total_steps,
            total_samples=self._steps.total_samples,
            tokens=self._steps.tokens_before(data.index),
            total_tokens=self._steps.total_tokens,
        )
        follows = self._steps.rate_factor(data.index, data.first_sample)
        source = self._source(data)
        tried = self._tried(data.index, source)
        if tried:
            begun, reading, source.waited_seconds = time.perf_counter(), 0.0, 0.0
        watch = Stopwatch()
        before_update = partial(self._rates.before_update, progress, follows)
        with ExitStack() as whole:
            done = self._engine.run(data.index, source, before_update, whole)
            # A rank among several waits for the others too, and a host for its device.
            idle = watch.idle_seconds() - source.waited_seconds if self._alone_on_cpu else 0.0
            if isinstance(done, PassedOver):
                self._pass_over(data, source.kept.num_samples, done.reason)
                return None
            event, moved = self._counted(data, source, done, begun, reading, idle)
            grown = self._engine.grow()  # on all ranks, or on none if the interrupt comes first
        if grown or moved or tried:
            self.begin()  # workers fetch ahead by the old choice or shares
        self._evaluate_if_due(data)
        return event

    def _counted(
        self,
        data: StepData,
        source: GlobalStep,
        done: Committed,
        begun: float,
        reading: float,
        idle: float,
    ) -> tuple[StepDone, bool]:
        """The step that is committed, told and in all books; and whether the shares are others now."""
        num_epochs = self._advance(data)
        self.wished = done.wished
        rate = self._rates.current
        self._rates.after_update(num_epochs)
        seconds, waited = time.perf_counter() - begun, reading + source.waited_seconds
        self._record.took(seconds, waited, max(0.0, idle), source.kept.num_samples)
        if self._group.size > 1 and not self._group.diverges:  # else ranks meet now and then only
            ranks = done.agreed_seconds, done.rank_seconds
            self._record.shared(parts_of(seconds, *ranks, source.waited_seconds, reading))
        event = StepDone(
            time=time.time(),
            step=self._position.step,
            epoch=data.epoch,
            samples=source.kept.num_samples,
            samples_seen=self._position.samples_seen,
            loss=done.loss,
            weight=done.weight,
            learning_rate=rate,
            grad_norm=done.grad_norm,
            loss_scale=self._replica.loss_scale,
            seconds=seconds,
            memory_bytes=self._record.memory_bytes(),
            micro_batch=self._engine.plan.choice.micro_batch,
            metrics=done.metrics,
            rank_seconds=done.rank_seconds if self._group.size > 1 else (),
            data_seconds=waited,
            agreed_seconds=done.agreed_seconds if self._group.size > 1 else 0.0,
            part_weight=done.part_weight,
            part_grad_norm=done.part_grad_norm,
        )
        self._sink(event)
        self._starving.observe(self._position.step, seconds, waited)
        if self._skips is not None:
            self._skips.learned()
            with self._failing_together():
                self._skips.done(data.num_samples, data.epoch, data.epoch_end)
        return event, self._pace.observe(self._position.step, source.kept, done.rank_seconds)

    def _source(self, data: StepData) -> GlobalStep:
        return GlobalStep(self._loader, data, self._cutting.passes, self._device, self.pulse)

    def _tried(self, index: int, source: GlobalStep) -> bool:
        """Before the first step, follow the fastest of the plan and its rivals from now on, if a trial
        pays; then decide whether to compile, where the plan leaves that open. Whether anything was
        run for it."""
        due, self._tries = self._tries, False
        is_open = self._given.kernels.compile_if_faster == "open"
        if not due and not is_open:
            return False
        total = self._steps.total_steps
        left = None if total is None else total - self._position.step
        tried = False
        if due:
            trial = Trial(self._given, self._engine, self._group, left, self._sink)
            if trial.pays:
                self._given, tried = trial.run(index, source), True
        if is_open:
            tried |= self._decide_on_compiling(index, source, left)
        return tried

    def _decide_on_compiling(self, index: int, source: GlobalStep, left: int | None) -> bool:
        """With `left` steps to go. Whether anything was run for it."""
        replica = self._replica
        on_device = self._engine.plan.choice.optimizer_states == "device"
        states = 0 if replica.optimizer.state or not on_device else replica.state_bytes()
        trial = CompileTrial(self._engine, self._group, self._device, left, states, self._sink)
        before = self._archive.plan_before if self._archive else {}
        kernels = before.get("kernels", {})
        # On another device it is another question.
        same = before.get("device_name") == self._given.device_name
        if same and kernels.get("compile_if_faster") == "decided":
            self._given = trial.keep(index, bool(kernels.get("compile")))
        else:
            self._given = trial.run(index, source)
        return trial.was_made

    def _pass_over(self, data: StepData, num_kept: int, reason: str) -> None:
        """The step is left out whole: its samples are taken, the schedule goes on, that is all."""
        assert self._skips is not None
        with self._failing_together():
            self._skips.pass_over(step_number(data.index), data.epoch, num_kept, reason)
        self._rates.skip(1, self._advance(data))
        with self._failing_together():
            self._skips.done(data.num_samples, data.epoch, data.epoch_end)
        self._evaluate_if_due(data)

    def _advance(self, data: StepData) -> int:
        """The step of `data` is done. How many epochs have ended with it."""
        before = self._position.epoch
        self._loader.commit()
        self._position.advance(data)
        return self._position.epoch - before

    def _evaluate_if_due(self, data: StepData) -> None:
        if self._task.valid is None:
            return
        every = self._task.evaluate_every
        if data.epoch_end if every is None else self._position.step % every == 0:
            self._rates.after_evaluation(self.evaluate().loss)

    def _cut(self, extent: Extent) -> Sequence[range]:
        return self._cutting.passes(self._engine.plan.choice, extent).fetched
