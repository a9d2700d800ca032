"""The main job in one call: plan, train, report.

`train` finds out by itself where it runs: alone; as one of several ranks that somebody started, each of
which calls it; or as the one that is to start them. Rank 0 plans, speaks and writes.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from anybatch.engine import checked_seconds
from anybatch.errors import AnybatchError, InputError
from anybatch.estimate import remember
from anybatch.events import Evaluated, Event, RunEnded, RunStarted, Said, Sink
from anybatch.keeping import DEFAULT_EVERY, Every, kept
from anybatch.launch import call, find
from anybatch.parallel import exchange as tell
from anybatch.parallel import leads
from anybatch.planning import checked_ranks, default_ranks, serves_again
from anybatch.planning import plan as make_plan
from anybatch.plans import Balancing, Exchange, Parallel, Plan, Recompute
from anybatch.report import EventLog, RunFolder, follow, last_plan, output_folder, write
from anybatch.report.folder import ADAPTERS, CHECKPOINTS, EVENTS_FILE, WEIGHTS_FILE
from anybatch.session import Session, joined
from anybatch.state import (
    has_adapters,
    load_weights,
    save_adapters,
    save_weights,
    whole_state,
)
from anybatch.task import Task, check_task


@dataclass(frozen=True)
class Result:
    """What `train` returns.

    Attributes:
        model: the trained module, on the device it was trained on, in evaluation mode.
        plan: as it was at the end.
        started, ended: the first and last event; predicted and measured figures are in `ended`.
        evaluation: the last evaluation, or None without held-out data.
        folder: the run folder, or None.
    """

    model: nn.Module
    plan: Plan
    started: RunStarted
    ended: RunEnded
    evaluation: Evaluated | None
    folder: Path | None

    @property
    def loss(self) -> float:
        """Mean held-out loss at the end; NaN without held-out data."""
        return self.evaluation.loss if self.evaluation else float("nan")

    @property
    def metrics(self) -> Mapping[str, float]:
        """Held-out metrics at the end, by name."""
        return self.evaluation.metrics if self.evaluation else {}


def train(
    task: Task,
    memory: str | int | None = None,
    *,
    plan: Plan | None = None,
    out: str | Path | None = None,
    ranks: int | None = None,
    nodes: int | tuple[int, int] = 1,
    rendezvous: str | None = None,
    parallel: Parallel | None = None,
    precision: str = "fp32",
    micro_batch: int | None = None,
    recompute: str | Recompute | None = None,
    exchange: Exchange | None = None,
    balance: Balancing | None = None,
    compile: bool = False,
    trial: bool | None = None,
    resume: bool = False,
    checkpoint_every: int | str | None = DEFAULT_EVERY,
    keep: int = 3,
    restarts: int = 3,
    stall_seconds: float | None = None,
    sinks: Sequence[Sink] = (),
) -> Result:
    """Train `task` to its end and evaluate it.

    With `out`, a signal to end (SIGTERM, SIGINT) stops training after the step, with everything saved;
    a second one at once.

    Args:
        task: what to train.
        memory: budget of each rank, enforced by the allocator (CUDA) or the operating system (CPU,
            Linux); None: plan for what is free, enforce nothing.
        plan: run this plan instead of making one.
        out: folder for the plan, the events, checkpoints, the weights and the report; created if need
            be. A finished run in it is replaced; one that is not finished is left alone. None: nothing
            is written.
        ranks: how many, on this machine: as many processes are started, unless this is one of them
            already. None: as the plan says, or one for each CUDA device.
        nodes, rendezvous: on several machines, how many, or the least and the most that there may be,
            and the address `HOST:PORT` of one of them where they meet; each makes the same call.
        parallel: how the ranks share a step, see `plans.Parallel`; None: chosen.
        precision, micro_batch, recompute, exchange, balance, compile: see `plan`.
        trial: whether the plan, and choices that are predicted to be nearly as fast, are tried before
            the first step, see `Session`. None: unless `plan` is given.
        resume: go on with the run in `out`, from its newest intact checkpoint; at the beginning where
            there is none. On another number of ranks, under another plan or precision, if you like.
        checkpoint_every: steps (`500`), or time (`"10min"`), between checkpoints; None: only when
            training has to stop, and at its end. The best evaluation is saved, too.
        keep: so many checkpoints stay, the last ones, and the best evaluated one beside them.
        restarts: how often ranks are started again, from the newest checkpoint, after one of them was
            killed or lost. Only with `out`, and where this call starts the ranks.
        stall_seconds: without progress, after which a rank is stuck: see `Session`.
        sinks: readers of the events.

    Raises:
        Stopped: a signal has stopped training; everything is saved.
        NoPlanFits: no plan fits, or memory ran out under the leanest one.
        InputError: something in the task, its data, its loss or the arguments cannot be used.
        LaunchError: the ranks could not be started, or one ended without a word.

    Whatever is raised once training has begun, the folder then holds what happened until then, with
    its report; before that, it is as it was.
    """
    check_task(task)
    checked_ranks(ranks, parallel)
    keeping = Keeping(resume, checkpoint_every, keep, restarts, stall_seconds)
    keeping.check(out)
    tries = plan is None if trial is None else trial
    options = {
        "memory": memory,
        "parallel": parallel,
        "precision": None if precision == "fp32" else precision,
        "micro_batch": micro_batch,
        "recompute": recompute,
        "exchange": exchange,
        "balance": balance,
        "compile": compile or None,
    }
    given = [f"{name}={value!r}" for name, value in options.items() if value is not None]
    if plan is not None and given:
        raise InputError(
            f"plan and {' and '.join(given)} are both given, but the plan says all of it: leave one"
            " of them out, or change the plan."
        )
    here = find()
    wanted = num_processes(plan, ranks, parallel)
    least, most = (nodes, nodes) if isinstance(nodes, int) else nodes
    if here is None and (wanted > 1 or most > 1):
        job = _Job(task, plan, None if out is None else str(out), options, keeping, tries)
        return _started(job, wanted, nodes, rendezvous, sinks)
    size = here.world_size if here else 1
    alone = parallel == "in-process" or least < most
    if ranks is not None and not alone and size != ranks * least:
        raise InputError(
            f"ranks is {ranks}, but this process is one of {size} that were started already: leave"
            " ranks out."
        )
    with joined():
        return _train(task, plan, out, ranks, options, keeping, tries, sinks)


@dataclass(frozen=True, slots=True)
class Keeping:
    """What `train` was told of checkpoints and restarts; see there for the attributes."""

    resume: bool
    checkpoint_every: int | str | None
    keep: int
    restarts: int
    stall_seconds: float | None = None

    def check(self, out: str | Path | None) -> None:
        """Raises `InputError` for what cannot be."""
        self.every  # noqa: B018 - raises
        for name, value, least in (("keep", self.keep, 1), ("restarts", self.restarts, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{name} is {value!r}: give a whole number of at least {least}.")
        checked_seconds(self.stall_seconds)
        if self.resume and out is None:
            raise InputError("resume is given without out: name the folder of the run to resume.")

    @property
    def every(self) -> Every:
        """See `keeping`."""
        return Every.parse(self.checkpoint_every)

    @property
    def resumes(self) -> bool:
        """Whether to go on with what is there: also in ranks that were started again."""
        member = find()
        return self.resume or (member is not None and member.attempt > 0)


def choose_plan(
    task: Task, out: str | Path | None, resumes: bool, ranks: int | None, options: Mapping[str, Any]
) -> Plan:
    """The plan to train under. That which the run in `out` ended with, if it is resumed and planning
    would be for the same ranks, devices, budget and wishes: what its run has learned is in it.

    Raises what `plan` raises.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if out is not None and resumes:
        before = tell(last_plan(Path(out)) if leads() else None)[0]
        if before is not None and serves_again(before, task, ranks=ranks, **given):
            return before
    return make_plan(task, ranks=ranks, **given)


