"""Step: an exact global step of any size inside an existing training loop.

    step = ab.Step(model, optimizer, loss, memory="10GiB")
    for batch in loader:
        outcome = step(batch)

The model, the optimizer, the data and the loop remain the user's. `step` cuts the batch into
micro-batches, weights them, applies precision and recomputation, and repeats the step when memory runs
out.

In a script that runs as several processes (torchrun, `torch.distributed.init_process_group`), every
rank calls `step` with its own part of the global batch. Parts may have any size, and the sizes may
differ:

    rank 0    step(5 samples)   step(3 samples)   step(2 samples)
    rank 1    step(4 samples)   step(8 samples)   step(None)           no samples left here

Each column is one step of the same model: the gradient is the sum over all ranks divided by the total
weight. All ranks must therefore make the same number of calls; a rank without samples passes None,
since the others would otherwise wait for it. A step that takes five minutes prints a message to
standard error; at the timeout of the process group it raises `PeerLost`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self
from weakref import WeakMethod, finalize

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from anybatch.compute import (
    Replica,
    find_chains,
    find_recomputable,
    kernel_choices,
)
from anybatch.compute.building import check_needs_no_closure
from anybatch.compute.ghost_norm import (
    counting_buffers,
    written_since,
)
from anybatch.compute.loss_reduction_check import tell_again, warn_of_statistics
from anybatch.compute.multi_optimizer import as_one
from anybatch.compute.precision import check_available
from anybatch.engine import (
    Ambient,
    Committed,
    Evaluation,
    Measured,
    Together,
    Transactions,
    at_work,
    held_bytes,
    make_limit,
    to_reserve,
    uncounted,
)
from anybatch.errors import InputError, NoPlanFits
from anybatch.events import Event, Replanned, Sink, step_number
from anybatch.machine import Machine
from anybatch.oom import is_limited
from anybatch.parallel import Group, Replicate, SingleDevice, Wish
from anybatch.parallel.failures import Outdated, PeerOutdated, same_on_all, together
from anybatch.planner import (
    Wishes,
)
from anybatch.plans import (
    KernelChoices,
    Plan,
    Recompute,
    parse_chunked_loss,
    parse_compile,
    parse_precision,
    parse_recompute,
)
from anybatch.process.cuda_driver import take_workspaces
from anybatch.process.threads import Reminder
from anybatch.side_effects import instances_in
from anybatch.step.batches import Cutting, cut_batches, warn_of_readings
from anybatch.step.checks import (
    check_optimizer,
    check_same_course,
    check_unwrapped,
    check_updates,
    num_joined,
    other_parameters,
    refused,
    warn,
    warn_of_ranks_apart,
)
from anybatch.step.norms import Norms
from anybatch.step.plans import StepPlans
from anybatch.task import (
    JointLoss,
    LossFunction,
    MetricsOfTask,
    cannot_be_called,
    check_shapes,
    clip_fault,
    loss_fault,
)
from anybatch.units import check_count, format_bytes, format_seconds

_WAIT_SECONDS = 300.0
"""Duration of a step with several ranks after which a message says that it may be waiting for another
rank."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one call of a `Step`.

    Attributes:
        step: the number of the step, from 1; calls that raised an error are not counted.
        loss: mean over the total weight of the batch.
        weight: the total weight.
        metrics: means of the metrics that the loss returned.
        grad_norm: 2-norm of the gradient before clipping.
        num_micro_batches: number of forward passes, on this rank.
        seconds: duration, on this rank.
        peak_bytes: peak memory of all steps so far, on this rank, relative to the memory in use before
            the first call; the model and the optimizer are included.
        part_weight, part_grad_norm: see `events.StepDone`.
        outputs: outputs that the loss returned for each sample (`Loss.outputs`), in the order of the
            batch, on the CPU.

    With several ranks, all values except `num_micro_batches`, `seconds`, `peak_bytes` and `outputs` are
    over all ranks, and are the same on each.
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
    """Runs one global step per call: cuts the batch, weights the micro-batches and commits the update.
    A call that raises an error changes nothing, unless the optimizer itself raised it in its update.

    With several ranks, the first call copies the parameters and buffers of rank 0 to all ranks;
    optimizer state that exists by then (in a resumed run) must already be the same on all of them.

    The first call tries the whole batch in one piece: passes are measured and undone. If it fits, the
    batch is not cut, and everything is as in the plain loop. Otherwise the plan is made from a trace
    and rehearsed. With `micro_batch`, nothing is tried before the first step, and nothing is traced,
    except for a chunked loss or a `JointLoss`.

    The plan is made from the first batch, and again when a batch is larger than any that was planned
    for: before its step, or with several ranks, which learn of it in that step, before the next one.
    The plan is also made again if the optimizer has other parameters than before (of layers that were
    unfrozen, for example), or if other BatchNorm layers are in training mode. With several ranks, this
    must happen on all ranks in the same call; if it happens on only some of them, all raise
    `InputError`.

    Training modes are set by the script: modules in evaluation mode are trained in evaluation mode.
    BatchNorm in evaluation mode (in a frozen backbone, for example) uses its running statistics and is
    not split into ghost batches. `nn.SyncBatchNorm` normalizes over the samples of all ranks, as in
    `DistributedDataParallel`: those of the call, or, if they have to be cut, those of each pass. This
    works on CPUs too, and ranks may have different numbers of samples.

    Args:
        model: on the device where it is trained; with several ranks, not wrapped.
        optimizer: over some or all parameters of `model`, and optionally over those of the loss; or a
            list of optimizers with separate parameters (Muon for the matrices, AdamW for the rest).
        loss: `(model, batch) -> Loss`, or a plain mean; see `Task`.
        memory: budget of each rank, in the format of `train`; enforced in every call, and on CUDA also
            between calls, until `close`. None: plan for the free memory. With several steps at once,
            the strictest budget applies to the memory of all of them.
        precision: see `plans.Precision`. With half-precision weights, `model` has them until `close`,
            so a float32 `state_dict` is taken after it.
        micro_batch: maximum number of samples per forward pass; None: chosen automatically.
        recompute: what to recompute: `"none"`, `"all"`, `"nested"`, module names separated by commas,
            or a `Recompute`; None: chosen automatically.
        chunked_loss: see `plan`; None: chosen automatically.
        clip_norm: maximum 2-norm of the mean gradient, over the parameters that the optimizer trains.
        ghost_batch: number of samples over which BatchNorm normalizes; None: the samples of the call,
            as in a plain loop, as long as they fit in one piece. If they have to be cut, the largest
            ghost batch that fits, on every rank, is chosen, once, with a warning. Each rank cuts its
            own part; with `nn.SyncBatchNorm`, a ghost batch is that many samples of each.
        compile: compile the blocks of the model.
        sinks: readers of recovery events; only those of rank 0 are called. Without any, a change of
            plan after memory ran out is a warning.
        verbose: whether rank 0 prints the plan to standard error in the first call.
        keep_grad: whether `param.grad` is available between calls: the mean gradient of the last step,
            as used in the update (clipped). Otherwise it is None. The gradients of half-precision
            weights are those of their float32 copies, which `param.grad` does not show.
        count_samples, slice_batch: for batches whose samples are not in dim 0 (graphs, time-first
            batches, objects): a function that returns the number of samples in a batch, and one from
            `(batch, start, stop)` to a batch of the samples from `start` to `stop`. Both or neither.

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
        recompute: str | Recompute | None = None,
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
        if fault := loss_fault(loss) or next(iter(cannot_be_called("loss", loss)), None):
            raise InputError(f"Step cannot train by this loss: {fault}.")
        if fault := clip_fault(clip_norm):
            raise InputError(f"{fault}.")
        if ghost_batch is not None:
            check_count(ghost_batch, "ghost_batch")
        self._sinks: tuple[Sink, ...] = tuple(sinks) if isinstance(sinks, Iterable) else ()
        if not isinstance(sinks, Iterable) or not all(map(callable, self._sinks)):
            raise InputError(f"sinks is {sinks!r}: give a list of functions of an event.")
        check_unwrapped(model)
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
        if micro_batch is not None:
            check_count(micro_batch, "micro_batch")
        self._wishes = Wishes(
            wanted,
            micro_batch,
            parse_recompute(recompute, find_recomputable(model), find_chains(model)),
            parse_chunked_loss(chunked_loss),
            compile=compile,
            shapes_vary=True,
        )
        self._keep_grad = keep_grad
        self._cutting = Cutting.by(count_samples, slice_batch)
        self._clip_norm = clip_norm
        self._ghost_batch = ghost_batch
        self._verbose = verbose
        homes = {p.device for p in model.parameters()}
        if len(homes) != 1:
            raise InputError(
                f"the model has parameters on {len(homes)} devices: Step takes a model on one device."
            )
        check_needs_no_closure(optimizer)
        check_optimizer(model, optimizer)
        self._device = homes.pop()
        kernel_choices.check_available(KernelChoices(compile=compile), self._device)
        where = Machine.here(memory, str(self._device)).device
        if memory is None:  # free memory, plus what the model and the optimizer hold
            budget = where.budget_bytes + held_bytes((model, optimizer))
            where = replace(where, budget_bytes=min(budget, where.total_bytes))
        check_available(wanted, where)
        self._norms = Norms(model, ghost_batch or micro_batch)
        self._plans = StepPlans(
            model,
            optimizer,
            loss,
            self._wishes,
            where,
            limited=self._limited,
            clip_norm=clip_norm,
            cutting=self._cutting,
            norms=self._norms,
        )
        self._engine: Transactions | None = None
        self._group: Group = SingleDevice()
        self._num_steps = 0
        self._reminder: Reminder | None = None
        # The loss may reach one that it does not call: a method of an object that keeps it, say.
        self._wrappers: list[nn.Module] = instances_in(DistributedDataParallel, loss)

    @at_work()
    def __call__(self, batch: Any) -> Outcome:
        """Run one step on `batch`, which may have any size.

        Args:
            batch: any nesting of tensors with the samples in dim 0, or lists of samples; with several
                ranks, the part of this rank, or None if it has no samples.

        Raises:
            NoPlanFits: memory ran out under the leanest plan.
            LossError, DataError: the loss or the batch cannot be used for training.
            InputError: the ranks do not train the same way, or are not those of the first call.
            PeerFailed: another rank raised an error.
            PeerLost: another rank is gone, or did not call.

        After any error, parameters, optimizer and buffers are as before the call, with two exceptions:
        an interrupt (Ctrl-C) during the update is raised after the step is done, and what an update has
        done before the optimizer, or a hook on its step, raises an error is not undone.
        """
        begun = time.perf_counter()
        if not torch.is_grad_enabled():
            raise InputError(
                "Step trains, and gradients are disabled where it is called (torch.no_grad,"
                " torch.inference_mode): call it outside of that, and evaluate for losses alone."
            )
        check_updates(self._optimizer)
        with self._telling_of_a_wait(), refused(self._wrappers, self._model):
            self._check_joined()
            if self._engine is None:
                self._begin(batch)
            check_same_course(self._group, self._optimizer, self._num_steps)
            done, num_passes, anew = None, 0, self._begin_anew
            try:
                done, num_passes = self._done(batch)
            except (Outdated, PeerOutdated):
                pass
            except NoPlanFits:
                if not self._norms.is_whole:
                    raise
                anew = partial(self._plans.cut_from_now_on, index=self._num_steps)
            if done is None:  # the tensors of the attempt have been freed
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
        """Compute the loss and metrics over `batches`, in evaluation mode and without gradients, within
        the budget: batches are cut to fit. Can be called after the first step; all ranks must call it.

        A script may also run its own evaluation between two steps; on a CPU, no budget applies to it.

        Args:
            batches: batches of this rank, as for steps; iterated again if memory runs out, so pass a
                `DataLoader` or a list, not an iterator.
            metrics: see `Task`.

        Raises:
            InputError: there was no step yet, or `batches` can be iterated only once.
            NoPlanFits: there is not enough memory to evaluate a single sample.
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
                partial(cut_batches, batches, self._device, self._cutting),
                self._loss,
                metrics,
                Together(self._plans.largest),
            )
        return found

    def close(self) -> None:
        """Restore the model and the process to their original state, except for the training. Each part
        is restored even if restoring another one raises an error."""
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
        """Run the step on `batch`; return its result and the number of passes on this rank. In addition
        to the errors of a call, raises `Outdated` or `PeerOutdated`, on all ranks."""
        engine = self._engine
        assert engine is not None
        plans = self._plans
        # The batch is examined inside the step, where an error on one rank does not block the others.
        source = plans.source(batch, self._num_steps)
        engine.wish = Wish.PLAN if plans.largest > plans.planned_for else Wish.NOTHING
        before = counting_buffers(self._model) if self._num_steps == 0 else None
        with ExitStack() as whole, source.untouched_by_errors(), source.named_in_errors():
            done = engine.run(self._num_steps, source, _nothing, whole)
            assert isinstance(done, Committed)  # steps are skipped only on request
            self._num_steps += 1
            plans.is_outgrown = Wish.PLAN in done.wished
            self.plan = engine.plan
        if before is not None and (len(source.ranges) > 1 or self._group.size > 1):
            plans.written |= dict.fromkeys(written_since(self._model, before))
            warn_of_statistics(self._model, self._loss, [*plans.written])
        return done, len(source.ranges)

    def _telling_of_a_wait(self) -> AbstractContextManager[None]:
        """Context manager for a step: with several ranks, a step that takes very long prints a message,
        once. Nothing is aborted: what the other ranks do between two steps is up to the script."""
        if self._group.size == 1:
            return nullcontext()
        if self._reminder is None:
            tell = WeakMethod(self._tell_of_a_wait)
            self._reminder = Reminder(_WAIT_SECONDS, lambda: (tell() or _nothing)())
            finalize(self, self._reminder.close)
        return self._reminder.around()

    def _tell_of_a_wait(self) -> None:
        print(  # noqa: T201 - sys.stderr may be None
            f"anybatch: rank {self._group.rank} of {self._group.size} has been in step"
            f" {step_number(self._num_steps)} for {_WAIT_SECONDS:.0f} s. Perhaps it waits for a"
            " rank that hangs, is busy with something else, or has ended its loop: every rank calls"
            " Step equally often, with None where it has no samples left.",
            file=sys.stderr,
            flush=True,
        )

    def _check_joined(self) -> None:
        """Raises `InputError` if the number of ranks has changed since the step was set up."""
        size = num_joined()
        if self._engine is not None and size != self._group.size:
            raise InputError(
                f"the number of ranks is {size}, and was {self._group.size} when this Step began: make"
                " torch's process group before the first call of Step, and destroy it after close()."
            )

    def _begin(self, batch: Any) -> None:
        """Plan for the first batch, and set up."""
        if self._cutting.is_along_rows:
            warn_of_readings(batch)
        norms, plans = self._norms, self._plans
        norms.begin(self._is_joint)
        group = self._group = self._joined()
        with ExitStack() as undo:  # undoes the completed part of the setup if the rest fails
            undo.callback(setattr, self, "_engine", None)
            self._check_alike(group)
            plan, total = plans.begin(batch, group)
            group.prepare(self._model)
            group.prepare(nn.ParameterList(other_parameters(self._model, self._optimizer)))
            engine = self._set_up(plan, total, undo)
            plans.run_on(engine, self._replica, self._meter)
            if self._wishes.micro_batch is None:
                plans.confirm(batch, self._num_steps)
            self._undo = undo.pop_all()
        wished, size = self._wishes.micro_batch, plans.planned_for
        if any(norms.across) and self._ghost_batch is None and wished and wished < size:
            warn(
                f"micro_batch is {wished}, so BatchNorm normalises over {wished} samples, not over all"
                f" {size} as in one piece: give ghost_batch={wished} if that is meant, or leave out"
                " micro_batch.",
            )
        if self._verbose and group.rank == 0:
            print(_described(engine.plan), file=sys.stderr)  # noqa: T201

    def _set_up(self, plan: Plan, total: int, undo: ExitStack) -> Transactions:
        """Set up for `plan`, with `total` samples over all ranks."""
        group = self._group
        # Memory counts from here on, so the process groups were created before.
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
                total,  # scales the gradients: the same on all ranks
                kernels=plan.kernels,
            )
            undo.callback(replica.close)  # here, since `make` may fail on another rank
            return replica

        self._replica = together(group, make)
        self._replica.keeps_gradients = self._keep_grad
        with uncounted():  # compiling does not count as training
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

    def _begin_anew(self, batch: Any) -> None:
        """Plan and set up again, after the optimizer got other parameters, or other BatchNorm layers
        are in training mode, on some rank. All ranks call it."""
        scaler = self._replica.scaler_state()
        self.close()
        check_optimizer(self._model, self._optimizer)
        self._plans.forget()
        self._begin(batch)
        self._replica.load_scaler_state(scaler)

    def _joined(self) -> Group:
        """The group of the ranks in the script's process group."""
        size = num_joined()
        if size == 1:
            warn_of_ranks_apart()
            return SingleDevice()
        if self._device.type == "cuda" and torch.cuda.current_device() != self._device.index:
            raise InputError(
                f"the model is on {self._device}, but the current device of this rank is"
                f" cuda:{torch.cuda.current_device()}: call torch.cuda.set_device first, since what"
                " ranks tell each other goes by way of the current device."
            )
        # If the OS may refuse memory, allocations must not overlap with communication.
        overlaps = self._device.type != "cpu" or not (self._limited or is_limited())
        return Replicate((1.0,) * size, self._device, overlaps, self._norms.is_synchronised)

    def _check_alike(self, group: Group) -> None:
        """Raises `InputError` if the ranks would not train the same way: they would wait for each other
        forever, or sum gradients that do not match."""
        params = dict(self._model.named_parameters())
        shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in params.items()]
        frozen = [name for name, p in params.items() if not p.requires_grad]
        trained = [len(one["params"]) for one in self._optimizer.param_groups]
        mine = {
            "the version of torch": torch.__version__,
            "the names and shapes of the model's parameters": repr(shapes),
            "which parameters of the model are frozen": ", ".join(frozen) or "none",
            "which BatchNorm layers are in training mode": repr(self._norms.across),
            "whether BatchNorm is synchronised": str(self._norms.is_synchronised),
            "the optimizer": f"{type(self._optimizer).__name__} on {trained} parameters",
            "whether the loss compares all samples": str(self._is_joint),
            "the precision": str(self._wishes.precision),
            "clip_norm": repr(self._clip_norm),
            "the ghost batch": repr(self._norms.ghost),
            "the number of steps done so far": str(self._num_steps),
        }
        same_on_all(group, mine, "let all ranks run the same script with the same options")

    def report(self) -> str:
        """The plan and the memory that steps have used so far, as lines of text. Raises `InputError`
        before the first call."""
        if self.plan is None or self._engine is None:
            raise InputError("there is no plan yet: it is made in the first call of Step.")
        plan, rank = self.plan, self._group.rank
        lines = dict(plan.explain())
        if plan.num_ranks > 1:  # a plan tells of whole ghost batches, which a rank of Step cuts
            samples = f"{plan.task.global_batch:,} samples per step,"
            samples += f" {plan.shares[rank]:,.0f} of this rank"
            lines["global batch"] = f"{samples}: {_cut_of(plan, rank)}"
        lines["measured peak"] = format_bytes(self._meter.peak_bytes())
        return "\n".join(f"{what:<16} {how}" for what, how in lines.items())

    def _emit(self, event: Event) -> None:
        if self._group.rank:
            return
        for sink in self._sinks:
            sink(event)
        ran_out = isinstance(event, Replanned) and event.reason.startswith("memory ran out")
        if isinstance(event, Replanned) and ran_out and not self._sinks:
            warn(
                f"step {event.step}: {event.reason}. From here on: {event.after} (before:"
                f" {event.before}).",
            )


