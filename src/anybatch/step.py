"""Step: an exact global step of any size around an existing training loop.

    step = ab.Step(model, optimizer, loss, memory="10GiB")
    for batch in loader:
        outcome = step(batch)

The model, the optimizer, the data and the loop stay the user's. What `step` takes over is the cut of
the batch into micro-batches, the weighing, precision, recompute, and doing the step again when memory
runs out.

In a script that several processes run (torchrun, `torch.distributed.init_process_group`) every rank
calls `step` with its own part of the global batch. The parts may be of any and unequal size:

    rank 0    step(5 samples)   step(3 samples)   step(2 samples)
    rank 1    step(4 samples)   step(8 samples)   step(None)           no samples left here

Each column is one step of the same model: the gradient is the sum over all ranks divided by the total
weight. So every rank calls equally often; one that has no samples says so with None, since the others
would wait for it: a step that takes five minutes says so on standard error, and at the process group's
time-out it raises `PeerLost`.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self
from weakref import WeakMethod, finalize

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from anybatch.compute import (
    DEFAULT_GHOST_BATCH,
    Replica,
    find_chains,
    find_mlps,
    find_recomputable,
    kernel_choices,
)
from anybatch.compute.building import check_needs_no_closure
from anybatch.compute.ghost_norm import (
    batch_norms,
    counting_buffers,
    looks_across_samples,
    written_since,
)
from anybatch.compute.loss_reduction_check import tell_again, warn_of_statistics
from anybatch.compute.multi_optimizer import as_one
from anybatch.compute.precision import check_available
from anybatch.data import (
    BatchCopies,
    batch_size,
    ghosts,
    micro_batches,
    num_samples_of,
    to_device,
)
from anybatch.data import slice_batch as slice_samples
from anybatch.data.evaluation import MOST_WITHOUT_LENGTH, check_ends
from anybatch.data.generators import Borrowed
from anybatch.engine import (
    Ambient,
    Committed,
    Evaluation,
    Measured,
    MicroBatch,
    Rehearsed,
    Together,
    Transactions,
    at_work,
    held_bytes,
    make_limit,
    to_reserve,
    uncounted,
)
from anybatch.engine.source import Source
from anybatch.errors import DataError, InputError, NoPlanFits
from anybatch.estimate import Outline, Subject, dtypes_of
from anybatch.events import Event, Replanned, Sink, step_number
from anybatch.launch import find
from anybatch.machine import Machine
from anybatch.oom import is_limited
from anybatch.parallel import Group, Replicate, SingleDevice, Wish
from anybatch.parallel.failures import Outdated, PeerOutdated, together
from anybatch.planner import Wishes, as_measured, make_plan, untraced_plan
from anybatch.plans import (
    Choice,
    KernelChoices,
    Plan,
    Recompute,
    TaskIdentity,
    parse_chunked_loss,
    parse_compile,
    parse_precision,
)
from anybatch.process.cuda_driver import take_workspaces
from anybatch.process.threads import Reminder
from anybatch.rank import REHEARSED_PASSES
from anybatch.rank.rehearsing import Rehearsing
from anybatch.side_effects import code_of
from anybatch.task import (
    JointLoss,
    LossFunction,
    MetricsOfTask,
    check_shapes,
    loss_fault,
    parameters_in,
)
from anybatch.units import format_bytes, format_seconds

_LEAST_QUARTERED = 8
"""Samples of a batch of which a quarter is tried before the whole."""

_FAR = 2
"""What is estimated to need so many times the room is not tried in one piece."""


_WAIT_SECONDS = 300.0
"""Of a step with several ranks, after which it says that it may be waiting for another."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one call of a `Step` did.

    Attributes:
        step: the number of the step, from 1; calls that raised an error are not counted.
        loss: mean over the total weight of the batch.
        weight: that total weight.
        metrics: means of the metrics that the loss carried.
        grad_norm: 2-norm of the gradient before clipping.
        num_micro_batches: forward passes that it took, on this rank.
        seconds: time that it took, on this rank.
        peak_bytes: most memory that steps have used so far, on this rank, above what was in use before
            the first call (the model and the optimizer count).
        part_weight, part_grad_norm: see `events.StepDone`.
        outputs: what the loss handed out for each sample (`Loss.outputs`), in the order of the batch,
            on the CPU.

    With several ranks, all but `num_micro_batches`, `seconds`, `peak_bytes` and `outputs` are over all
    ranks, and the same on each.
    """

    step: int
    loss: float
    weight: float
    metrics: Mapping[str, float]
    grad_norm: float
    num_micro_batches: int
    seconds: float
    peak_bytes: int = 0
    part_weight: float | None = None
    part_grad_norm: float | None = None
    outputs: Any = None


class Step:
    """One global step per call: cut, run, weighed, committed; or nothing changed and an error.

    With several ranks, the first call gives all of them the parameters and buffers of rank 0; what the
    optimizer holds by then (of a run that is resumed) must be the same on all of them already.

    The first call tries the whole batch in one piece: passes are measured and undone. If it fits it is
    not cut, and everything is as the plain loop has it. If not, the plan is made by a trace and
    rehearsed. With `micro_batch` nothing is tried or traced before the first step.

    The plan is made by the first batch, and anew when a batch is larger than any that was planned for:
    before its step, or with several ranks, which learn of it by that step, before the next one. The
    same where the optimizer has other parameters than before (of layers that are unfrozen on the way,
    say), or other BatchNorm layers are in training mode, with several ranks on all of them in the same
    call: where it is so on some of them, all raise `InputError`.

    Modes are the script's: what of the model is in evaluation mode is trained in it. So BatchNorm that
    was put into it (in a frozen backbone) keeps to its running statistics, and is cut into no ghost
    batches.

    Args:
        model: on the device where it is to be trained; with several ranks as it is, not wrapped.
        optimizer: on parameters of `model`, all or some, and perhaps of the loss beside them; or a list
            of optimizers with parameters of their own (Muon for the matrices, AdamW for the rest).
        loss: `(model, batch) -> Loss`, or a plain mean; see `Task`.
        memory: budget of each rank, as `train` takes it; held in every call, and on CUDA between calls
            too, until `close`. None: plan for what is free. Of several steps at once the strictest
            budget holds, for what all of them take.
        precision: see `plans.Precision`.
        micro_batch: largest number of samples per forward pass; None: found.
        recompute: what to recompute; None: found.
        chunked_loss: see `plan`; None: found.
        clip_norm: largest 2-norm of the mean gradient, of what the optimizer trains.
        ghost_batch: samples over which BatchNorm normalises; None: the samples of the call, as in a
            plain loop, as long as they fit in one piece. When they have to be cut, the largest ghost
            batch that fits is chosen, once, and a warning says so; with several ranks it is 32. Each
            rank cuts its own part.
        compile: compile the blocks of the model; then a budget on a CPU is not enforced.
        sinks: readers of the events of recovery; those of rank 0 are called. Without one a change of
            plan is a warning.
        verbose: whether rank 0 prints the plan to standard error in the first call.
        keep_grad: whether `param.grad` is there between two calls: the mean gradient of the last step,
            as the update had it (clipped). Else it is None. Of weights in half precision the gradients
            are those of their float32 copies, which `param.grad` does not show.
        count_samples, slice_batch: for batches that do not show their samples in dim 0 (graphs, time
            first, objects): the number of samples in a batch, and `(batch, start, stop)` to a batch of
            those from `start` to `stop`. Both or neither.

    Attributes:
        plan: how this rank runs its batches; None before the first call.

    Raises `InputError` if the model, the optimizer or an option cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        loss: LossFunction,
        memory: str | int | None = None,
        *,
        precision: str = "fp32",
        micro_batch: int | None = None,
        recompute: Recompute | None = None,
        chunked_loss: bool | None = None,
        clip_norm: float | None = None,
        ghost_batch: int | None = None,
        compile: bool = False,
        sinks: Sequence[Sink] = (),
        verbose: bool = True,
        keep_grad: bool = False,
        count_samples: Callable[[Any], int] | None = None,
        slice_batch: Callable[[Any, int, int], Any] | None = None,
    ) -> None:
        optimizer = as_one(optimizer)
        if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
            raise InputError(
                f"Step takes a model and an optimizer, not {type(model).__name__} and"
                f" {type(optimizer).__name__}: give a torch.nn.Module and a torch.optim.Optimizer, or a"
                " list of such."
            )
        if fault := loss_fault(loss):
            raise InputError(f"Step cannot train by this loss: {fault}.")
        _check_unwrapped(model)
        check_shapes(model, "it is given to Step")
        parse_compile(compile)
        tell_again()
        self.plan: Plan | None = None
        self._model = model
        self._optimizer = optimizer
        self._loss = loss
        self._is_joint = isinstance(loss, JointLoss)
        self._limited = memory is not None
        wanted = parse_precision(precision)
        if micro_batch is not None and (
            isinstance(micro_batch, bool) or not isinstance(micro_batch, int) or micro_batch < 1
        ):
            raise InputError(
                f"micro_batch is {micro_batch!r}: give a whole number of at least 1, or leave it out."
            )
        self._wishes = Wishes(
            wanted,
            micro_batch,
            recompute,
            parse_chunked_loss(chunked_loss),
            compile=compile,
            shapes_vary=True,
        )
        if (count_samples is None) != (slice_batch is None):
            raise InputError(
                "count_samples and slice_batch go together: give both, or neither for batches with the"
                " samples in dim 0."
            )
        self._keep_grad = keep_grad
        self._cutting = _Cutting(count_samples or batch_size, slice_batch or slice_samples)
        self._clip_norm = clip_norm
        self._ghost_batch = ghost_batch
        self._verbose = verbose
        self._sinks = tuple(sinks)
        homes = {p.device for p in model.parameters()}
        if len(homes) != 1:
            raise InputError(
                f"the model has parameters on {len(homes)} devices: Step takes a model on one device."
            )
        check_needs_no_closure(optimizer)
        _check_of(model, optimizer)
        self._device = homes.pop()
        kernel_choices.check_available(KernelChoices(compile=compile), self._device)
        self._where = Machine.here(memory, str(self._device)).device
        if memory is None:  # what is free, and a plan counts what is there
            budget = self._where.budget_bytes + held_bytes((model, optimizer))
            self._where = replace(self._where, budget_bytes=min(budget, self._where.total_bytes))
        check_available(wanted, self._where)
        self._engine: Transactions | None = None
        self._group: Group = SingleDevice()
        self._num_steps = 0
        self._written: dict[str, None] = {}  # buffers that traced passes wrote to
        self._own: Plan | None = None  # made by this rank's samples
        self._planned_for = 0  # samples of this rank
        self._largest = 0  # batch of this rank so far
        self._is_outgrown = False  # the plan of some rank
        self._reminder: Reminder | None = None
        self._copies = BatchCopies()

    @at_work()
    def __call__(self, batch: Any) -> Outcome:
        """Do one step on `batch`, whatever its size.

        Args:
            batch: any nesting of tensors with the samples in dim 0, or lists of samples; of several
                ranks, this one's part, None if it has none.

        Raises:
            NoPlanFits: memory ran out under the leanest plan.
            LossError, DataError: the loss or the batch cannot be learned from.
            InputError: the ranks do not train the same, or are not those of the first call.
            PeerFailed: another rank raised an error.
            PeerLost: another rank is gone, or did not call.

        Whatever is raised, parameters, optimizer and buffers are as before the call. Only an interrupt
        (Ctrl-C) that comes during the update is raised when the step is done.
        """
        begun = time.perf_counter()
        with self._telling_of_a_wait():
            self._check_joined()
            if self._engine is None:
                self._begin(batch)
            done, num_passes, anew = None, 0, self._begin_anew
            try:
                done, num_passes = self._done(batch)
            except (Outdated, PeerOutdated):
                pass
            except NoPlanFits:
                if not self._is_whole or self._group.size > 1:
                    raise
                anew = self._cut_from_now_on
            if done is None:  # the tensors of the attempt are gone by now
                anew(batch)
                done, num_passes = self._done(batch)
        return Outcome(
            step=self._num_steps,
            loss=done.loss,
            weight=done.weight,
            metrics=done.metrics,
            grad_norm=done.grad_norm,
            num_micro_batches=num_passes,
            seconds=time.perf_counter() - begun,
            peak_bytes=self._meter.peak_bytes(),
            part_weight=done.part_weight,
            part_grad_norm=done.part_grad_norm,
            outputs=done.outputs,
        )

    @at_work()
    def evaluate(self, batches: Iterable[Any], metrics: MetricsOfTask | None = None) -> Measured:
        """The loss and metrics over `batches`, in evaluation mode and without gradients, under the
        budget: batches are cut to what fits. After the first step; all ranks call it.

        A script that evaluates by itself between two steps may go on to: that is under no budget on a
        CPU.

        Args:
            batches: as steps take them, of this rank; iterated anew where memory runs out, so a
                `DataLoader` or a list, and no iterator.
            metrics: see `Task`.

        Raises:
            InputError: there was no step yet, or `batches` can be iterated once only.
            NoPlanFits: there is no room to evaluate a single sample.
            PeerFailed: another rank raised an error.
        """
        engine = self._engine
        if engine is None:
            raise InputError(
                "there is no plan to evaluate under yet: it is made in the first call of Step."
            )
        if iter(batches) is batches:
            raise InputError(
                f"evaluate was given a {type(batches).__name__}, which can be iterated once, and"
                " evaluation begins again where memory runs out: give a DataLoader or a list."
            )
        with self._replica.to_be_evaluated():
            found, engine.plan = self._evaluation.means(
                engine.plan,
                self._num_steps,
                partial(_cut_batches, batches, self._device, self._cutting),
                self._loss,
                metrics,
                Together(self._largest),
            )
        return found

    def close(self) -> None:
        """Leave the model and the process as they were found, but for the training; each part of them,
        whatever is raised while another is left."""
        if self._reminder is not None:
            self._reminder.close()
        if self._engine is not None:
            self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _done(self, batch: Any) -> tuple[Committed, int]:
        """The step on `batch`, and the passes that it took on this rank. Raises, beside what a call
        does, `Outdated` or `PeerOutdated`, on all ranks."""
        engine = self._engine
        assert engine is not None
        # Looks at the batch inside the step, where a rank that cannot use it does not leave the others.
        source = self._pieces(batch)
        self._largest = max(self._largest, source.size)
        if self._is_outgrown or (self._group.size == 1 and self._largest > self._planned_for):
            self._plan_anew(engine, batch if source.size else None)
        else:
            engine.grow()
        engine.wish = Wish.PLAN if self._largest > self._planned_for else Wish.NOTHING
        before = counting_buffers(self._model) if self._num_steps == 0 else None
        with ExitStack() as whole, source.untouched_by_errors():
            done = engine.run(self._num_steps, source, _nothing, whole)
            assert isinstance(done, Committed)  # steps are left out only where it was asked for
            self._num_steps += 1
            self._is_outgrown = Wish.PLAN in done.wished
            self.plan = engine.plan
        if before is not None and (len(source.ranges) > 1 or self._group.size > 1):
            self._written |= dict.fromkeys(written_since(self._model, before))
            warn_of_statistics(self._model, self._loss, [*self._written])
        return done, len(source.ranges)

    def _telling_of_a_wait(self) -> AbstractContextManager[None]:
        """Around a step: with several ranks, one that takes very long is told to people, once. Nothing
        is ended: what the others do between two steps is the script's own."""
        if self._group.size == 1:
            return nullcontext()
        if self._reminder is None:
            tell = WeakMethod(self._tell_of_a_wait)
            self._reminder = Reminder(_WAIT_SECONDS, lambda: (tell() or _nothing)())
            finalize(self, self._reminder.close)
        return self._reminder.around()

    def _tell_of_a_wait(self) -> None:
        sys.stderr.write(
            f"anybatch: rank {self._group.rank} of {self._group.size} has been in step"
            f" {step_number(self._num_steps)} for {_WAIT_SECONDS:.0f} s. Perhaps it waits for a"
            " rank that hangs, is busy with something else, or has ended its loop: every rank calls"
            " Step equally often, with None where it has no samples left.\n"
        )
        sys.stderr.flush()

    def _check_joined(self) -> None:
        """Raises `InputError` if there are other ranks than when the step was set up."""
        size = _num_joined()
        if self._engine is not None and size != self._group.size:
            raise InputError(
                f"the number of ranks is {size}, and was {self._group.size} when this Step began: make"
                " torch's process group before the first call of Step, and destroy it after close()."
            )

    def _check_up_to_date(self) -> None:
        """Raises `Outdated` if what this rank trains is not what was set up for. The optimizer's
        parameters are looked at by the engine."""
        if self._normalising() != self._cut:
            raise Outdated("other BatchNorm layers are in training mode than before.")

    def _begin(self, batch: Any) -> None:
        """Plan by the first batch, and set up."""
        group = self._group = self._joined()
        with ExitStack() as undo:  # what was done so far is undone if the rest fails
            undo.callback(setattr, self, "_engine", None)
            self._norms = tuple(batch_norms(self._model).values())
            self._cut = self._normalising()
            self._ghost = self._ghost_batch or self._wishes.micro_batch if any(self._cut) else None
            self._check_alike(group)
            self._outline = Outline(self._model, self._optimizer)
            with uncounted():  # planning is no part of what another Step trains
                first = together(group, lambda: self._first_plan(batch))
            self._plans = group.exchange(first)
            plan, total = _agreed_plan(group, self._plans)
            group.prepare(self._model)
            group.prepare(nn.ParameterList(_beside(self._model, self._optimizer)))
            engine = self._set_up(plan, total, undo)
            if self._wishes.micro_batch is None:
                self._confirm(engine, batch)
            self._undo = undo.pop_all()
        wished = self._wishes.micro_batch
        if any(self._cut) and self._ghost_batch is None and wished and wished < self._planned_for:
            warnings.warn(
                f"micro_batch is {wished}, so BatchNorm normalises over {wished} samples, not over all"
                f" {self._planned_for} as in one piece: give ghost_batch={wished} if that is meant, or"
                " leave out micro_batch.",
                stacklevel=5,
            )
        if self._verbose and group.rank == 0:
            print(_described(engine.plan), file=sys.stderr)  # noqa: T201

    def _set_up(self, plan: Plan, total: int, undo: ExitStack) -> Transactions:
        """Follow `plan`, for `total` samples of all ranks."""
        group = self._group
        # From here on memory counts, so that what speaks to the other ranks was made before.
        self._limit = make_limit(plan, self._device, counted=(self._model, self._optimizer))
        undo.callback(self._limit.leave)
        self._meter = self._limit.enter()
        take_workspaces(self._device)

        def make() -> Replica:
            replica = Replica(
                self._model,
                lambda: self._optimizer,
                self._loss,
                plan.choice,
                self._device,
                total,  # by which gradients are scaled: the same on all ranks
                kernels=plan.kernels,
            )
            undo.callback(replica.close)  # here, since on another rank this may fail
            return replica

        self._replica = together(group, make)
        self._replica.keeps_gradients = self._keep_grad
        with uncounted():  # a compiler is no part of training
            together(group, self._replica.rehearse)
        undo.callback(group.close)
        together(group, lambda: group.adopt(self._replica))
        engine = self._engine = Transactions(
            self._replica,
            group,
            plan,
            randomness=Ambient(self._device),
            limit=self._limit,
            meter=self._meter,
            device=self._device,
            sink=self._emit,
            clip_norm=self._clip_norm,
            commit_bytes=to_reserve(plan),
        )
        undo.callback(engine.close)
        self._evaluation = Evaluation(
            self._replica,
            group,
            device=self._device,
            thread=engine.thread,
            limit=self._limit,
            meter=self._meter,
            sink=self._emit,
        )
        return engine

    def _confirm(self, engine: Transactions, batch: Any, fits: bool = True) -> None:
        """Between two steps: follow the plan for one piece if passes show that it fits on every rank,
        and otherwise one that cuts. All ranks call it. `fits`: whether it may fit on this one."""
        group, tells = self._group, self._num_steps > 0
        size = self._planned_for
        what = "a batch that is larger than those before" if tells else "the batch"
        fits = together(group, lambda: fits and self._fits_whole(engine, batch, size))
        if all(group.exchange(fits)):
            self._plans = group.exchange(self._own)
            plan, _ = _agreed_plan(group, self._plans)
            engine.follow(plan, step_number(self._num_steps), f"{what} fits in one piece", tells)
            return
        if self._is_whole:
            self._ghost = self._largest_ghost(engine, batch, size)
            warnings.warn(
                f"a batch of {size} samples does not fit the memory in one piece, so it is cut, and"
                f" BatchNorm normalises over ghost batches of {self._ghost} samples from now on. Give"
                " ghost_batch to choose their size, or more memory.",
                stacklevel=6,
            )

        def planned() -> Plan | None:
            if self._own is None:
                return None
            with uncounted(), self._meter.aside():  # planning is not part of training
                return self._planned(batch, size)

        self._own = together(group, planned)
        self._plans = group.exchange(self._own)
        plan, _ = _agreed_plan(group, self._plans)
        reason = f"{what} does not fit in one piece"
        engine.follow(plan, step_number(self._num_steps), reason, tells)
        if group.size == 1:
            found = self._rehearsed(engine, batch)
            self._own, self._plans = found, (found,)
            engine.follow(found, step_number(self._num_steps), "it was rehearsed", tells)

    def _cut_from_now_on(self, batch: Any) -> None:
        """Memory ran out in a batch that BatchNorm normalises as a whole."""
        assert self._engine is not None
        self._planned_for = max(self._largest, 2)
        self._own = self._untraced(batch, self._planned_for)
        self._confirm(self._engine, batch, fits=False)
        self._replica.expect(self._planned_for)

    def _fits_whole(self, engine: Transactions, batch: Any, size: int) -> bool:
        """Whether a batch of `size` samples fits in one piece; then that is this rank's plan. A quarter
        of it is tried first: what would need far too much is not tried at all, and what needs little
        on a CPU only if a budget is enforced."""
        plan = self._own
        if plan is None:  # this rank has no samples
            return True
        room = (plan.budget_bytes or 0) - plan.reserve_bytes
        used = self._meter.used_bytes()
        fixed = used + sum(p.nbytes for p in self._replica.parameters if p.requires_grad)
        is_run = True

        def rehearse(choice: Choice, kernels: KernelChoices | None) -> Rehearsed | None:
            nonlocal is_run
            if size >= _LEAST_QUARTERED and kernels is None:
                part = self._run(engine, batch, choice, size // 4, most=1)
                if part is None:
                    return None
                about = fixed + max(0, part.peak_bytes - fixed) * size // (size // 4)
                needs_little = self._device.type == "cpu" and not plan.enforced
                if about > _FAR * room or (needs_little and about < room // 2):
                    is_run = False
                    return replace(part, peak_bytes=about)
            return self._run(engine, batch, choice, size, most=2, kernels=kernels)

        found = Rehearsing(plan, self._replica, rehearse, used, is_fixed=True).plan()
        if found is not None and found.prediction is not None:
            told = found.prediction.model_copy(update={"rehearsed": is_run})
            self._own = found.model_copy(update={"prediction": told})
        return found is not None

    def _largest_ghost(self, engine: Transactions, batch: Any, size: int) -> int:
        """The largest ghost batch of BatchNorm that fits, of the batch halved again and again."""
        plan = self._own
        if self._group.size > 1 or plan is None:
            return DEFAULT_GHOST_BATCH
        room = (plan.budget_bytes or 0) - plan.reserve_bytes
        states = 0 if self._optimizer.state else self._replica.state_bytes()
        ghost = size // 2
        while ghost > 2:
            found = self._run(engine, batch, plan.choice, ghost, most=3)
            if found is not None and found.fits and found.peak_bytes + states <= room:
                return ghost
            ghost //= 2
        return min(DEFAULT_GHOST_BATCH, size)

    def _rehearsed(self, engine: Transactions, batch: Any) -> Plan:
        """The plan of `engine` as passes over `batch` confirm it. Raises `NoPlanFits`."""
        plan, used = engine.plan, self._meter.used_bytes()

        def rehearse(choice: Choice, kernels: KernelChoices | None) -> Rehearsed | None:
            size = choice.micro_batch
            return self._run(engine, batch, choice, size, REHEARSED_PASSES, kernels)

        found = Rehearsing(plan, self._replica, rehearse, used).plan()
        return plan if found is None else as_measured(found, plan)

    def _run(
        self,
        engine: Transactions,
        batch: Any,
        choice: Choice,
        size: int,
        most: int,
        kernels: KernelChoices | None = None,
    ) -> Rehearsed | None:
        """What passes of `size` samples of `batch` take, at most so many; nothing of them remains."""
        source = self._pieces(batch, size if self._is_whole and size < self._planned_for else None)
        changes = {"micro_batch": size, "evaluation_batch": min(size, choice.evaluation_batch)}
        tried = choice.model_copy(update=changes)
        try:
            with Borrowed(), self._meter.aside():
                return engine.rehearsal.run(
                    self._num_steps, source, tried, engine.plan.choice, most, kernels
                )
        finally:
            self._copies.put_back()

    @property
    def _is_whole(self) -> bool:
        """Whether BatchNorm normalises over all samples of a call, which then are one piece."""
        return any(self._cut) and self._ghost is None

    def _pieces(self, batch: Any, ghost: int | None = None) -> _Pieces:
        """This rank's `batch`, cut into pieces; with ghost batches of `ghost` samples, or as always."""
        whole = self._is_whole and ghost is None
        return _Pieces(
            batch,
            self._device,
            ghost or self._ghost,
            whole,
            self._check_up_to_date,
            self._copies,
            self._cutting,
        )

    def _normalising(self) -> list[bool]:
        """Which BatchNorm layers normalise over ghost batches now: those in training mode, since the
        modes are the script's."""
        return [looks_across_samples(norm, norm.training) for norm in self._norms]

    def _begin_anew(self, batch: Any) -> None:
        """On some rank the optimizer has other parameters than so far, or other norms are in training
        mode: plan and set up for these. All ranks do."""
        scaler = self._replica.scaler_state()
        self.close()
        _check_of(self._model, self._optimizer)
        self._own, self._planned_for, self._is_outgrown = None, 0, False
        self._begin(batch)
        self._replica.load_scaler_state(scaler)

    def _joined(self) -> Group:
        """The ranks that the script has joined."""
        size = _num_joined()
        if size == 1:
            _warn_of_ranks_apart()
            return SingleDevice()
        if self._device.type == "cuda" and torch.cuda.current_device() != self._device.index:
            raise InputError(
                f"the model is on {self._device}, but the current device of this rank is"
                f" cuda:{torch.cuda.current_device()}: call torch.cuda.set_device first, since what"
                " ranks tell each other goes by way of the current device."
            )
        # What the kernel may refuse memory must not be refused any while it speaks to others.
        overlaps = self._device.type != "cpu" or not (self._limited or is_limited())
        return Replicate((1.0,) * size, self._device, overlaps)

    def _check_alike(self, group: Group) -> None:
        """Raises `InputError` if the ranks would not train the same: they would wait for each other in
        vain, or add up what does not belong together."""
        params = dict(self._model.named_parameters())
        shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in params.items()]
        frozen = [name for name, p in params.items() if not p.requires_grad]
        trained = [len(one["params"]) for one in self._optimizer.param_groups]
        mine = {
            "the version of torch": torch.__version__,
            "the names and shapes of the model's parameters": repr(shapes),
            "which parameters of the model are frozen": ", ".join(frozen) or "none",
            "which BatchNorm layers are in training mode": repr(self._cut),
            "the optimizer": f"{type(self._optimizer).__name__} on {trained} parameters",
            "whether the loss compares all samples": str(self._is_joint),
            "the precision": str(self._wishes.precision),
            "clip_norm": repr(self._clip_norm),
            "the ghost batch": repr(self._ghost),
            "the number of steps done so far": str(self._num_steps),
        }
        everyone = group.exchange(mine)
        for what, value in everyone[0].items():
            for rank, other in enumerate(everyone):
                if other[what] != value:
                    told = f" ({value} and {other[what]})" if len(value) < 80 else ""
                    raise InputError(
                        f"{what} of rank 0 and rank {rank} differ{told}: let all ranks run the same"
                        " script with the same options."
                    )

    def _first_plan(self, batch: Any) -> Plan | None:
        """A plan for this rank's part; None if there is nothing in it."""
        size = 0 if batch is None else self._cutting.count(batch)
        if size:
            self._own, self._planned_for = self._untraced(batch, size), size
        return self._own

    def _untraced(self, batch: Any, num_samples: int) -> Plan:
        """A plan for so many samples in one piece, or in micro-batches as asked for. What only a trace
        finds is found by one: the layer whose logits a chunked loss leaves out, passes of a loss over
        all samples."""
        if self._wishes.chunked_loss or self._is_joint:
            return self._planned(batch, num_samples)
        size = min(self._wishes.micro_batch or num_samples, num_samples)
        subject = self._subject(batch, num_samples)
        with Borrowed():
            return untraced_plan(subject, self._where, self._wishes, size, limited=self._limited)

    def _plan_anew(self, engine: Transactions, batch: Any) -> None:
        """Plan for larger batches, and follow that; all ranks do. `batch`: of this one, None if there
        is nothing in it."""
        group = self._group
        if group.size == 1:
            self._plan_larger(engine, batch)
            return
        plans = group.exchange(together(group, lambda: self._larger_plan(batch)))
        if plans != self._plans:  # else those that are to plan have no samples now
            self._plans = plans
            plan, total = _agreed_plan(group, plans)
            reason = "a batch was larger than what was planned for"
            engine.follow(plan, step_number(self._num_steps), reason)
            self._replica.expect(total)

    def _plan_larger(self, engine: Transactions, batch: Any) -> None:
        """On one rank: follow a plan for a batch that is larger than those before. What is cut is cut
        into more pieces of the same size; whether one piece still fits is tried anew."""
        own, size = self._own, self._largest
        assert own is not None
        before, self._planned_for = own.task.global_batch, size
        wished = self._wishes.micro_batch
        if own.choice.micro_batch >= before and wished is None:
            self._own = self._untraced(batch, size)
            self._confirm(engine, batch)
        else:
            task = own.task.model_copy(update={"global_batch": size})
            choice = own.choice
            if wished is not None:
                choice = choice.model_copy(update={"micro_batch": min(wished, size)})
            plan = own.model_copy(update={"task": task, "choice": choice})
            self._own, self._plans = plan, (plan,)
            reason = "a batch was larger than what was planned for"
            engine.follow(plan, step_number(self._num_steps), reason)
        self._replica.expect(size)

    def _larger_plan(self, batch: Any) -> Plan | None:
        """A plan for this rank's largest part, if that has outgrown its plan; made by `batch`."""
        is_old = (
            self._replica.is_outdated or self._normalising() != self._cut
        )  # begins anew, and plans
        if batch is None or is_old or self._largest <= self._planned_for:
            return self._own
        # Batches that become larger little by little are not planned for each time.
        self._planned_for = max(self._largest, 2 * self._planned_for)
        try:
            with uncounted(), self._meter.aside():  # planning is no part of training
                plan = self._planned(batch, self._planned_for)
        except (NoPlanFits, InputError):  # what there is has worked so far
            return self._own
        if self._own is None or self._own.prediction is None or plan.prediction is not None:
            self._own = plan
        return self._own

    def _planned(self, batch: Any, num_samples: int) -> Plan:
        """A plan for so many samples like those in `batch`."""
        most = self._wishes.micro_batch
        wishes = replace(self._wishes, micro_batch=most and min(most, num_samples))
        subject = self._subject(batch, num_samples)
        with Borrowed():  # a loss that draws random numbers is traced too
            plan = make_plan(subject, self._where, wishes, limited=self._limited)
        self._written |= subject.written
        return plan

    def _subject(self, batch: Any, num_samples: int) -> Subject:
        outline = self._outline
        model = outline.model
        blocks = tuple(find_recomputable(model))
        trained = parameters_in(self._optimizer.param_groups)
        return Subject(
            identity=TaskIdentity(
                name="step",
                global_batch=num_samples,
                parameters=sum(p.numel() for p in model.parameters()),
                trainable_parameters=sum(p.numel() for p in trained),
                ghost_batch=num_samples if self._is_whole else self._ghost,
                dtypes=dtypes_of(model),
            ),
            build_model=outline.build,
            make_optimizer=outline.optimizer_on,
            loss=self._loss,
            users=tuple(code_of(self._model)),
            template=batch,
            num_valid=0,
            clip_norm=self._clip_norm,
            blocks=blocks,
            chains=tuple(find_chains(model)),
            mlps=tuple(find_mlps(model, blocks)),
            compiled=kernel_choices.is_compiled(self._model),
            # The others' parts are not known here: taken to be as large.
            compared=num_samples * self._group.size if self._is_joint else 0,
        )

    def report(self) -> str:
        """The plan and what steps have used so far, in lines. Raises `InputError` before the first
        call."""
        if self.plan is None or self._engine is None:
            raise InputError("there is no plan yet: it is made in the first call of Step.")
        lines = [*self.plan.explain(), ("measured peak", format_bytes(self._meter.peak_bytes()))]
        return "\n".join(f"{what:<16} {how}" for what, how in lines)

    def _emit(self, event: Event) -> None:
        if self._group.rank:
            return
        for sink in self._sinks:
            sink(event)
        ran_out = isinstance(event, Replanned) and event.reason.startswith("memory ran out")
        if isinstance(event, Replanned) and ran_out and not self._sinks:
            warnings.warn(
                f"step {event.step}: {event.reason}. From here on: {event.after} (before:"
                f" {event.before}).",
                stacklevel=2,
            )


@dataclass(frozen=True, slots=True)
class _Cutting:
    """How batches are cut: the number of samples in one, and those from a first to an end."""

    count: Callable[[Any], int]
    cut: Callable[[Any, int, int], Any]


class _Pieces(Source):
    """This rank's part of a global batch, collated, as the samples of one step."""

    def __init__(
        self,
        batch: Any,
        device: torch.device,
        ghost: int | None,
        is_whole: bool,
        check: Callable[[], None],
        copies: BatchCopies,
        cutting: _Cutting,
    ) -> None:
        copies.forget()
        self._cutting = cutting
        self._copies = copies
        self._batch = batch
        self._device = device
        self._ghost = ghost
        self._is_whole = is_whole
        self._check = check  # raises where this rank cannot do the step
        self.ranges: Sequence[range] = ()

    @property
    def size(self) -> int:
        """Number of samples; 0 where they cannot be counted: the step itself will tell why."""
        with suppress(DataError):
            return 0 if self._batch is None else self._cutting.count(self._batch)
        return 0

    def micro_batches(self, choice: Choice, keep: bool = False) -> Iterator[MicroBatch]:
        """See `engine.Source`."""
        self._check()
        ghost = self._ghost
        whole = 0 if self._batch is None else self._cutting.count(self._batch)
        size = max(choice.micro_batch, whole if self._is_whole else min(ghost or 1, whole))
        if ghost and size % ghost and size < whole:
            size = max(ghost, size // ghost * ghost)
        self.ranges = micro_batches(range(whole), size, ghost, whole)
        yield from self.once_more()

    @property
    def own_samples(self) -> int:
        """See `engine.Source`."""
        return sum(map(len, self.ranges))

    def once_more(self) -> Iterator[MicroBatch]:
        """See `engine.Source`. The batch is the script's, and stays; what passes wrote to it before is
        put back."""
        self._copies.put_back()
        self._copies.forget()
        ghost, whole = self._ghost, self.own_samples
        for number, part in enumerate(self.ranges):
            piece = (
                self._batch
                if len(part) == whole
                else self._cutting.cut(self._batch, part.start, part.stop)
            )
            self._copies.keep(piece)
            piece = to_device(piece, self._device, non_blocking=True)
            cut = ghosts(len(part), ghost) if ghost else ()
            yield MicroBatch(piece, len(part), cut, last=number + 1 == len(self.ranges))
            del piece
            self._copies.passed()

    def first_samples(self, most: int, batch: Any) -> tuple[Callable[[int, int], Any], int]:
        """See `engine.Source`."""

        def take(start: int, stop: int) -> Any:
            return to_device(self._cutting.cut(self._batch, start, stop), self._device)

        return take, min(most, self.size)

    @contextmanager
    def untouched_by_errors(self) -> Iterator[None]:
        """Around the step: where an error ends it, the batch is as before."""
        try:
            yield
        except BaseException:
            self._copies.put_back()
            raise
        finally:
            self._copies.forget()

    def describe(self, number: int) -> str:
        """See `engine.Source`."""
        part = self.ranges[number]
        return f"samples {part.start} to {part.stop - 1} of the batch"


def _cut_batches(
    batches: Iterable[Any], device: torch.device, cutting: _Cutting, size: int
) -> Iterator[tuple[Any, int]]:
    """`batches` on the device, in pieces of at most `size` samples, each with its number of them."""
    length, total = num_samples_of(batches), 0
    for batch in batches:
        whole = cutting.count(batch)
        total += whole
        check_ends(type(batches).__name__, total, MOST_WITHOUT_LENGTH if length is None else None)
        for start in range(0, whole, size):
            stop = min(start + size, whole)
            piece = batch if stop - start == whole else cutting.cut(batch, start, stop)
            yield to_device(piece, device), stop - start


def _described(plan: Plan) -> str:
    """`plan` in a few lines."""
    budget = ""
    if plan.budget_bytes is not None:
        held = "enforced" if plan.enforced else "free"
        budget = f"; memory {format_bytes(plan.budget_bytes)} ({held})"
    passes = plan.accumulation_steps
    cut = "in one piece" if passes == 1 else f"{passes} micro-batches, {plan.choice.describe()}"
    lines = [f"{plan.task.global_batch:,} samples per step, {cut}{budget}"]
    told = plan.prediction
    if told is not None:
        found = "rehearsed" if told.rehearsed else "predicted"
        peak, seconds = format_bytes(told.peak_bytes), format_seconds(told.step_seconds)
        lines.append(f"{found} peak {peak}, step {seconds}")
    lines += plan.notices
    return "\n".join(f"anybatch.Step: {line}" for line in lines)


def _agreed_plan(group: Group, plans: Sequence[Plan | None]) -> tuple[Plan, int]:
    """The plan for this rank, and the samples of all ranks. `plans`: by rank, each made by the samples
    of that rank, or None.

    What ranks do in a step need not be alike, but how often they can do it again must be: when memory
    runs out on one, all take their next rung, and the ladder must end on all of them at once. So every
    ladder is spelled out, and a shorter one repeats its leanest choice.

    Raises `InputError` if no rank had samples.
    """
    first = next((plan for plan in plans if plan is not None), None)
    if first is None:
        where = "the batch" if group.size == 1 else "the batch of every rank"
        raise InputError(
            f"{where} is empty in the first call: the plan is made by it, so give some samples."
        )
    sizes = [0 if plan is None else plan.task.global_batch for plan in plans]
    plan = plans[group.rank] or first
    if group.size == 1:
        return plan, sizes[0]
    ladders = [_ladder(one) for one in plans if one is not None]
    own = _ladder(plan)
    own += [(own or [plan.choice])[-1]] * (max(map(len, ladders)) - len(own))
    changes = {"parallel": "replicate", "shares": tuple(map(float, sizes)), "ladder": tuple(own)}
    task = plan.task.model_copy(update={"global_batch": sum(sizes)})
    return plan.model_copy(update={**changes, "task": task}), sum(sizes)


def _ladder(plan: Plan) -> list[Choice]:
    """All choices that `plan` would be followed by, to the leanest."""
    choices: list[Choice] = []
    while (leaner := plan.leaner()) is not None:
        plan = leaner
        choices.append(plan.choice)
    return choices


def _num_joined() -> int:
    """The ranks of torch's process group; 1 where there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _warn_of_ranks_apart() -> None:
    """This Step trains by itself. Somebody may have started several processes that were to share it."""
    with suppress(InputError):  # variables that contradict each other: nobody has gone by them
        member = find()
        if member is not None and member.world_size > 1 and member.rank == 0:
            warnings.warn(
                f"{member.launcher} has started {member.world_size} ranks, but there is no process"
                " group of torch, so each of them trains by itself: if they are to train one model,"
                " call torch.distributed.init_process_group before the first call of Step.",
                stacklevel=6,
            )


def _check_unwrapped(model: nn.Module) -> None:
    """Raises `InputError` for a model that adds up its gradients itself."""
    if isinstance(model, nn.DataParallel | DistributedDataParallel):
        raise InputError(
            f"the model is wrapped in {type(model).__name__}, which divides batches or adds up"
            " gradients itself, and Step does both: pass model.module."
        )
    if any(hasattr(p, "full_tensor") for p in model.parameters()):
        raise InputError(
            "the model is sharded (its parameters are DTensors), and Step keeps a whole model on each"
            " rank: pass the plain model, or train it by anybatch.train with parallel='shard'."
        )


def _check_of(model: nn.Module, optimizer: Optimizer) -> None:
    """Raises `InputError` if `optimizer` trains nothing of `model`. It may train more: parameters of
    the loss, or of another model."""
    trained = list(parameters_in(optimizer.param_groups))
    if len(_beside(model, optimizer)) == len(trained):
        raise InputError(
            f"none of the {len(trained)} parameters of the optimizer ({type(optimizer).__name__}) is"
            f" one of the model's ({type(model).__name__}), so no step would change the model: make the"
            " optimizer on model.parameters() of this very model, after whatever replaces its"
            " parameters."
        )


def _beside(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    """What `optimizer` trains beside parameters of `model`."""
    own = set(model.parameters())
    return [param for param in parameters_in(optimizer.param_groups) if param not in own]


def _nothing() -> None:
    """The learning rate is the script's."""
