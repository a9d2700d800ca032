"""Evaluating: the held-out samples of a run's task, with the run's weights, after the run.

The passes are those of a session, under a plan of its own: see `planner.evaluating`. So that a session
needs no room for what training needs, its task has hardly anything to train: one parameter, the
smallest of those that the run trained, and an optimizer that remembers nothing. No step is ever done.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from anybatch.compute.building import copy_of
from anybatch.compute.determinism import one_thread
from anybatch.errors import InputError
from anybatch.estimate import Subject, few_collections, subject_of
from anybatch.events import Sink
from anybatch.launch import call, find
from anybatch.machine import Device, Machine
from anybatch.parallel import leads
from anybatch.planner import Layout, layouts_of, make_evaluation_plan
from anybatch.plans import Plan, Precision, parse_open_precision
from anybatch.report import EventLog, PastRun, follow, read_run
from anybatch.report.folder import EVENTS_FILE
from anybatch.report.sentences import format_scores
from anybatch.runs.planning import (
    are_several,
    by_rank_0,
    checked_ranks,
    default_ranks,
    devices_of,
)
from anybatch.runs.reload_run import check_has_weights, checked_step, task_of
from anybatch.runs.session import Session, joined
from anybatch.task import Task, parameters_in
from anybatch.units import format_bytes


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found.

    Attributes:
        run: the run folder.
        task: name of the task that was evaluated.
        step: of the weights.
        weights: the file that they are from, or the checkpoint.
        loss: mean over the held-out samples; NaN if nothing was weighed.
        metrics: by name.
        samples: how many there were, each counted once.
        seconds: that the evaluation took, without setting up.
        plan: that was followed: leaner than the one that was made, if memory ran out.
        predicted_peak_bytes: most that it was predicted to add to a device; None: not known, or of
            another plan than the one that was followed.
        measured_peak_bytes: most that it did add, on the rank that used most.
    """

    run: Path
    task: str
    step: int
    weights: Path
    loss: float
    metrics: Mapping[str, float]
    samples: int
    seconds: float
    plan: Plan
    predicted_peak_bytes: int | None
    measured_peak_bytes: int

    def __repr__(self) -> str:
        told = format_scores(self)
        name = " ".join(self.task.split())
        peak = format_bytes(self.measured_peak_bytes)
        return f"<Evaluation of {name}, step {self.step:,}: {told}, peak memory {peak}>"


def evaluate(
    run: str | os.PathLike[str],
    task: Task | str | None = None,
    *,
    settings: Mapping[str, str] | None = None,
    step: int | None = None,
    memory: str | int | None = None,
    ranks: int | None = None,
    micro_batch: int | None = None,
    precision: str | None = None,
    device: str | None = None,
    sinks: Sequence[Sink] = (),
) -> Evaluation:
    """Evaluate the held-out samples of a run's task with the weights of the run. Nothing in its folder
    is touched.

    What is not given is as in the run: then loss and metrics are, to the bit, those that it told of the
    same weights, on the same devices and software.

    Args:
        run: the folder that `train` wrote.
        task: a task, or its name (a recipe's, or `FILE.py[:function]`), in place of the one that the
            run was started by; it has to have the same model. Needed for a run whose task was made in
            Python.
        settings: arguments of the task's function (another data set, say), as they are written on the
            command line, beside and in place of those of the run.
        step: of a checkpoint; None: the weights of the run's end, or if it has not finished, of its
            newest intact checkpoint.
        memory: budget of each rank, enforced as in `train`; None: that of the run, where it was
            enforced.
        ranks: processes on this machine, unless this is one of several already; None: as in the run, if
            this machine has the devices.
        micro_batch: samples per pass; None: as in the run, or fewer if these do not fit.
        precision: as for `plan`, but not `"auto"`; None: that of the run.
        device: of this machine, `"cpu"`, `"cuda"` or `"cuda:N"`, for one rank; None: chosen.
        sinks: readers of the events: of the evaluation, and of memory that runs out in it.

    Raises:
        NoPlanFits: there is no room to evaluate a single sample.
        InputError: it is no run folder, or has no such weights; its task is not known, or has no
            held-out samples; the weights are of another model, or damaged; or an argument cannot be.
        LaunchError: the ranks could not be started, or one ended without a word.
    """
    checked_ranks(ranks, None)
    checked_step(step)
    wanted = _precision(precision)
    found = read_run(run)
    job = _Job(found, task, settings, step, memory, ranks, micro_batch, wanted, device)
    job.check()
    here = find()
    processes = _num_processes(found.plan, ranks, device)
    if here is None and processes > 1:
        return job.start(processes, sinks)
    if here is not None and here.world_size > 1 and device is not None:
        raise InputError(
            f"device is {device!r}, which is for one rank, but this process is one of {here.world_size}"
            " that were started already: leave device out."
        )
    if here is not None and ranks is not None and here.world_size != ranks:
        raise InputError(
            f"ranks is {ranks}, but this process is one of {here.world_size} that were started already:"
            " leave ranks out."
        )
    with joined():
        return job.run_here(sinks)


