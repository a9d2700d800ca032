"""Session: runs a task under a plan, one global step at a time, in a loop of the caller:

    with ab.Session(task, plan) as session:
        for step in session.steps():
            if step.step % 100 == 0:
                print(session.evaluate().metrics)

With several ranks, every rank runs the same code, as under torchrun. Steps and evaluations are
collective operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch
from torch import nn

from anybatch.batch_rule import Ramp
from anybatch.compute import Replica, kernel_choices
from anybatch.compute.building import checked_optimizer, optimizer_for, place
from anybatch.compute.determinism import deterministic
from anybatch.compute.modes import into_training
from anybatch.compute.precision import check_available
from anybatch.compute.synchronised_norm import SingleValue
from anybatch.data import (
    BadSamples,
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
    Evaluation,
    Keyed,
    KeyedByGrain,
    LearningRate,
    Meter,
    OneByOne,
    PassedOver,
    Rehearsed,
    SetAside,
    Skips,
    Together,
    Transactions,
    Watchdog,
    at_work,
    checked_seconds,
    make_limit,
    to_reserve,
    uncounted,
)
from anybatch.errors import InputError, PeerLost, StopTraining
from anybatch.estimate import identify
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
from anybatch.launch import find, join, leave, open_board
from anybatch.machine import Machine
from anybatch.parallel import Wish, group_of
from anybatch.parallel.failures import together
from anybatch.plans import Choice, KernelChoices, Plan
from anybatch.process.control_group import cores_of_group
from anybatch.process.cuda_driver import take_workspaces
from anybatch.process.threads import Stopwatch, num_cores, torch_threads
from anybatch.rank.batches import Batches
from anybatch.rank.checkpoint_manager import CheckpointManager
from anybatch.rank.checks import (
    check_alike,
    check_can_compare,
    check_can_skip,
    single_sample,
    versions,
)
from anybatch.rank.data_wait import DataWait
from anybatch.rank.pace import Pace
from anybatch.rank.passes import Cutting, GlobalStep
from anybatch.rank.record import Position, Record, parts_of
from anybatch.rank.rehearsing import REHEARSED_PASSES, Rehearsing, can_rehearse
from anybatch.state import Checkpoints, TrainingState, frozen_checksums, load_weights
from anybatch.task import Progress, Task
from anybatch.units import check_count

P = ParamSpec("P")
T = TypeVar("T")

RENDEZVOUS_SECONDS = 300.0
"""Timeout for ranks that wait for each other before the first step."""


def _at_work(
    what: str,
) -> Callable[[Callable[Concatenate[Session, P], T]], Callable[Concatenate[Session, P], T]]:
    """Decorator for a method that the watchdog monitors and whose memory counts toward the plan's
    budget; `what` names its first phase."""

    def decorated(
        method: Callable[Concatenate[Session, P], T],
    ) -> Callable[Concatenate[Session, P], T]:
        @wraps(method)
        def watched(self: Session, /, *args: P.args, **kwargs: P.kwargs) -> T:
            self._opened  # noqa: B018 - raises
            with at_work(), self._pulse.at_work(what):
                self._pulse.step = self._position.step
                return method(self, *args, **kwargs)

        return watched

    return decorated


class Session:
    """Runs a task under a plan. A context manager, inside which the memory budget is enforced.

    Args:
        task: task to train.
        plan: plan to follow, made for this task.
        sinks: called with the events, on rank 0. A sink may raise `StopTraining`: training then ends
            after one more step, whose vote communicates the request to all ranks.
        checkpoints: folder for `save` and `resume`, accessible to all ranks; None: nothing is saved.
        keep: number of most recent checkpoints to keep, in addition to the best evaluated one.
        stall_seconds: seconds without progress after which a rank is considered stuck. It is reported
            with its stack, and ended if it was started as one of several ranks. None: 300 s or 20 times
            the longest standstill so far after which it went on, whichever is larger, and half an hour
            for work that is done for the first time.

    Attributes:
        plan: current plan. It is leaner than the given one if memory ran out.

    Raises (on entering) `InputError`: the plan was made for another task or another number of ranks, or
    the model or optimizer cannot be used.
    """

    def __init__(
        self,
        task: Task,
        plan: Plan,
        sinks: Sequence[Sink] = (),
        checkpoints: str | Path | None = None,
        keep: int = 3,
        stall_seconds: float | None = None,
    ) -> None:
        check_count(keep, "keep")
        self._folder = None if checkpoints is None else Path(checkpoints)
        self._keep = keep
        self._task = task
        self._planned = plan
        self._sinks = tuple(sinks)
        self._stall_seconds = checked_seconds(stall_seconds)
        self._model: nn.Module | None = None
        self._last = plan
        self._is_open = False

    def __enter__(self) -> Self:
        self._constructed = dict(vars(self))
        plan = self._planned
        with ExitStack() as stack:
            undo = stack.enter_context(ExitStack())
            undo.callback(self._let_go)
            if plan.parallel != "single":
                stack.enter_context(joined())
            self._group, name = group_of(plan)
            Machine.here(device=name)  # raises if there is no such device
            self._device = torch.device(name)
            self._leader = self._group.rank == 0
            self._watchdog = self._watched(stack)
            self._pulse = self._watchdog.pulse(self._group.rank)
            # Created before the baseline: memory of checkpoints does not count as training's.
            folder = self._folder
            checkpoints = folder and Checkpoints(folder, self._group, keep=self._keep)
            with at_work(), self._pulse.at_work("set-up"):
                self._set_up(checkpoints)
            undo.pop_all()
            self._is_open = True
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._last = self._engine.plan
        self._is_open = False
        if self._archive is not None and isinstance(error, PeerLost):
            self._archive.lost = str(error)
        try:
            with self._stack, at_work(), self._pulse.at_work("closing"), self._undo:
                self._replica.switch_optimizer(training=False)
        finally:
            self._let_go("_last", "_model", "_leader")

    def _let_go(self, *kept: str) -> None:
        """Reset all attributes but `kept` to those at construction. The parts refer to the session as
        their sink: this reference cycle would keep the optimizer's state until the next garbage
        collection."""
        before = self._constructed | {name: vars(self)[name] for name in kept}
        vars(self).clear()
        vars(self).update(before)

    @property
    def model(self) -> nn.Module:
        """The user's module, in its current state of training."""
        if self._model is None:
            self._opened  # noqa: B018 - raises
        assert self._model is not None
        return self._model

    @property
    def plan(self) -> Plan:
        """The current plan; after the session is closed, the last one."""
        return self._engine.plan if self._is_open else self._last

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, which reports to the user and writes files."""
        return self._leader

    @property
    def num_steps(self) -> int:
        """Number of committed global steps, including those before a resumption."""
        return self._opened._position.step

    @property
    def keeps(self) -> bool:
        """Whether the session has a checkpoint folder."""
        return self._folder is not None

    @property
    def total_steps(self) -> int | None:
        """Total number of global steps; None for a stream of unknown length."""
        return self._opened._steps.total_steps

    @property
    def evaluated_now(self) -> bool:
        """Whether the model was evaluated since the last step."""
        last = self.last_evaluation
        return last is not None and last.step == self._position.step

    @property
    def last_evaluation(self) -> Evaluated | None:
        """The event of the last evaluation; None if there was none."""
        return self._opened._last_evaluation

    @property
    def peak_bytes(self) -> int:
        """Peak memory of training so far on this rank's device, relative to the baseline."""
        return self._opened._meter.peak_bytes()

    @property
    def wish(self) -> Wish:
        """What this rank requests all ranks to do: `Wish.SAVE` or `Wish.STOP`. May be set at any time.
        The vote of the next step communicates it to all ranks, where `wished` then contains it. It is
        kept until it is cleared."""
        return self._opened._engine.wish

    @wish.setter
    def wish(self, wish: Wish) -> None:
        self._opened._engine.wish = wish

    @property
    def stops(self) -> bool:
        """Whether this rank requests to stop, which `wished` contains as `Wish.STOP`. For signal
        handlers: a change of `wish` in a handler could be lost if it interrupts a change in the
        loop."""
        return self._opened._engine.stops

    @stops.setter
    def stops(self, stops: bool) -> None:
        self._opened._engine.stops = stops

    @property
    def wished(self) -> Wish:
        """Requests of any rank before the last step; the same on all ranks. The caller's loop has to
        save and stop."""
        return self._opened._wished

    @property
    def failed_together(self) -> bool:
        """Whether all ranks raised the error that ended `steps` at the same point, so that they can
        still save."""
        return self._opened._engine.failed_together

    def steps(self) -> Iterator[StepDone]:
        """Returns an iterator that runs the remaining global steps, one per iteration.

        Raises:
            NoPlanFits: memory ran out under the leanest plan.
            LossError, DataError: the loss or the data cannot be learned from. The model is then in the
                state after the last committed step.
            PeerFailed, PeerLost: another rank raised an error, or is lost.
        """
        self._opened._begin()
        while Wish.END not in self._wished and (event := self._step()) is not None:
            for stalled in self._watchdog.stalled():
                self.emit(stalled)
            yield event

    @_at_work("rehearsing")
    def rehearsed(self, is_fixed: bool = False) -> Plan | None:
        """Returns the plan that passes over the first samples confirm on this device, with its measured
        peak and time. All ranks must call it, before the first step. The passes are undone.

        Args:
            is_fixed: measure the choice of the plan, and try no other one.

        Returns None if there are no samples, or if a fixed choice does not fit. Raises `NoPlanFits` if
        nothing fits the budget, `InputError` if ranks cannot run passes independently (with a divided
        model), and any error that the data, the model or the loss raises.
        """
        if not can_rehearse(self._planned):
            raise InputError(
                "a rehearsal is for ranks that hold the whole model each and meet once per step."
            )
        self._loader.begin(max(self._position.step, self._steps.largest_step), self._cut)
        data = self._next()
        if data is None:
            return None
        source, group = self._source(data), self._group
        plan, run = self._engine.plan, self._engine.rehearsal.run

        def measured(choice: Choice, kernels: KernelChoices | None) -> Rehearsed | None:
            while True:
                try:
                    return run(data.index, source, choice, plan.choice, REHEARSED_PASSES, kernels)
                except BadSamples as error:
                    if self._skips is None or not error.bad:
                        raise
                    source.leave_out(error.bad)  # the step itself will report them

        def rehearse(choice: Choice, kernels: KernelChoices | None) -> Rehearsed | None:
            mine = together(group, lambda: measured(choice, kernels))
            found = [one for one in group.exchange(mine) if one is not None]
            if len(found) < group.size:
                return None
            return Rehearsed(
                max(one.seconds for one in found),
                max(one.peak_bytes for one in found),
                all(one.fits for one in found),
            )

        used = max(group.exchange(self._meter.used_bytes()))
        return Rehearsing(plan, self._replica, rehearse, used, is_fixed).plan()

    @_at_work("saving")
    def save(self, wait: bool = False) -> None:
        """Save a checkpoint of the complete training state. All ranks must call it, after the same
        step. If there is memory for a copy of the state, it is written in the background while training
        continues; `wait` blocks until it is written.

        The outcome is reported by an event, `CheckpointSaved` or `CheckpointFailed`: a full disk does
        not end training. Raises `InputError` if the session has no checkpoint folder.
        """
        archive = self._checked_archive()
        self._engine.settle()
        facts = {"plan": self.plan.model_dump(mode="json"), "versions": versions()}
        last = self._last_evaluation if self.evaluated_now else None
        with self.to_be_evaluated():  # the weights that are evaluated and exported
            archive.save(facts, last.loss if last else None, at_once=wait)
        archive.tell(wait)

    @_at_work("saving")
    def saved(self, wait: bool = False) -> None:
        """Emit the events of the checkpoints that have been completed or have failed since the last
        call; `wait` first waits for those that are still being written."""
        if self._archive is not None:
            self._archive.tell(wait)

    @_at_work("saving")
    def last_save_failed(self) -> bool:
        """Returns whether the last save that was reported by an event failed. All ranks must call
        it."""
        return self._group.exchange(self._checked_archive().has_failed)[0]

    def resume(self) -> bool:
        """Resume from the newest intact checkpoint, if there is one. Restores the parameters, optimizer
        state, loss scale, schedule, position in the samples, and random state; the number of ranks may
        have changed. All ranks must call it, before the first step.

        Returns whether there was a checkpoint. Raises `InputError` if it belongs to another task or
        model, or if there are checkpoints but none is intact.
        """
        event = self.resumed()
        if event is not None:
            self.emit(event)
        return event is not None

    @_at_work("resuming")
    def resumed(self) -> Resumed | None:
        """Like `resume`, but returns the event instead of emitting it, or None. `train` emits it after
        the event that opens the run."""
        return self._checked_archive().resume()

    @_at_work("reading weights")
    def take_checkpoint(self, step: int | None = None) -> Path:
        """Load only the weights of the newest intact checkpoint, or of that of `step`, for evaluation
        or prediction. All ranks must call it. The folder is not modified. Returns the path of the
        checkpoint.

        Raises `InputError` if there is none, or if it belongs to another model or is damaged.
        """
        return self._checked_archive().take_weights(step)

    @_at_work("reading weights")
    def take_weights(self, path: str | Path, step: int = 0, epoch: int = 0) -> None:
        """Load the weights in the file `path`, which `load_weights` reads, for evaluation or
        prediction. All ranks must call it. Memory used for reading the file does not count as memory of
        the run.

        Args:
            path: path of the file.
            step, epoch: step and epoch of the weights, which `evaluate` reports.

        Raises `InputError` if the file does not exist, is damaged, or is for another model.
        """
        with uncounted(), self._meter.aside():
            together(self._group, lambda: load_weights(self.model, Path(path)))
        self._group.restored()
        self._position.step, self._position.epoch = step, epoch

    @_at_work("evaluation")
    def evaluate(self) -> Evaluated:
        """Evaluate on all held-out samples, each once, with the plan's evaluation batch. All ranks must
        call it. Returns the event, which is also emitted.

        Raises `InputError` if the task has no held-out samples.
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
        self._last_evaluation = event
        self.emit(event)
        return event

    def predict(
        self, data: Any, output: Callable[[nn.Module, Any], Any] | None = None
    ) -> Iterator[Any]:
        """Yields the model's outputs for `data` on the host, batch by batch, in order. Each rank
        predicts the `data` that it is given.

        Args:
            data: samples in the form of the task's data sets.
            output: maps `(model, batch)` to tensors in any nesting; default: `model(batch)`.

        Raises `NoPlanFits` if there is no room for a single sample.
        """
        outputs = self._opened._evaluation.outputs(
            self._engine.plan,
            self._position.step,
            partial(self._batches.of, data, alone=True),
            output or _call,
        )
        while True:
            with at_work(), self.to_be_evaluated():
                found = next(outputs, None)
            if found is None:
                return
            result, self._engine.plan = found
            yield result

    @_at_work("prediction")
    def predict_all(self, data: Any, output: Callable[[nn.Module, Any], Any] | None = None) -> Any:
        """Returns the model's outputs for all of `data`, in order, on the host of every rank. Each rank
        predicts a part. All ranks must call it. For example, the loss of each held-out sample:

            session.predict_all(
                task.valid,
                lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
            )

        Args:
            data: samples in the form of the task's data sets.
            output: maps `(model, batch)` to tensors with the samples on dim 0, or lists with one entry
                per sample, in any nesting; default: `model(batch)`.

        Returns what `output` would return for a single batch of all samples.

        Raises:
            NoPlanFits: there is no room for a single sample.
            InputError: the outputs cannot be joined.
            PeerFailed, PeerLost: another rank raised an error, or is lost.
        """
        with self.to_be_evaluated():
            result, self._engine.plan = self._evaluation.gathered(
                self._engine.plan,
                self._position.step,
                partial(self._batches.of, data),
                output or _call,
                interleaved=not is_map_style(data),
            )
        return result

    def started(self) -> RunStarted:
        """Returns the event that opens a run; `train` emits it."""
        return self._opened._record.started(self._planned)

    @_at_work("ending")
    def ended(self, seconds: float, finished: bool, reason: str = "") -> RunEnded:
        """Returns the event that closes a run; `train` emits it. If `finished`, all ranks must call
        it."""
        return self._record.ended(self._planned, self.plan, seconds, finished, reason)

    def to_be_evaluated(self) -> AbstractContextManager[None]:
        """Context manager for code that evaluates or saves `model` itself, between two steps. Inside
        it, an optimizer with modes (a schedule-free one), and with it the weights, is in evaluation
        mode."""
        return self._opened._replica.to_be_evaluated()

    def emit(self, event: Event) -> None:
        """Call all sinks with `event`, on rank 0. If a sink raises `StopTraining`, the remaining sinks
        are still called."""
        if not self._leader:
            return
        for sink in self._sinks:
            try:
                sink(event)
            except StopTraining:
                if self._is_open:
                    self._engine.wish |= Wish.END

    def _watched(self, stack: ExitStack) -> Watchdog:
        """Starts a watchdog for this process, which ends it only if it was started as a rank."""
        awaited, group = find() is not None, self._group
        # The threads of the last resort would count as memory that training uses.
        counts = self._planned.enforced and self._planned.device == "cpu"
        watchdog = Watchdog(
            self._stall_seconds,
            open_board(group.rank, group.size),
            leave if awaited else None,
            last_resort=awaited and not counts,
        )
        return stack.enter_context(watchdog)

    def _checked_archive(self) -> CheckpointManager:
        if self._archive is None:
            raise InputError(
                "the session has no folder for checkpoints: make it with checkpoints=FOLDER."
            )
        return self._archive

    @property
    def _opened(self) -> Self:
        if not self._is_open:
            raise InputError(
                "the session is not open: use it inside `with anybatch.Session(...) as session:`."
            )
        return self

    # ---------------------------------------------------------------------------------------- set-up

    def _set_up(self, checkpoints: Checkpoints | None) -> None:
        """Does all set-up after the ranks have been joined; undone if a part of it fails."""
        task, plan, group, device = self._task, self._planned, self._group, self._device
        self._last_evaluation: Evaluated | None = None
        self._wished = Wish.NOTHING
        check_can_skip(task, plan)
        check_can_compare(task, plan)
        here = Machine.here(device=str(device)).device
        together(group, lambda: check_available(plan.choice.precision, here))
        check_alike(task, plan, group)
        together(group, lambda: kernel_choices.check_available(plan.kernels, device))
        # Memory is measured from here on. Process groups have been created before.
        self._limit = make_limit(plan, device, counted=(task.model,))
        with ExitStack() as undo:  # undoes the completed parts if a later one fails
            undo.callback(self._limit.leave)
            self._meter: Meter = self._limit.enter()
            if plan.task.grain is None:
                self._randomness = Keyed(task.seed, group.rank, device)
            else:
                undo.enter_context(deterministic(device))
                self._randomness = KeyedByGrain(task.seed, device)
            undo.callback(self._randomness.close)
            self._make_parts(checkpoints, undo)
            self._check_single_sample()
            undo.callback(SetAside().end)
            self._undo = undo.pop_all()

    def _make_parts(self, checkpoints: Checkpoints | None, undo: ExitStack) -> None:
        task, plan, group, device = self._task, self._planned, self._group, self._device
        frozen: dict[str, int] = {}
        self._replica = self._build(undo, None if checkpoints is None else frozen)
        self._model = self._replica.model
        self._pulse.follow(self._replica)
        with uncounted():  # memory of a compiler is not training's
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
        self._skips = Skips(self.emit, epoch, held_out) if skips else None
        self._engine = Transactions(
            self._replica,
            group,
            plan,
            randomness=self._randomness,
            limit=self._limit,
            meter=self._meter,
            device=device,
            sink=self.emit,
            clip_norm=task.clip_norm,
            commit_bytes=to_reserve(plan),
            blame=OneByOne(self._replica, group, task.loss),
            skips=self._skips,
        )
        self._reads = isinstance(self._loader, StreamLoader)
        self._alone_on_cpu = device.type == "cpu" and group.size == 1
        self._batches = Batches(
            task, plan.task.longest, group, device, self._pulse, plan.task.grain
        )
        self._evaluation = Evaluation(
            self._replica,
            group,
            device=device,
            thread=self._engine.thread,
            limit=self._limit,
            meter=self._meter,
            sink=self.emit,
            leave_out=self._skips.leave_out_of_evaluation if self._skips else None,
        )
        self._cutting = Cutting(plan, group)
        self._pace = Pace(plan, group, self._cutting, self.emit)
        self._position = Position()
        self._record = Record(
            task.name, self._steps, self._position, group, self._meter, self._skips
        )
        self._starving = DataWait(task.num_workers, self._loader.can_have_workers, self.emit)
        self._archive: CheckpointManager | None = None
        if checkpoints is not None:
            self._archive = CheckpointManager(
                checkpoints,
                TrainingState(task, self._replica, group, self._rates, frozen),
                self._position,
                self._skips,
                group,
                self._meter,
                # On a CPU with an enforced budget, a copy would use memory of the budget.
                stages=device.type != "cpu" or not plan.enforced,
                sink=self.emit,
            )
            undo.callback(self._archive.close)
        into_training(self._model)

    def _build(self, undo: ExitStack, frozen: dict[str, int] | None) -> Replica:
        """Builds the replica of this rank, with the same weights as on all other ranks; `undo` closes
        it. On rank 0, `frozen` is filled with checksums of the parameters that are not trained."""
        task, plan, group, device = self._task, self._planned, self._group, self._device

        def build_model() -> nn.Module:
            take_workspaces(device)
            model = place(task.build_model(), device)
            plan.check_fits(identify(task, model))
            if frozen is not None and group.rank == 0:
                frozen.update(frozen_checksums(task, model))
            return model

        model = group.build(build_model)

        def make() -> Replica:
            replica = Replica(
                model,
                lambda: checked_optimizer(optimizer_for(task, model), model),
                task.loss,
                plan.choice,
                device,
                largest_batch(task),
                kernels=plan.kernels,
            )
            undo.callback(replica.close)  # here, since `make` may fail on another rank
            return replica

        return together(group, make)

    def _check_single_sample(self) -> None:
        """Raises `InputError` if there will be a step with a single sample that BatchNorm cannot
        process: now rather than at the end of an epoch. Checked only if ranks can run passes
        independently."""
        index, plan, group = self._steps.first_of_one, self._planned, self._group
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
                raise InputError(single_sample(index, error.norm)) from None

        together(group, rehearse)

    # ------------------------------------------------------------------------------------- the steps

    def _begin(self) -> None:
        """Make the loader start with the first step that is not done yet."""
        self._loader.begin(self._position.step, self._cut)

    @_at_work("loading")
    def _step(self) -> StepDone | None:
        """Run the next global step, together with all other ranks. Returns None when training is over.

        Raises what `Transactions.run` raises, and `DataError` for samples that cannot be read.
        """
        while True:
            begun = time.perf_counter()
            self._pulse.step = step_number(self._position.step)
            data = self._next()
            if data is None:
                self._pulse.step = self._position.step
                self._engine.settle()
                return None
            done = self._done(data, begun)
            if done is not None:
                return done

    def _next(self) -> StepData | None:
        # A stream is read here, so this can fail on one rank alone.
        work = self._loader.next_step
        with self._failing_together():
            return together(self._group, work) if self._reads else work()

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Context manager for code that fails on all ranks if it fails on one."""
        try:
            yield
        except Exception as error:
            self._engine.failed_together = not isinstance(error, PeerLost)
            raise

    def _done(self, data: StepData, begun: float) -> StepDone | None:
        """Runs the step of `data`. Returns its event, or None if the step was skipped. `begun` is the
        time at which its samples were requested."""
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
        watch = Stopwatch()
        before_update = partial(self._rates.before_update, progress, follows)
        with ExitStack() as whole:
            done = self._engine.run(data.index, source, before_update, whole)
            # One of several ranks also waits for other ranks, and a host for its device.
            idle = watch.idle_seconds() - source.waited_seconds if self._alone_on_cpu else 0.0
            if isinstance(done, PassedOver):
                self._pass_over(data, source.kept.num_samples, done.reason)
                return None
            event, moved = self._counted(data, source, done, begun, reading, idle)
            grown = self._engine.grow()  # on all ranks, or on none if an interrupt comes first
        if grown or moved:
            self._begin()  # workers have prefetched under the old choice or shares
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
        """Records a committed step and emits its event. Returns the event, and whether the shares
        have changed."""
        num_epochs = self._advance(data)
        self._wished = done.wished
        rate = self._rates.current
        self._rates.after_update(num_epochs)
        seconds, waited = time.perf_counter() - begun, reading + source.waited_seconds
        self._record.took(seconds, waited, max(0.0, idle), source.kept.num_samples)
        if self._group.size > 1 and not self._group.diverges:  # else ranks rarely communicate
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
            tokens_seen=self._steps.tokens_before(self._position.step),
        )
        self.emit(event)
        self._starving.observe(self._position.step, seconds, waited)
        if self._skips is not None:
            self._skips.learned()
            with self._failing_together():
                self._skips.done(data.num_samples, data.epoch, data.epoch_end)
        return event, self._pace.observe(self._position.step, source.kept, done.rank_seconds)

    def _source(self, data: StepData) -> GlobalStep:
        return GlobalStep(self._loader, data, self._cutting.passes, self._device, self._pulse)

    def _pass_over(self, data: StepData, num_kept: int, reason: str) -> None:
        """Skip the step: its samples count as taken and the schedule advances, but the model is not
        updated."""
        assert self._skips is not None
        with self._failing_together():
            self._skips.pass_over(step_number(data.index), data.epoch, num_kept, reason)
        self._rates.skip(1, self._advance(data))
        with self._failing_together():
            self._skips.done(data.num_samples, data.epoch, data.epoch_end)
        self._evaluate_if_due(data)

    def _advance(self, data: StepData) -> int:
        """Record that the step of `data` is done. Returns the number of epochs that ended with it."""
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


@contextmanager
def joined() -> Iterator[None]:
    """Context manager that joins the process group, if this process was started as one of several
    ranks. An existing process group is left unchanged. A single process only limits its number of
    threads to the cores of its control group.

    Raises what `launch.find` and `launch.join` raise.
    """
    member = find()
    if member is None or member.world_size == 1:
        # torch counts the cores of the machine, and too many threads wait for each other.
        too_many = cores_of_group() is not None and torch.get_num_threads() > num_cores()
        with torch_threads(num_cores()) if too_many else nullcontext():
            yield
        return
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    with join(member, kind, timeout_seconds=RENDEZVOUS_SECONDS):
        yield


def _call(model: nn.Module, batch: Any) -> Any:
    return model(batch)