def _described(plan: Plan) -> str:
    """A summary of `plan`, that of rank 0, in a few lines."""
    budget = ""
    if plan.budget_bytes is not None:
        held = "enforced" if plan.enforced else "free"
        budget = f"; memory {format_bytes(plan.budget_bytes)} ({held})"
    lines = [f"{plan.task.global_batch:,} samples per step, {_cut_of(plan, rank=0)}{budget}"]
    prediction = plan.prediction
    if prediction is not None:
        found = "rehearsed" if prediction.rehearsed else "predicted"
        peak, seconds = format_bytes(prediction.peak_bytes), format_seconds(prediction.step_seconds)
        lines.append(f"{found} peak {peak}, step {seconds}")
    lines += plan.notices
    return "\n".join(f"anybatch.Step: {line}" for line in lines)


def _cut_of(plan: Plan, rank: int) -> str:
    """How `plan`, that of `rank`, cuts the samples of this rank."""
    passes = plan.accumulation_steps
    if plan.num_ranks > 1:  # each rank cuts its own part
        passes = -(-int(plan.shares[rank] or max(plan.shares)) // plan.choice.micro_batch)
    return "in one piece" if passes == 1 else f"{passes} micro-batches, {plan.choice.describe()}"


def _nothing() -> None:
    """Does nothing: the script sets the learning rate."""
