"""Evaluation of a finished or unfinished run: the held-out samples of its task, with its weights.

A session runs the passes under a separate plan, see `planner.evaluating`. To leave out the memory that
training needs, the session's task trains a single parameter, the smallest one that the run trained,
with an optimizer without state. No training step is run.
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
from anybatch.errors import InputError, as_setting, setting, worded
from anybatch.estimate import Subject, few_collections, subject_of
from anybatch.events import Sink
from anybatch.launch import call, find
from anybatch.machine import Device, Machine
from anybatch.parallel import from_rank_0, leads
from anybatch.planner import Layout, layouts_of, make_evaluation_plan
from anybatch.plans import Plan, Precision, parse_open_precision
from anybatch.report import EventLog, PastRun, follow, read_run
from anybatch.report.folder import EVENTS_FILE
from anybatch.report.sentences import format_scores
from anybatch.runs.planning import (
    are_several,
    check_started,
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
    """Result of `evaluate`.

    Attributes:
        run: run folder.
        task: name of the evaluated task.
        step: step at which the weights were saved.
        weights: file or checkpoint that the weights were read from.
        loss: mean over the held-out samples; NaN if their total weight is zero.
        metrics: metrics by name.
        samples: number of samples, each counted once.
        seconds: duration of the evaluation, without set-up.
        plan: plan at the end. It is leaner than the initial plan if memory ran out.
        predicted_peak_bytes: predicted peak memory on a device, relative to the baseline; None if it
            is not known, or if the plan was replaced by a leaner one.
        measured_peak_bytes: measured peak memory, on the rank that used the most.
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
        text = format_scores(self)
        name = " ".join(self.task.split())
        peak = format_bytes(self.measured_peak_bytes)
        return f"<Evaluation of {name}, step {self.step:,}: {text}, peak memory {peak}>"


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
    """Evaluate the weights of a run on the held-out samples of its task. The run folder is not
    modified.

    Arguments default to those of the run. With the defaults, and on the same devices and software, loss
    and metrics are bitwise equal to those that the run reported for the same weights.

    Args:
        run: folder written by `train`.
        task: task, or its name (a recipe, or `FILE.py[:function]`), to use instead of the run's task.
            It must have the same model. Required if the task of the run was created in Python.
        settings: arguments of the task's function (such as another data set), written as on the command
            line. They are added to those of the run and override them.
        step: step of the checkpoint to evaluate; None: the final weights, or those of the newest intact
            checkpoint if the run has not finished.
        memory: budget per rank, enforced as in `train`; None: the budget of the run, if it was
            enforced.
        ranks: number of processes on this machine. Leave it out if this process is one of several
            ranks already. None: as in the run, if this machine has enough devices.
        micro_batch: samples per pass; None: as in the run, or fewer if these do not fit.
        precision: see `plan`, except `"auto"`; None: the precision of the run.
        device: device of this machine, `"cpu"`, `"cuda"` or `"cuda:N"`, for one rank; None: chosen
            automatically.
        sinks: called with the events of the evaluation, including those of out-of-memory recovery.

    Raises:
        NoPlanFits: there is no room to evaluate a single sample.
        InputError: `run` is not a run folder or does not have these weights; the task is not known or
            has no held-out samples; the weights belong to another model or are damaged; or an argument
            is invalid.
        LaunchError: the ranks could not be started, or one ended without reporting an error.
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
            f"{setting('device')} is {device!r}, which is for one rank, but this process is one of"
            f" {here.world_size} that were started already: leave {setting('device')} out."
        )
    check_started(ranks)
    with joined():
        return job.run_here(sinks)


def held_still(task: Task) -> Task:
    """Returns `task` with the same model, loss and held-out samples, and almost nothing to train, so
    that no memory is needed for gradients, float32 copies or optimizer state. If the task was given a
    module, the module is copied and not modified."""
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
    """Arguments of `evaluate`, with methods that run it in this process or in ranks to be started."""

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
        """Raises `InputError` for errors that can be detected before anything is started."""
        if self.device is not None:
            if self.ranks is not None and self.ranks > 1:
                raise InputError(
                    f"{setting('ranks')} is {self.ranks} and {setting('device')} {self.device!r},"
                    " which is for one: leave one of them out."
                )
            _ = self._device_here()
        if self.step is None and not self.run.has_final_weights:
            check_has_weights(self.run)

    def start(self, ranks: int, sinks: Sequence[Sink]) -> Evaluation:
        """Start ranks that evaluate, and return their result."""
        self._loaded()  # raises an error in the task here, once, instead of in every rank
        with tempfile.TemporaryDirectory(prefix="anybatch-") as folder:
            log = Path(folder) / EVENTS_FILE
            with follow(log, sinks):
                return call(self.run_for_another, log, ranks=ranks, restarts=0)[0]

    def run_for_another(self, log: Path) -> Evaluation:
        """Evaluate on a rank that `start` has started."""
        with joined(), contextlib.ExitStack() as stack:
            sinks = [stack.enter_context(EventLog(log))] if leads() else []
            return self.run_here(sinks)

    def run_here(self, sinks: Sequence[Sink]) -> Evaluation:
        """Evaluate on this rank, together with the other ranks."""
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
                f" evaluate on: give it valid=..., or name a task that has some with"
                f" {as_setting('task')}."
            )
        return task

    def _plan(self, task: Task) -> Plan:
        """Returns the plan for `task`, a result of `held_still`. With several ranks, rank 0 makes it
        for all."""
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

        # With the same number of threads as in the run, so that the prediction matches it.
        alone = task.grains is not None and devices[0].kind == "cpu"
        with one_thread() if alone else contextlib.nullcontext():
            return from_rank_0(make) if several else make()

    def _check_model(self, subject: Subject) -> None:
        """Raises `InputError` if the task's model differs from that of the run in its number of
        parameters."""
        found, wanted = subject.identity.parameters, self.run.plan.task.parameters
        if found != wanted:
            raise InputError(
                f"the task {subject.identity.name!r} is not the one of the run {self.run.folder}: its"
                f" model has {found:,} parameters, and that of {self.run.task!r}, which was trained,"
                f" {wanted:,}. Name the task that was trained ({as_setting('task')}), with the settings"
                f" ({worded('settings=', '-s')}) of its model."
            )

    def _budget(self, before: Plan) -> str | int | None:
        """Returns the requested budget; else that of the run, if it was enforced on a device of the
        same name and is not larger than this device's memory."""
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
                f"{setting('device')} is {name!r}: an evaluation is run, on a device of this machine:"
                " give cpu, cuda or cuda:N."
            )
        return Machine.here(budget, name).device


def _layout(before: Plan, devices: Sequence[Device]) -> Layout:
    """Returns how the ranks on `devices` divide the samples: as in the run, if it had as many ranks."""
    count = len(devices)
    if count == 1:
        return layouts_of(devices, "single")[0]
    kind = "replicate" if before.parallel == "single" else before.parallel
    layout = layouts_of(devices, kind, "fixed")[0]
    if count != before.num_ranks:
        return layout
    return replace(layout, shares=before.shares, sharding=before.sharding)


def _num_processes(before: Plan, ranks: int | None, device: str | None) -> int:
    """Returns the number of processes to start on this machine, if this process is not a rank yet."""
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
            f"{setting('precision')} is {wanted!r}, and an evaluation is not timed beforehand: name"
            " one, such as fp32 or bf16, or leave it out for that of the run."
        )
    return found
