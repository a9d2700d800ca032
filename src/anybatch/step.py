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

import contextlib
import math
import operator
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakMethod, finalize

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from anybatch.compute import (
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
from anybatch.compute.multi_optimizer import as_one, parts_of
from anybatch.compute.precision import check_available
from anybatch.data import (
    BatchCopies,
    batch_size,
    ghosts,
    micro_batches,
    num_samples_of,
    split,
    to_device,
)
from anybatch.data import slice_batch as slice_samples
from anybatch.data.batch_slices import may_be_parts, may_be_samples
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
from anybatch.errors import AnybatchError, DataError, InputError, NoPlanFits
from anybatch.estimate import Outline, Subject, dtypes_of, optimizer_options
from anybatch.events import Event, Replanned, Sink, step_number
from anybatch.launch import find
from anybatch.machine import USABLE, Machine
from anybatch.oom import is_limited
from anybatch.parallel import Group, Replicate, SingleDevice, Wish
from anybatch.parallel.failures import Outdated, PeerOutdated, same_on_all, together
from anybatch.planner import (
    Remembered,
    Wishes,
    as_measured,
    key_of,
    make_plan,
    untraced_plan,
)
from anybatch.plans import (
    Choice,
    KernelChoices,
    Plan,
    Recompute,
    TaskIdentity,
    parse_chunked_loss,
    parse_compile,
    parse_precision,
    parse_recompute,
)
from anybatch.process.cuda_driver import take_workspaces
from anybatch.process.threads import Reminder
from anybatch.rank import REHEARSED_PASSES
from anybatch.rank.rehearsing import Rehearsing, new_state_bytes
from anybatch.side_effects import instances_in, used_by
from anybatch.task import (
    JointLoss,
    LossFunction,
    MetricsOfTask,
    cannot_be_called,
    check_shapes,
    clip_fault,
    loss_fault,
    parameters_in,
)
from anybatch.units import check_count, format_bytes, format_seconds

_LEAST_QUARTERED = 8
"""Minimum number of samples in a batch of which a quarter is tried before the whole."""

_FAR = 2
"""Passes that are estimated to need more than this multiple of the available memory are not tried."""


_WAIT_SECONDS = 300.0
"""Duration of a step with several ranks after which a message says that it may be waiting for another
rank."""

_INSIDE = (str(Path(__file__).parent), contextlib.__file__)
"""Files that are skipped when a warning is located: the user's code is outside of them."""


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
        precision: see `plans.Precision`.
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
        check_cutting(count_samples, slice_batch)
        self._keep_grad = keep_grad
        count = batch_size if count_samples is None else partial(_counted_by, count_samples)
        self._cutting = _Cutting(count, slice_batch or slice_samples)
        self._clip_norm = clip_norm
        self._ghost_batch = ghost_batch
        self._verbose = verbose
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
        if memory is None:  # free memory, plus what the model and the optimizer hold
            budget = self._where.budget_bytes + held_bytes((model, optimizer))
            self._where = replace(self._where, budget_bytes=min(budget, self._where.total_bytes))
        check_available(wanted, self._where)
        self._engine: Transactions | None = None
        self._group: Group = SingleDevice()
        self._num_steps = 0
        self._written: dict[str, None] = {}  # buffers that traced passes wrote to
        self._own: Plan | None = None  # made from this rank's samples
        self._trials: list[tuple[Choice, int]] = []  # of the current batch, with their peaks
        self._planned_for = 0  # samples of this rank
        self._largest = 0  # size of a batch of this rank so far
        self._is_outgrown = False  # whether the plan of some rank is
        self._reminder: Reminder | None = None
        self._copies = BatchCopies()
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
        _check_updates(self._optimizer)
        with self._telling_of_a_wait(), _refused(self._wrappers, self._model):
            self._check_joined()
            if self._engine is None:
                self._begin(batch)
            self._check_same_course()
            done, num_passes, anew = None, 0, self._begin_anew
            try:
                done, num_passes = self._done(batch)
            except (Outdated, PeerOutdated):
                pass
            except NoPlanFits:
                if not self._is_whole:
                    raise
                anew = self._cut_from_now_on
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
                partial(_cut_batches, batches, self._device, self._cutting),
                self._loss,
                metrics,
                Together(self._largest),
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
        # The batch is examined inside the step, where an error on one rank does not block the others.
        source = self._pieces(batch)
        self._largest = max(self._largest, source.size)
        if self._is_outgrown or (self._group.size == 1 and self._largest > self._planned_for):
            self._plan_anew(engine, batch if source.size else None)
            source = self._pieces(batch)  # the plan may have changed the ghost batch
        else:
            engine.grow()
        engine.wish = Wish.PLAN if self._largest > self._planned_for else Wish.NOTHING
        before = counting_buffers(self._model) if self._num_steps == 0 else None
        with ExitStack() as whole, source.untouched_by_errors(), source.told_in_errors():
            done = engine.run(self._num_steps, source, _nothing, whole)
            assert isinstance(done, Committed)  # steps are skipped only on request
            self._num_steps += 1
            self._is_outgrown = Wish.PLAN in done.wished
            self.plan = engine.plan
        if before is not None and (len(source.ranges) > 1 or self._group.size > 1):
            self._written |= dict.fromkeys(written_since(self._model, before))
            warn_of_statistics(self._model, self._loss, [*self._written])
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
        sys.stderr.write(
            f"anybatch: rank {self._group.rank} of {self._group.size} has been in step"
            f" {step_number(self._num_steps)} for {_WAIT_SECONDS:.0f} s. Perhaps it waits for a"
            " rank that hangs, is busy with something else, or has ended its loop: every rank calls"
            " Step equally often, with None where it has no samples left.\n"
        )
        sys.stderr.flush()

    def _check_joined(self) -> None:
        """Raises `InputError` if the number of ranks has changed since the step was set up."""
        size = _num_joined()
        if self._engine is not None and size != self._group.size:
            raise InputError(
                f"the number of ranks is {size}, and was {self._group.size} when this Step began: make"
                " torch's process group before the first call of Step, and destroy it after close()."
            )

    def _check_up_to_date(self) -> None:
        """Raises `Outdated` if other BatchNorm layers are in training mode than at setup. The engine
        checks the parameters of the optimizer."""
        if self._normalising() != self._cut:
            raise Outdated("other BatchNorm layers are in training mode than before.")

    def _begin(self, batch: Any) -> None:
        """Plan for the first batch, and set up."""
        self._norms = tuple(batch_norms(self._model).values())
        if self._cutting.count is batch_size and may_be_parts(batch):
            rows = " and ".join(str(len(part)) for part in batch)
            _warn(
                f"the batch is a {type(batch).__name__} of {len(batch)} tensors of {rows} rows, which"
                f" are taken as {len(batch)} samples of unequal length. If they are parts of a batch,"
                " give count_samples and slice_batch, which tell how it is cut."
            )
        elif self._cutting.count is batch_size and may_be_samples(batch):
            shape, size = tuple(batch[0].shape), batch_size(batch)
            _warn(
                f"the batch is a {type(batch).__name__} of {len(batch)} tensors of shape {shape}, which"
                f" are taken as parts of {size} sample{'s' if size > 1 else ''}. If each is a sample,"
                " stack them, or give count_samples=len and slice_batch=lambda batch, start, stop:"
                " batch[start:stop]."
            )
        self._cut = self._normalising()
        self._is_synchronised = self._synchronises()
        group = self._group = self._joined()
        with ExitStack() as undo:  # undoes the completed part of the setup if the rest fails
            undo.callback(setattr, self, "_engine", None)
            self._ghost = self._ghost_batch or self._wishes.micro_batch if any(self._cut) else None
            self._check_alike(group)
            self._outline = Outline(self._model, self._optimizer)
            with uncounted():  # planning does not count against the budget of another Step
                first = together(group, lambda: self._first_plan(batch))
            self._plans = group.exchange(first)
            plan, total = self._agreed(self._plans)
            group.prepare(self._model)
            group.prepare(nn.ParameterList(_beside(self._model, self._optimizer)))
            engine = self._set_up(plan, total, undo)
            if self._wishes.micro_batch is None:
                self._confirm(engine, batch)
            self._undo = undo.pop_all()
        wished = self._wishes.micro_batch
        if any(self._cut) and self._ghost_batch is None and wished and wished < self._planned_for:
            _warn(
                f"micro_batch is {wished}, so BatchNorm normalises over {wished} samples, not over all"
                f" {self._planned_for} as in one piece: give ghost_batch={wished} if that is meant, or"
                " leave out micro_batch.",
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

    def _confirm(self, engine: Transactions, batch: Any, fits: bool = True) -> None:
        """Between two steps: follow the plan for one piece if passes show that it fits on every rank,
        and otherwise a plan that cuts. All ranks call it. `fits`: whether it may fit on this rank."""
        group, tells = self._group, self._num_steps > 0
        size = self._planned_for
        self._trials.clear()
        what = "a batch that is larger than those before" if tells else "the batch"
        remembered = self._remembered(batch, size) if fits else None
        known = remembered.recall(self._where)[0] if remembered is not None else None
        fits = together(
            group, lambda: fits and known is None and self._fits_whole(engine, batch, size)
        )

        def follow(own: Plan | None, reason: str) -> None:
            self._own, self._plans = own, group.exchange(own)
            plan, total = self._agreed(self._plans)
            engine.follow(plan, step_number(self._num_steps), reason, tells)
            self._replica.expect(total)

        if all(group.exchange(fits)):
            follow(self._own, f"{what} fits in one piece")
            return
        if self._is_whole:
            whole = max(group.exchange(0 if self._own is None else size))
            ghost = together(group, lambda: self._largest_ghost(engine, batch, size, whole))
            self._ghost = min(group.exchange(ghost))
            whose = " of each rank" if self._is_synchronised else ""
            if group.rank == 0:
                _warn(
                    f"a batch of {whole} samples does not fit the memory in one piece, so it is cut,"
                    f" and BatchNorm normalises over ghost batches of {self._ghost} samples{whose} from"
                    " now on. Give ghost_batch to choose their size, or more memory.",
                )

        def planned() -> Plan | None:
            if self._own is None:
                return None
            with uncounted(), self._meter.aside():  # planning does not count as training
                return self._planned(batch, size)

        def rehearsed(is_fixed: bool = False) -> Plan | None:
            return None if self._own is None else self._rehearsed(engine, batch, is_fixed)

        reason = f"{what} does not fit in one piece"
        follow(known or together(group, planned), reason)
        found = together(group, lambda: rehearsed(is_fixed=known is not None))
        if found is None and known is not None:  # the remembered plan does not fit any more
            follow(together(group, planned), reason)
            found = together(group, rehearsed)
        follow(found, "it was rehearsed")
        if remembered is not None and found is not None:
            remembered.keep(found)

    def _remembered(self, batch: Any, size: int) -> Remembered | None:
        """The storage of a plan for `size` samples like those in `batch`, which do not fit in one piece
        under this budget. None where plans are not remembered: several ranks would have to agree,
        and without a budget the free memory is another one each time."""
        if self._group.size > 1 or not self._limited or self._is_whole:
            return None
        asked = asdict(replace(self._wishes, watch=None)) | {"joint": self._is_joint}
        subject = self._subject(batch, size)
        key = key_of(subject, [self._where], self._limited, asked)
        return Remembered(key, frontier=False, passing=())

    def _cut_from_now_on(self, batch: Any) -> None:
        """Switch to a plan that cuts, after memory ran out in a batch that BatchNorm normalizes as a
        whole. All ranks call it."""
        assert self._engine is not None
        self._planned_for = max(self._largest, 2)
        is_empty = batch is None or not self._cutting.count(batch)

        def planned() -> Plan | None:
            return None if is_empty else self._untraced(batch, self._planned_for)

        self._own = together(self._group, planned)
        self._confirm(self._engine, batch, fits=False)

    def _fits_whole(self, engine: Transactions, batch: Any, size: int) -> bool:
        """Whether a batch of `size` samples fits in one piece; if so, that becomes the plan of this
        rank. A quarter of it is tried first, and its measurement is scaled up. The whole is then not
        run if it would need far too much memory or, on a CPU without an enforced budget, if it needs
        little."""
        plan = self._own
        if plan is None:  # this rank has no samples
            return True
        room = (plan.budget_bytes or 0) - plan.reserve_bytes
        used = self._meter.used_bytes()
        fixed = used + sum(p.nbytes for p in self._replica.parameters if p.requires_grad)
        is_run, is_tried = True, False

        def rehearse(choice: Choice, kernels: KernelChoices | None) -> Rehearsed | None:
            nonlocal is_run, is_tried
            if size >= _LEAST_QUARTERED and not is_tried:
                about = self._estimated(engine, batch, choice, size, fixed, room)
                if about is None:
                    return None
                needs_little = self._device.type == "cpu" and not plan.enforced
                is_far = about.peak_bytes > self._worth_trying(room)
                if is_far or (needs_little and about.peak_bytes < room // 2):
                    is_run = False
                    return about
            is_tried = True
            return self._run(engine, batch, choice, size, most=2, kernels=kernels)

        # Cutting is faster than returning freed memory, unless BatchNorm normalizes over the whole.
        found = Rehearsing(
            plan, self._replica, rehearse, used, is_fixed=True, may_return=self._is_whole
        ).plan()
        if found is not None and found.prediction is not None:
            told = found.prediction.model_copy(update={"rehearsed": is_run})
            self._own = found.model_copy(update={"prediction": told})
        return found is not None

    def _estimated(
        self, engine: Transactions, batch: Any, choice: Choice, size: int, fixed: int, room: int
    ) -> Rehearsed | None:
        """The measurements of a pass over a quarter of the `size` samples of `batch`, with the peak
        above `fixed` bytes scaled up to all of them; None: memory ran out. On a CPU, where the kernel
        may end a process that needs more memory than there is, passes over smaller parts come first,
        and the first of which four times as much does not fit into `room` is scaled up instead."""
        parts = [size // 4]
        while self._device.type == "cpu" and parts[0] >= _LEAST_QUARTERED:
            parts.insert(0, parts[0] // 4)
        about: Rehearsed | None = None
        for part in parts:
            found = self._run(engine, batch, choice, part, most=1)
            if found is None:
                return None
            grown = max(0, found.peak_bytes - fixed)
            about = replace(found, peak_bytes=fixed + grown * size // part)
            if fixed + 4 * grown > room:
                break
        return about

    def _largest_ghost(self, engine: Transactions, batch: Any, size: int, whole: int) -> int:
        """The largest ghost batch of BatchNorm that fits on this rank, which has `size` samples, or the
        smallest if none does. They are the largest batch of any rank (`whole`), halved repeatedly."""
        plan = self._own
        if plan is None:  # this rank has no samples
            return whole
        room, used = self._room_of_passes(plan), self._meter.used_bytes()
        halves: list[int] = []  # ascending
        half = whole
        while (half := half // 2) > 2:
            halves.insert(0, half)
        largest = halves[0] if halves else whole
        for before, ghost in pairwise((0, *halves)):
            if before >= size:  # was tried: this rank has no more samples
                largest = ghost
                continue
            found = self._run(engine, batch, plan.choice, min(ghost, size), most=3)
            if found is None or not found.fits or found.peak_bytes > room:
                break
            largest = ghost
            if 2 * found.peak_bytes - used > self._worth_trying(room):
                break
        return largest

    def _worth_trying(self, room: int) -> int:
        """Estimated bytes up to which a pass is tried although it may not fit into `room`: on a CPU no
        more than is free, since the kernel may end a process that needs more."""
        free = self._where.free_bytes
        return _FAR * room if free is None else min(_FAR * room, max(room, int(USABLE * free)))

    def _room_of_passes(self, plan: Plan) -> int:
        """Bytes available to passes: the budget without its reserve and without the optimizer states
        that the first update creates."""
        states = new_state_bytes(plan, self._replica)
        return (plan.budget_bytes or 0) - plan.reserve_bytes - states

    def _rehearsed(self, engine: Transactions, batch: Any, is_fixed: bool) -> Plan | None:
        """The plan of this rank after it was rehearsed with passes over `batch`; None if its choice
        `is_fixed` and does not fit. Raises `NoPlanFits`."""
        plan, used = self._own, self._meter.used_bytes()
        assert plan is not None
        room = self._room_of_passes(plan)

        def rehearse(choice: Choice, kernels: KernelChoices | None) -> Rehearsed | None:
            size = choice.micro_batch
            is_last = size <= plan.task.unit or plan.budget_bytes is None
            enough = None if is_last else room  # a smaller one will be tried
            if enough is not None and (peak := self._known_peak(choice)) > enough:
                return Rehearsed(math.inf, peak, fits=False)
            return self._run(engine, batch, choice, size, REHEARSED_PASSES, kernels, enough)

        found = Rehearsing(plan, self._replica, rehearse, used, is_fixed=is_fixed).plan()
        if found is None:
            return None
        if self._is_synchronised:  # each pass was one ghost batch, whatever was asked for
            choice = found.choice.model_copy(update={"micro_batch": plan.choice.micro_batch})
            found = found.model_copy(update={"choice": choice})
        return as_measured(found, plan)

    def _known_peak(self, choice: Choice) -> int:
        """Bytes that passes under `choice` need at least, from trials of the same kind over at most as
        many samples; 0 if there were none."""
        alike = (
            peak
            for tried, peak in self._trials
            if (tried.kind, tried.precision) == (choice.kind, choice.precision)
            and tried.micro_batch <= choice.micro_batch
        )
        return max(alike, default=0)

    def _run(
        self,
        engine: Transactions,
        batch: Any,
        choice: Choice,
        size: int,
        most: int,
        kernels: KernelChoices | None = None,
        enough: int | None = None,
    ) -> Rehearsed | None:
        """Measure at most `most` passes over `size` samples of `batch`, and undo them; a pass of more
        than `enough` bytes is the last. None: memory ran out."""
        source = self._pieces(batch, size if self._is_whole and size < self._planned_for else None)
        changes = {"micro_batch": size, "evaluation_batch": min(size, choice.evaluation_batch)}
        tried = choice.model_copy(update=changes)
        try:
            with Borrowed(), self._meter.aside(), source.told_in_errors():
                found = engine.rehearsal.run(
                    self._num_steps, source, tried, engine.plan.choice, most, kernels, enough
                )
            if found is not None and kernels is None:
                self._trials.append((tried, found.peak_bytes))
            return found
        finally:
            self._copies.put_back()

    @property
    def _is_whole(self) -> bool:
        """Whether BatchNorm normalizes over all samples of a call, which are then one piece."""
        return any(self._cut) and self._ghost is None

    def _pieces(self, batch: Any, ghost: int | None = None) -> _Pieces:
        """This rank's `batch`, cut into pieces; with ghost batches of `ghost` samples, or of the usual
        size if None."""
        whole = self._is_whole and ghost is None
        return _Pieces(
            batch,
            self._device,
            ghost or self._ghost,
            whole,
            self._check_up_to_date,
            self._copies,
            self._cutting,
            self._is_synchronised,
        )

    def _agreed(self, plans: Sequence[Plan | None]) -> tuple[Plan, int]:
        """See `_agreed_plan`. If norms are synchronised, they are also when blocks are recomputed."""
        return _agreed_plan(self._group, plans, alike=self._is_synchronised)

    def _normalising(self) -> list[bool]:
        """For each BatchNorm layer, whether it normalizes over samples of the pass now, which depends
        on the training mode that the script has set."""
        return [looks_across_samples(norm, norm.training) for norm in self._norms]

    def _begin_anew(self, batch: Any) -> None:
        """Plan and set up again, after the optimizer got other parameters, or other BatchNorm layers
        are in training mode, on some rank. All ranks call it."""
        scaler = self._replica.scaler_state()
        self.close()
        _check_of(self._model, self._optimizer)
        self._own, self._planned_for, self._is_outgrown = None, 0, False
        self._begin(batch)
        self._replica.load_scaler_state(scaler)

    def _joined(self) -> Group:
        """The group of the ranks in the script's process group."""
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
        # If the OS may refuse memory, allocations must not overlap with communication.
        overlaps = self._device.type != "cpu" or not (self._limited or is_limited())
        return Replicate((1.0,) * size, self._device, overlaps, self._is_synchronised)

    def _synchronises(self) -> bool:
        """Whether BatchNorm normalizes over the samples of several ranks, all of them. Raises
        `InputError` if it is to do so over some of them."""
        if _num_joined() == 1:
            return False
        cut = [norm for norm, is_cut in zip(self._norms, self._cut, strict=True) if is_cut]
        synced = [norm for norm in cut if isinstance(norm, nn.SyncBatchNorm)]
        groups = {norm.process_group for norm in synced} - {None}
        if any(dist.get_world_size(one) != _num_joined() for one in groups):
            raise InputError(
                "SyncBatchNorm was given a process group of some of the ranks, and Step synchronises"
                " over all of them: leave process_group out, or use BatchNorm, which normalises over"
                " the samples of each rank."
            )
        if synced and self._is_joint:
            _warn(
                "SyncBatchNorm normalises over the samples of each rank here, as BatchNorm does, since"
                " the loss compares the samples of all ranks (JointLoss).",
            )
            return False
        if 0 < len(synced) < len(cut):
            _warn(
                f"{len(cut) - len(synced)} of {len(cut)} BatchNorm layers are not SyncBatchNorm, and"
                " are normalised over the samples of all ranks as well: convert all of them, or none.",
            )
        return bool(synced)

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
            "which BatchNorm layers are in training mode": repr(self._cut),
            "whether BatchNorm is synchronised": str(self._is_synchronised),
            "the optimizer": f"{type(self._optimizer).__name__} on {trained} parameters",
            "whether the loss compares all samples": str(self._is_joint),
            "the precision": str(self._wishes.precision),
            "clip_norm": repr(self._clip_norm),
            "the ghost batch": repr(self._ghost),
            "the number of steps done so far": str(self._num_steps),
        }
        same_on_all(group, mine, "let all ranks run the same script with the same options")

    def _check_same_course(self) -> None:
        """Raises `InputError` if the script has changed learning rates or weights on some ranks only,
        or optimizer states were not the same at the beginning. Checked before the first step, and after
        steps 1, 2, 4, 8, ..."""
        group, done = self._group, self._num_steps
        if group.size == 1 or done & (done - 1):
            return
        groups = self._optimizer.param_groups
        rates = [float(one["lr"]) for one in groups if one.get("lr") is not None]
        params = [p for p in parameters_in(groups) if not is_traceable_wrapper_subclass(p)]
        norms = [_norm(param) for param in params]
        everyone = group.exchange((rates, norms))
        for rank, (theirs, lengths) in enumerate(everyone):
            where = f"of rank 0 and rank {rank} differ before step {step_number(done)}"
            for one, other in zip(everyone[0][0], theirs, strict=False):
                if one != other:
                    raise InputError(
                        f"the learning rates {where} ({one:g} and {other:g}): let each scheduler step"
                        " on all ranks, by a value that is the same on all, as from step.evaluate."
                    )
            if not all(map(_is_close, everyone[0][1], lengths)):
                raise InputError(
                    f"the weights {where}: change and load them on all ranks alike, and so the state of"
                    " the optimizer."
                )

    def _first_plan(self, batch: Any) -> Plan | None:
        """A plan for this rank's part; None if it is empty."""
        size = 0 if batch is None else self._cutting.count(batch)
        if size:
            self._own, self._planned_for = self._untraced(batch, size), size
        return self._own

    def _untraced(self, batch: Any, num_samples: int) -> Plan:
        """A plan for `num_samples` samples in one piece, or in micro-batches of the requested size. A
        trace is made only if needed: to find the layer whose logits a chunked loss omits, or for the
        passes of a loss over all samples."""
        if self._wishes.chunked_loss or self._is_joint:
            return self._planned(batch, num_samples)
        size = min(self._wishes.micro_batch or num_samples, num_samples)
        subject = self._subject(batch, num_samples)
        with Borrowed():
            return untraced_plan(subject, self._where, self._wishes, size, limited=self._limited)

    def _plan_anew(self, engine: Transactions, batch: Any) -> None:
        """Plan for larger batches, and follow that plan; all ranks call it. `batch`: that of this rank,
        or None if it is empty."""
        group = self._group
        if group.size == 1:
            self._plan_larger(engine, batch)
            return
        plans = group.exchange(together(group, lambda: self._larger_plan(batch)))
        if plans != self._plans:  # else the ranks that should plan have no samples now
            self._plans = plans
            plan, total = self._agreed(plans)
            reason = "a batch was larger than what was planned for"
            engine.follow(plan, step_number(self._num_steps), reason)
            self._replica.expect(total)

    def _plan_larger(self, engine: Transactions, batch: Any) -> None:
        """On a single rank: follow a plan for a batch that is larger than all before. A batch that was
        cut gets more pieces of the same size; whether one piece still fits is tried again."""
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
        """A plan for this rank's largest part, made from `batch`, if it has outgrown the current plan;
        else the current plan."""
        is_old = (
            self._replica.is_outdated or self._normalising() != self._cut
        )  # `_begin_anew` plans
        if batch is None or is_old or self._largest <= self._planned_for:
            return self._own
        # Plan for twice the size, so that gradually growing batches do not need a new plan each time.
        self._planned_for = max(self._largest, 2 * self._planned_for)
        try:
            with uncounted(), self._meter.aside():  # planning does not count as training
                plan = self._planned(batch, self._planned_for)
        except (NoPlanFits, InputError):  # the current plan has worked so far
            return self._own
        if self._own is None or self._own.prediction is None or plan.prediction is not None:
            self._own = plan
        return self._own

    def _planned(self, batch: Any, num_samples: int) -> Plan:
        """A plan for `num_samples` samples like those in `batch`."""
        # A pass of norms that are synchronised is one ghost batch.
        most = self._ghost if self._is_synchronised else self._wishes.micro_batch
        wishes = replace(self._wishes, micro_batch=most and min(most, num_samples))
        subject = self._subject(batch, num_samples)
        with Borrowed():  # a traced loss may use random numbers
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
            users=tuple(used_by(self._model)),
            optimizer=optimizer_options(self._optimizer),
            template=batch,
            num_valid=0,
            clip_norm=self._clip_norm,
            blocks=blocks,
            chains=tuple(find_chains(model)),
            mlps=tuple(find_mlps(model, blocks)),
            compiled=kernel_choices.is_compiled(self._model),
            # The sizes of the other ranks' parts are unknown here, and assumed to be the same.
            compared=num_samples * self._group.size if self._is_joint else 0,
        )

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
            _warn(
                f"step {event.step}: {event.reason}. From here on: {event.after} (before:"
                f" {event.before}).",
            )


def _counted_by(count_samples: Callable[[Any], Any], batch: Any) -> int:
    """The number of samples in `batch` by the user's function. Raises `DataError` if it returns
    something else."""
    number = count_samples(batch)
    try:
        found = operator.index(number)  # integral tensors and NumPy's integers too
    except TypeError:
        found = -1
    if found < 0:
        raise DataError(
            f"count_samples returned {number!r}, of type {type(number).__name__}: return the number of"
            " samples in the batch, a whole number."
        )
    return found


@dataclass(frozen=True, slots=True)
class _Cutting:
    """How batches are cut: functions to count the samples of a batch, and to slice it from start to
    stop."""

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
        is_synchronised: bool,
    ) -> None:
        copies.forget()
        self._is_synchronised = is_synchronised
        self._cutting = cutting
        self._copies = copies
        self._batch = batch
        self._device = device
        self._ghost = ghost
        self._is_whole = is_whole
        self._check = check  # raises if this rank cannot run the step
        self.ranges: Sequence[range] = ()

    @cached_property
    def size(self) -> int:
        """Number of samples; 0 if they cannot be counted, in which case the step itself raises the
        error."""
        with suppress(DataError):
            return self._count
        return 0

    @cached_property
    def _count(self) -> int:
        return 0 if self._batch is None else self._cutting.count(self._batch)

    def micro_batches(self, choice: Choice, keep: bool = False) -> Iterator[MicroBatch]:
        """See `engine.Source`."""
        self._check()
        ghost = self._ghost
        whole = self._count
        least = max(1, whole if self._is_whole else min(ghost or 1, whole))
        # Ranks whose norms are synchronised meet for one ghost batch in each pass.
        size = least if self._is_synchronised else max(choice.micro_batch, least)
        if ghost and size % ghost and size < whole:
            size = max(ghost, size // ghost * ghost)
        self.ranges = micro_batches(range(whole), size, ghost, whole)
        yield from self.once_more()

    @property
    def own_samples(self) -> int:
        """See `engine.Source`."""
        return sum(map(len, self.ranges))

    def once_more(self) -> Iterator[MicroBatch]:
        """See `engine.Source`. The batch belongs to the script and is kept; changes that earlier passes
        made to it are undone."""
        self._copies.put_back()
        self._copies.forget()
        ghost, last = self._ghost, len(self.ranges) - 1
        for number, (part, piece) in enumerate(zip(self.ranges, self._pieces(), strict=True)):
            self._copies.keep(piece)
            piece = to_device(piece, self._device, non_blocking=True)
            is_one = self._is_synchronised
            cut = [len(part)] if is_one else ghosts(len(part), ghost) if ghost else ()
            yield MicroBatch(piece, len(part), cut, last=number == last)
            del piece
            self._copies.passed()

    def _pieces(self) -> Iterable[Any]:
        """The samples of each range; views of the batch, unless the user cuts it."""
        if len(self.ranges) < 2:
            return [self._batch] * len(self.ranges)
        if self._cutting.cut is slice_samples:
            return split(self._batch, [*map(len, self.ranges)])
        return (self._cutting.cut(self._batch, part.start, part.stop) for part in self.ranges)

    def first_samples(self, most: int, batch: Any) -> tuple[Callable[[int, int], Any], int]:
        """See `engine.Source`."""

        def take(start: int, stop: int) -> Any:
            return to_device(self._cutting.cut(self._batch, start, stop), self._device)

        return take, min(most, self.size)

    @contextmanager
    def untouched_by_errors(self) -> Iterator[None]:
        """Context manager for the step that restores the batch if an error ends it."""
        try:
            yield
        except BaseException:
            self._copies.put_back()
            raise
        finally:
            self._copies.forget()

    @contextmanager
    def told_in_errors(self) -> Iterator[None]:
        """Context manager for passes: errors of the loss tell that it was given a part of the batch."""
        try:
            yield
        except Exception as error:
            is_cut = len(self.ranges) > 1 and self._cutting.cut is slice_samples
            if is_cut and not isinstance(error, AnybatchError):
                error.add_note(
                    f"Passes are over parts of the batch: its {self.size} samples are cut along dim 0."
                    " If it is one piece (a graph) or has them elsewhere, give Step count_samples and"
                    " slice_batch."
                )
            raise

    def describe(self, number: int) -> str:
        """See `engine.Source`."""
        part = self.ranges[number]
        return f"samples {part.start} to {part.stop - 1} of the batch"


def _cut_batches(
    batches: Iterable[Any], device: torch.device, cutting: _Cutting, size: int
) -> Iterator[tuple[Any, int]]:
    """Yield `batches` on the device, in pieces of at most `size` samples, each with its number of
    samples."""
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
    """A summary of `plan`, that of rank 0, in a few lines."""
    budget = ""
    if plan.budget_bytes is not None:
        held = "enforced" if plan.enforced else "free"
        budget = f"; memory {format_bytes(plan.budget_bytes)} ({held})"
    lines = [f"{plan.task.global_batch:,} samples per step, {_cut_of(plan, rank=0)}{budget}"]
    told = plan.prediction
    if told is not None:
        found = "rehearsed" if told.rehearsed else "predicted"
        peak, seconds = format_bytes(told.peak_bytes), format_seconds(told.step_seconds)
        lines.append(f"{found} peak {peak}, step {seconds}")
    lines += plan.notices
    return "\n".join(f"anybatch.Step: {line}" for line in lines)


def _cut_of(plan: Plan, rank: int) -> str:
    """How `plan`, that of `rank`, cuts the samples of this rank."""
    passes = plan.accumulation_steps
    if plan.num_ranks > 1:  # each rank cuts its own part
        passes = -(-int(plan.shares[rank] or max(plan.shares)) // plan.choice.micro_batch)
    return "in one piece" if passes == 1 else f"{passes} micro-batches, {plan.choice.describe()}"


def _agreed_plan(group: Group, plans: Sequence[Plan | None], alike: bool) -> tuple[Plan, int]:
    """The plan for this rank, and the number of samples over all ranks. `plans`: by rank, each made
    from the samples of that rank, or None. `alike`: whether all ranks run a step in the same way, that
    of the rank with the most samples.

    Ranks may run a step differently, but must be able to repeat it the same number of times: when
    memory runs out on one, all move to their next rung, and all ladders must end at the same time. So
    every ladder is written out in full, and a shorter one repeats its leanest choice.

    Raises `InputError` if no rank has samples.
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
    if alike:
        largest = max(filter(None, plans), key=lambda one: one.task.global_batch)
        told = {name: getattr(largest, name) for name in ("task", "choice", "ladder")}
        plan = plan.model_copy(update=told)  # the budget stays that of this rank
    ladders = [_ladder(one) for one in plans if one is not None]
    own = _ladder(plan)
    own += [(own or [plan.choice])[-1]] * (max(map(len, ladders)) - len(own))
    changes = {"parallel": "replicate", "shares": tuple(map(float, sizes)), "ladder": tuple(own)}
    task = plan.task.model_copy(update={"global_batch": sum(sizes)})
    return plan.model_copy(update={**changes, "task": task}), sum(sizes)


def _ladder(plan: Plan) -> list[Choice]:
    """All choices that would follow that of `plan`, down to the leanest."""
    choices: list[Choice] = []
    while (leaner := plan.leaner()) is not None:
        plan = leaner
        choices.append(plan.choice)
    return choices


def _norm(param: torch.Tensor) -> float:
    """The 2-norm of `param`, summed in float32 at least."""
    dtype = torch.promote_types(param.dtype, torch.float32)
    return float(torch.linalg.vector_norm(param.detach(), dtype=dtype))


def _is_close(one: float, other: float) -> bool:
    """Whether two norms agree as far as those of ranks with different devices do."""
    return math.isclose(one, other, rel_tol=1e-3) or (math.isnan(one) and math.isnan(other))


def _num_joined() -> int:
    """Number of ranks in torch's process group; 1 if there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _warn(sentence: str) -> None:
    """Issue a warning, located at the line of the user's code that led to it."""
    frame, level = sys._getframe(1), 2
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(sentence, stacklevel=level)


def _warn_of_ranks_apart() -> None:
    """Warn if several processes were started but not joined, since this Step then trains on its own."""
    with suppress(InputError):  # contradictory variables, which are not used
        member = find()
        if member is not None and member.world_size > 1 and member.rank == 0:
            _warn(
                f"{member.launcher} has started {member.world_size} ranks, but there is no process"
                " group of torch, so each of them trains by itself: if they are to train one model,"
                " call torch.distributed.init_process_group before the first call of Step.",
            )


def _check_unwrapped(model: nn.Module) -> None:
    """Raises `InputError` for a model that sums its gradients itself, or that is sharded."""
    if isinstance(model, nn.DataParallel | DistributedDataParallel):
        raise InputError(
            f"the model is wrapped in {type(model).__name__}, which divides batches or adds up"
            " gradients itself, and Step does both: pass model.module."
        )
    for name, part in model.named_modules():
        if isinstance(part, DistributedDataParallel):
            raise InputError(
                f"the module {name!r} of the model is wrapped in DistributedDataParallel, which divides"
                " the gradients of its part by the number of ranks, and Step adds them up: put"
                " its .module in its place, or pass the model as it was before that (before setup of"
                " Lightning's Fabric, say)."
            )
    if any(hasattr(p, "full_tensor") for p in model.parameters()):
        raise InputError(
            "the model is sharded (its parameters are DTensors), and Step keeps a whole model on each"
            " rank: pass the plain model, or train it by anybatch.train with parallel='shard'."
        )


@contextmanager
def _refused(wrappers: Sequence[nn.Module], model: nn.Module) -> Iterator[None]:
    """Context manager in which a pass through one of `wrappers` that would reduce gradients of `model`
    raises `InputError`."""

    def refuse(wrapper: Any, _: Any) -> None:
        if torch.is_grad_enabled() and wrapper.require_backward_grad_sync:
            raise InputError(
                "the loss calls a DistributedDataParallel around the model, which divides the gradients"
                " by the number of ranks, and Step adds them up: call the model that the loss is given."
            )

    own = set(model.parameters()) if wrappers else set()
    with ExitStack() as undo:
        for wrapper in wrappers:
            if not own.isdisjoint(wrapper.parameters()):
                undo.callback(wrapper.register_forward_pre_hook(refuse).remove)
        yield


def _check_updates(optimizer: Optimizer) -> None:
    """Raises `InputError` for an optimizer prepared by accelerate that would skip this update, or
    divide its gradients by a scale."""
    for part in parts_of(optimizer):
        state: Any = getattr(part, "gradient_state", None)
        if state is not None and not state.sync_gradients:
            raise InputError(
                "the optimizer is prepared by an Accelerator that accumulates gradients here, and would"
                " skip this update: leave out gradient_accumulation_steps, since each call of Step is"
                " an update."
            )
        if state is not None and getattr(part, "scaler", None) is not None:
            raise InputError(
                "the optimizer is prepared by an Accelerator that scales gradients: leave out its"
                " mixed_precision, and give precision='fp16' to Step."
            )


def check_cutting(
    count_samples: Callable[[Any], int] | None, slice_batch: Callable[[Any, int, int], Any] | None
) -> None:
    """Raises `InputError` if only one of the arguments is given, or one is not a function."""
    if (count_samples is None) != (slice_batch is None):
        raise InputError(
            "count_samples and slice_batch go together: give both, or neither for batches with the"
            " samples in dim 0."
        )
    for name, function in (("count_samples", count_samples), ("slice_batch", slice_batch)):
        if function is not None and not callable(function):
            raise InputError(f"{name} is {function!r}: give a function of a batch.")


def _check_of(model: nn.Module, optimizer: Optimizer) -> None:
    """Raises `InputError` if `optimizer` trains no parameter of `model`. It may train others too: those
    of the loss, or of another model."""
    trained = list(parameters_in(optimizer.param_groups))
    if len(_beside(model, optimizer)) == len(trained):
        raise InputError(
            f"none of the {len(trained)} parameters of the optimizer ({type(optimizer).__name__}) is"
            f" one of the model's ({type(model).__name__}), so no step would change the model: make the"
            " optimizer on model.parameters() of this very model, after whatever replaces its"
            " parameters."
        )


def _beside(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters that `optimizer` trains and that are not parameters of `model`."""
    own = set(model.parameters())
    return [param for param in parameters_in(optimizer.param_groups) if param not in own]


def _nothing() -> None:
    """Does nothing: the script sets the learning rate."""