def num_processes(plan: Plan | None, ranks: int | None, parallel: Parallel | None) -> int:
    """Processes to run on this machine, if this is none of them yet."""
    if parallel in ("single", "in-process") or (plan and plan.parallel in ("single", "in-process")):
        return 1
    if ranks is not None:
        return ranks
    return plan.num_ranks if plan else default_ranks()


def _train(
    task: Task,
    plan: Plan | None,
    out: str | Path | None,
    ranks: int | None,
    options: Mapping[str, Any],
    keeping: Keeping,
    tries: bool,
    sinks: Sequence[Sink],
) -> Result:
    """Train on this rank."""
    with contextlib.ExitStack() as stack:
        folder = None
        if out is not None and leads():
            folder = stack.enter_context(output_folder(Path(out), resume=keeping.resumes))
        if plan is None:
            plan = choose_plan(task, out, keeping.resumes, ranks, options)
        return _train_into(folder, out, task, plan, keeping, tries, sinks)


def _train_into(
    folder: Path | None,
    out: str | Path | None,
    task: Task,
    chosen: Plan,
    keeping: Keeping,
    tries: bool,
    sinks: Sequence[Sink],
) -> Result:
    recorder = _Recorder()
    with contextlib.ExitStack() as stack:
        readers: list[Sink] = [*sinks]
        if folder is not None:
            readers.append(stack.enter_context(RunFolder(folder, chosen, keeping.resumes)))
        try:
            model, last = _run(task, chosen, recorder, readers, out, keeping, tries)
            if task.tell is not None and leads():
                said = _said(task, model.eval(), last, folder)
                for reader in readers:
                    reader(said)
        except BaseException:
            if folder is not None and recorder.started is not None:
                with contextlib.suppress(InputError):  # what stopped the run is told, not this
                    _report(folder)
            raise
        if folder is not None:
            _report(folder)
    result = recorder.result(model.eval(), last, folder)
    plans = (chosen, *(chosen.taking(rival) for rival in chosen.rivals))
    followed = next((plan for plan in plans if plan.choice == last.choice), None)
    # Else what was measured is not what was predicted.
    if followed is not None and not chosen.kernels.compile:
        remember(followed, result.ended.measured_peak_bytes, result.ended.step_seconds)
    return result