def held_still(task: Task) -> Task:
    """`task` with the same model, loss and held-out samples, and hardly anything to train: nothing is
    held of gradients, float32 copies or an optimizer's state. A module that the task was given stays as
    it is: it is copied."""
    return replace(
        task,
        model=partial(_frozen, task),
        optimizer=partial(torch.optim.SGD, lr=0.0),
        parameters=None,
        schedule=None,
        scheduler=None,
        epochs=None,
        samples=None,
        steps=1,
        last="wrap",
        tell=None,
    )


def _frozen(task: Task) -> nn.Module:
    model = task.model
    made = copy_of(model) if isinstance(model, nn.Module) else task.checked_model(model())
    trained = [p for p in parameters_in(task.parameters_of(made)) if p.requires_grad]
    smallest = min(trained, key=lambda param: param.numel())
    for param in made.parameters():
        param.requires_grad_(param is smallest)
    return made


@dataclass(frozen=True)
class _Job:
    """What `evaluate` was asked for, and how it goes: here, or in ranks that it is sent to."""

    run: PastRun
    task: Task | str | None
    settings: Mapping[str, str] | None
    step: int | None
    memory: str | int | None
    ranks: int | None
    micro_batch: int | None
    precision: Precision | None
    device: str | None

    def check(self) -> None:
        """Raises `InputError` for what can be seen before anything is started."""
        if self.device is not None:
            if self.ranks is not None and self.ranks > 1:
                raise InputError(
                    f"ranks is {self.ranks} and device {self.device!r}, which is for one: leave one of"
                    " them out."
                )
            _ = self._device_here()
        if self.step is None and not self.run.has_final_weights:
            check_has_weights(self.run)

    def start(self, ranks: int, sinks: Sequence[Sink]) -> Evaluation:
        """Start ranks that evaluate, and take over what they found."""
        self._loaded()  # or it is said here, once, what is wrong with it
        with tempfile.TemporaryDirectory(prefix="anybatch-") as folder:
            log = Path(folder) / EVENTS_FILE
            with follow(log, sinks):
                return call(self.run_for_another, log, ranks=ranks, restarts=0)[0]

    def run_for_another(self, log: Path) -> Evaluation:
        """On a rank that was started."""
        with joined(), contextlib.ExitStack() as stack:
            sinks = [stack.enter_context(EventLog(log))] if leads() else []
            return self.run_here(sinks)

    def run_here(self, sinks: Sequence[Sink]) -> Evaluation:
        """Evaluate on this rank, with the others."""
        run, task = self.run, self._loaded()
        still = held_still(task)
        plan = self._plan(still)
        from_file = self.step is None and run.has_final_weights
        folder = None if from_file else run.checkpoints
        with Session(still, plan, sinks, folder) as session:
            if from_file:
                session.take_weights(weights := run.weights, run.step, run.epoch)
            else:
                weights = session.take_checkpoint(self.step)
            event = session.evaluate()
            ended = session.ended(event.seconds, finished=True)
            followed = session.plan
        return Evaluation(
            run=run.folder,
            task=task.name,
            step=event.step,
            weights=weights,
            loss=event.loss,
            metrics=event.metrics,
            samples=event.samples,
            seconds=event.seconds,
            plan=followed,
            predicted_peak_bytes=ended.predicted_peak_bytes,
            measured_peak_bytes=ended.measured_peak_bytes,
        )

    def _loaded(self) -> Task:
        task = task_of(self.run, self.task, self.settings)
        if task.valid is None:
            raise InputError(
                f"the task {task.name!r} of the run {self.run.folder} has no held-out samples to"
                " evaluate on: give it valid=..., or name a task that has some with --task."
            )
        return task

    def _plan(self, task: Task) -> Plan:
        """The plan for `task`, which is held still; of several ranks that of rank 0."""
        several = are_several()
        before = self.run.plan
        budget = self._budget(before)
        if self.device is not None and not several:
            devices: Sequence[Device] = [self._device_here(budget)]
        else:
            devices = devices_of(None, budget, None, None)
        layout = _layout(before, devices)

        def make() -> Plan:
            with few_collections():
                subject = subject_of(task)
                self._check_model(subject)
                return make_evaluation_plan(
                    before,
                    subject,
                    min(devices, key=lambda device: device.budget_bytes),
                    layout,
                    precision=self.precision,
                    batch=self.micro_batch,
                    limited=budget is not None,
                    shapes_vary=task.lengths is not None or task.collate is not None,
                )

        # As the run will compute, so that what is predicted is what is run.
        alone = task.grains is not None and devices[0].kind == "cpu"
        with one_thread() if alone else contextlib.nullcontext():
            return by_rank_0(make) if several else make()

    def _check_model(self, subject: Subject) -> None:
        """Raises `InputError` if the model of the task is not that of the run."""
        found, wanted = subject.identity.parameters, self.run.plan.task.parameters
        if found != wanted:
            raise InputError(
                f"the task {subject.identity.name!r} is not the one of the run {self.run.folder}: its"
                f" model has {found:,} parameters, and that of {self.run.task!r}, which was trained,"
                f" {wanted:,}. Name the task that was trained (--task), with the settings (-s) of its"
                " model."
            )

    def _budget(self, before: Plan) -> str | int | None:
        """What was asked for; else that of the run, if it was held to it on such a device."""
        if self.memory is not None or not before.enforced:
            return self.memory
        here = Machine.here(device=self.device).device
        same = here.name == before.device_name
        fits = before.budget_bytes is not None and before.budget_bytes <= here.total_bytes
        return before.budget_bytes if same and fits else None

    def _device_here(self, budget: str | int | None = None) -> Device:
        name = self.device
        if name is not None and name.partition(":")[0] not in ("cpu", "cuda"):
            raise InputError(
                f"device is {name!r}: an evaluation is run, on a device of this machine: give cpu, cuda"
                " or cuda:N."
            )
        return Machine.here(budget, name).device


def _layout(before: Plan, devices: Sequence[Device]) -> Layout:
    """How the ranks on `devices` divide the samples: as the run did, if it had as many."""
    count = len(devices)
    if count == 1:
        return layouts_of(devices, "single")[0]
    kind = "replicate" if before.parallel == "single" else before.parallel
    layout = layouts_of(devices, kind, "fixed")[0]
    if count != before.num_ranks:
        return layout
    return replace(layout, shares=before.shares, sharding=before.sharding)


def _num_processes(before: Plan, ranks: int | None, device: str | None) -> int:
    """Processes to evaluate with on this machine, if this is none of several yet."""
    if ranks is not None or device is not None:
        return ranks or 1
    if before.parallel == "single":
        return 1
    return before.num_ranks if before.device == "cpu" else min(before.num_ranks, default_ranks())


def _precision(wanted: str | None) -> Precision | None:
    if wanted is None:
        return None
    found = parse_open_precision(wanted)
    if found is None:
        raise InputError(
            f"precision is {wanted!r}, and an evaluation is not timed beforehand: name one, such as"
            " fp32 or bf16, or leave it out for that of the run."
        )
    return found