def _report(folder: Path) -> None:
    """Write the page about the run. All that it tells of is saved: without memory for it, it can be
    written later."""
    try:
        write(folder)
    except MemoryError:
        warnings.warn(
            f"there was no memory to write the report: `anybatch report {folder}` does it.",
            stacklevel=2,
        )


def _said(task: Task, model: nn.Module, plan: Plan, folder: Path | None) -> Said:
    """What the task tells of its model. The run is over and saved: what goes wrong here is told too,
    and changes nothing."""
    assert task.tell is not None
    try:
        if plan.parallel == "shard":
            model = _whole(task, folder)
        text = str(task.tell(model))
    except Exception as error:
        text = f"The task could not tell of the trained model: {type(error).__name__}: {error}"
    return Said(time=time.time(), text=text)


def _whole(task: Task, folder: Path | None) -> nn.Module:
    """The trained model on this rank alone, where ranks hold parts of it."""
    if folder is None or isinstance(task.model, nn.Module):
        raise InputError(
            "it is divided over the ranks. Give out, and a function that builds the model."
        )
    model = task.build_model()
    load_weights(model, folder / WEIGHTS_FILE)
    return model.eval()


@dataclass(frozen=True)
class _Job:
    """What `train` was asked for, on its way to the ranks."""

    task: Task
    plan: Plan | None
    out: str | None
    options: Mapping[str, Any]
    keeping: Keeping
    tries: bool

    def run(self, log: str) -> tuple[dict[str, Tensor], Result] | None:
        """On a rank: train, and give the first of each machine what the caller is to have."""
        with joined():
            first = _is_first_here()
            with contextlib.ExitStack() as stack:
                sinks = [stack.enter_context(EventLog(log))] if leads() else []
                result = _train(
                    self.task,
                    self.plan,
                    self.out,
                    None,
                    self.options,
                    self.keeping,
                    self.tries,
                    sinks,
                )
            state = whole_state(result.model)
        if not first:
            return None
        return state, replace(result, model=nn.Identity())


def _is_first_here() -> bool:
    member = find()
    return member is None or member.local_rank == 0


def _started(
    job: _Job,
    ranks: int,
    nodes: int | tuple[int, int],
    rendezvous: str | None,
    sinks: Sequence[Sink],
) -> Result:
    """Start ranks for `job`, and take over what they made."""
    with tempfile.TemporaryDirectory(prefix="anybatch-") as folder:
        log = Path(folder) / EVENTS_FILE
        with follow(log, sinks):
            made = call(
                job.run,
                str(log),
                ranks=ranks,
                nodes=nodes,
                rendezvous=rendezvous,
                restarts=0 if job.out is None else job.keeping.restarts,
            )[0]
    assert made is not None  # the first rank of each machine gives it
    state, result = made
    model = job.task.build_model()
    if state:  # nothing of a sharded model, but for the machine of rank 0
        model.load_state_dict(state)
    return replace(result, model=model.eval())


class _Recorder:
    """Keeps the events that the result is made of."""

    def __init__(self) -> None:
        self.started: RunStarted | None = None
        self.evaluation: Evaluated | None = None
        self.ended: RunEnded | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.started = event
        elif isinstance(event, Evaluated):
            self.evaluation = event
        elif isinstance(event, RunEnded):
            self.ended = event

    def result(self, model: nn.Module, plan: Plan, folder: Path | None) -> Result:
        """All of it."""
        assert self.started is not None
        assert self.ended is not None
        return Result(model, plan, self.started, self.ended, self.evaluation, folder)


def _run(
    task: Task,
    chosen: Plan,
    recorder: _Recorder,
    readers: Sequence[Sink],
    out: str | Path | None,
    keeping: Keeping,
    tries: bool,
) -> tuple[nn.Module, Plan]:
    begun = time.perf_counter()
    checkpoints = None if out is None else Path(out) / CHECKPOINTS
    survival = keeping.keep, keeping.stall_seconds
    with Session(task, chosen, readers, checkpoints, *survival, tries) as session:

        def tell(event: Event) -> None:
            recorder(event)
            session.emit(event)

        tell(session.started())
        reason = "stopped"
        finished = False
        try:
            with kept(session, keeping.every, keeping.resumes) as steps:
                for _ in steps:
                    pass
                if task.valid is not None:
                    done = session.last_evaluation if session.evaluated_now else None
                    recorder(done or session.evaluate())
            if out is not None:  # all ranks: each may hold a part of the weights
                save_weights(session.model, Path(out) / WEIGHTS_FILE)
                if has_adapters(session.model):
                    save_adapters(session.model, Path(out) / ADAPTERS)
            finished, reason = True, ""
        except AnybatchError as error:
            reason = str(error)
            raise
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}".strip(": ")
            raise
        finally:
            tell(session.ended(time.perf_counter() - begun, finished, reason))
        last_plan = session.plan
    return session.model, last_plan
