"""The main job in one call: plan, train, report.

`train` finds out by itself where it runs: alone; as one of several ranks that somebody started, each of
which calls it; or as the one that is to start them. Rank 0 plans, speaks and writes.
"""

from __future__ import annotations

import contextlib
import platform
import shlex
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from anybatch.compute.kernel_choices import is_compiled
from anybatch.compute.loss_reduction_check import tell_again
from anybatch.engine import checked_seconds
from anybatch.errors import AnybatchError, InputError, PeerLost
from anybatch.estimate import remember
from anybatch.events import (
    Evaluated,
    Resumed,
    RunEnded,
    RunStarted,
    Said,
    Sink,
)
from anybatch.insight.noise import NoiseScale, latest
from anybatch.insight.noise_series import Block, Series
from anybatch.launch import call, find
from anybatch.parallel import exchange as tell
from anybatch.parallel import leads
from anybatch.plans import (
    Balancing,
    Exchange,
    Norms,
    Parallel,
    Plan,
    Recompute,
    Sharding,
    parse_parallel,
)
from anybatch.report import (
    Display,
    Ending,
    EventLog,
    RunFolder,
    TensorBoardLog,
    displayed,
    follow,
    last_plan,
    output_folder,
    run_folder,
    tensorboard_folder,
    write,
)
from anybatch.report.folder import ADAPTERS, CHECKPOINTS, EVENTS_FILE, PRETRAINED, WEIGHTS_FILE
from anybatch.report.sentences import counted, format_scores
from anybatch.runs.planning import (
    PlanOptions,
    checked_ranks,
    default_ranks,
    serves_again,
    with_norms,
)
from anybatch.runs.planning import plan as make_plan
from anybatch.runs.saving import DEFAULT_EVERY, Every, kept
from anybatch.runs.session import Session, joined
from anybatch.state import (
    check_can_be_written,
    has_adapters,
    is_pretrained,
    keep_pretrained,
    load_weights,
    save_adapters,
    save_weights,
    whole_state,
)
from anybatch.task import Task, check_task
from anybatch.units import check_count, format_bytes


@dataclass(frozen=True)
class Result:
    """What `train` returns.

    Attributes:
        model: the trained module, on the device it was trained on, in evaluation mode.
        plan: as it was at the end.
        started, ended: the first and last event; predicted and measured figures are in `ended`.
        evaluation: the last evaluation, or None without held-out data.
        folder: the run folder, or None.
        noise: what the steps of this call tell of the noise in their gradients, see `insight`.
    """

    model: nn.Module
    plan: Plan
    started: RunStarted
    ended: RunEnded
    evaluation: Evaluated | None
    folder: Path | None
    noise: Sequence[Block] = ()

    @property
    def noise_scale(self) -> NoiseScale | None:
        """The gradient noise scale over the last quarter of the run, by which a batch is judged; None
        if it was not measured, or not long enough."""
        return latest(self.noise)

    @property
    def loss(self) -> float:
        """Mean held-out loss at the end; NaN without held-out data."""
        return self.evaluation.loss if self.evaluation else float("nan")

    @property
    def metrics(self) -> Mapping[str, float]:
        """Held-out metrics at the end, by name."""
        return self.evaluation.metrics if self.evaluation else {}

    def __repr__(self) -> str:
        ended = self.ended
        how = "finished" if ended.finished else "stopped early"
        told = [
            f"{how} after {counted(ended.steps, 'step')}",
            f"held-out {format_scores(self.evaluation)}" if self.evaluation else "",
            f"peak memory {format_bytes(ended.measured_peak_bytes)}",
            f"in {self.folder}" if self.folder else "",
        ]
        name = " ".join(self.plan.task.name.split())
        return f"<Result of {name}: {', '.join(filter(None, told))}>"


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
    chunked_loss: bool | None = None,
    exchange: Exchange | None = None,
    norms: Norms | Literal["as-written"] | None = None,
    sharding: Sharding | None = None,
    balance: Balancing | None = None,
    compile: bool = False,
    rehearsal: bool | None = None,
    resume: bool = False,
    checkpoint_every: int | str | None = DEFAULT_EVERY,
    keep: int = 3,
    restarts: int = 3,
    stall_seconds: float | None = None,
    tensorboard: bool | str | Path | None = None,
    progress: bool = True,
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
            and the address `HOST:PORT` of one of them where they meet; each makes the same call, with
            the same secret in the environment variable `ANYBATCH_RENDEZVOUS_SECRET`.
        parallel: how the ranks share a step, see `plans.Parallel`; None: chosen.
        precision, micro_batch, recompute, chunked_loss, exchange, sharding, balance: see `plan`.
        compile, rehearsal: see `plan`.
        norms: see `plan`; or `"as-written"`: BatchNorm normalises over the whole global batch, as it
            does in a plain loop with such batches. It is the same as `ghost_batch=global_batch` in the
            task, and needs the memory for it, on one rank or divided over all.
        resume: go on with the run in `out`, from its newest intact checkpoint; at the beginning where
            there is none. On another number of ranks, under another plan or precision, if you like.
        checkpoint_every: steps (`500`), or time (`"10min"`), between checkpoints; None: only when
            training has to stop, and at its end. The best evaluation is saved, too.
        keep: so many checkpoints stay, the last ones, and the best evaluated one beside them.
        restarts: how often ranks are started again, from the newest checkpoint, after one of them was
            killed or lost. Only with `out`, and where this call starts the ranks.
        stall_seconds: without progress, after which a rank is stuck: see `Session`.
        tensorboard: folder for a log that TensorBoard reads, of this run alone; True: `tensorboard` in
            `out`. None: there is none. A full disk ends the log, with a warning, and not the run.
        progress: whether to show the plan and how far training is: a bar in a notebook's cell, or where
            standard error is a terminal; else lines on standard error.
        sinks: readers of the events (`anybatch.events`), called with each on the thread that trains; on
            one of their own where this call starts the ranks. One may raise `StopTraining`: soon after
            (within a step, where no ranks are started here) training ends as if it had been planned to,
            with an evaluation, the weights and the report.

    Raises:
        Stopped: a signal has stopped training; everything is saved, or the message says that it could
            not be.
        NoPlanFits: no plan fits, or memory ran out under the leanest one.
        InputError: something in the task, its data, its loss or the arguments cannot be used.
        LaunchError: the ranks could not be started, or one ended without a word.

    Whatever is raised once training has begun, the folder then holds what happened until then, with
    its report; before that, it is as it was.
    """
    check_task(task)
    task, where = with_norms(task, norms)
    tell_again()
    parse_parallel(parallel)
    checked_ranks(ranks, parallel)
    keeping = Keeping(resume, checkpoint_every, keep, restarts, stall_seconds)
    keeping.check(out)
    log = tensorboard_folder(tensorboard, out, keeping.resumes)
    options = PlanOptions(
        memory=memory,
        parallel=parallel,
        precision=precision,
        micro_batch=micro_batch,
        recompute=recompute,
        chunked_loss=chunked_loss,
        exchange=exchange,
        norms=where,
        sharding=sharding,
        balance=balance,
        compile=compile,
        rehearsal=rehearsal,
    )
    given = [f"{name}={value!r}" for name, value in options.given().items()]
    if plan is not None and given:
        raise InputError(
            f"plan and {' and '.join(given)} are both given, but the plan says all of it: leave one"
            " of them out, or change the plan."
        )
    folder = None if out is None else Path(out)
    job = _Job(task, plan, folder, log, options, keeping, _command())
    here = find()
    wanted = num_processes(plan, ranks, parallel)
    least, most = (nodes, nodes) if isinstance(nodes, int) else nodes
    if here is None and (wanted > 1 or most > 1):
        with displayed(progress) as display:
            return job.start(wanted, nodes, rendezvous, [*sinks, *_and(display)])
    size = here.world_size if here else 1
    if ranks is not None and least == most and size != ranks * least:
        raise InputError(
            f"ranks is {ranks}, but this process is one of {size} that were started already: leave"
            " ranks out."
        )
    with joined(), displayed(progress and leads()) as display:
        return job.train(ranks, sinks, display)


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
        check_count(self.keep, "keep")
        check_count(self.restarts, "restarts", 0)
        checked_seconds(self.stall_seconds)
        if self.resume and out is None:
            raise InputError("resume is given without out: name the folder of the run to resume.")

    @property
    def every(self) -> Every:
        """See `saving`."""
        return Every.parse(self.checkpoint_every)

    @property
    def resumes(self) -> bool:
        """Whether to go on with what is there: also in ranks that were started again."""
        return self.resume or self.goes_on

    @property
    def goes_on(self) -> bool:
        """Whether these ranks were started again."""
        member = find()
        return member is not None and member.attempt > 0


def choose_plan(
    task: Task, out: Path | None, resumes: bool, ranks: int | None, options: PlanOptions
) -> Plan:
    """The plan to train under. That which the run in `out` ended with, if it is resumed and planning
    would be for the same ranks, devices, budget and wishes: what its run has learned is in it.

    Raises what `plan` raises.
    """
    if out is not None and resumes:
        before = tell(last_plan(out) if leads() else None)[0]
        if before is not None and serves_again(before, task, ranks, options):
            return before
    return make_plan(task, ranks=ranks, **options.given())


def num_processes(plan: Plan | None, ranks: int | None, parallel: Parallel | None) -> int:
    """Processes to run on this machine, if this is none of them yet."""
    if parallel == "single" or (plan and plan.parallel == "single"):
        return 1
    if ranks is not None:
        return ranks
    return plan.num_ranks if plan else default_ranks()


@dataclass(frozen=True)
class _Job:
    """What `train` was asked for, and how it goes: here, or in ranks that it is sent to."""

    task: Task
    plan: Plan | None
    out: Path | None
    tensorboard: Path | None
    options: PlanOptions
    keeping: Keeping
    command: str

    def start(
        self,
        ranks: int,
        nodes: int | tuple[int, int],
        rendezvous: str | None,
        sinks: Sequence[Sink],
    ) -> Result:
        """Start ranks that train, and take over what they made."""
        with tempfile.TemporaryDirectory(prefix="anybatch-") as folder:
            log = Path(folder) / EVENTS_FILE
            with follow(log, sinks):
                made = call(
                    self.train_for_another,
                    log,
                    ranks=ranks,
                    nodes=nodes,
                    rendezvous=rendezvous,
                    restarts=0 if self.out is None else self.keeping.restarts,
                )[0]
        assert made is not None  # the first rank of each machine gives it
        state, result = made
        model = self.task.build_model()
        if state:  # nothing of a sharded model, but for the machine of rank 0
            model.load_state_dict(state)
        return replace(result, model=model.eval())

    def train_for_another(self, log: Path) -> tuple[dict[str, Tensor], Result] | None:
        """On a rank that was started: train, and give the first of each machine what the caller is to
        have."""
        with joined():
            first = _is_first_here()
            with contextlib.ExitStack() as stack:
                sinks = [stack.enter_context(EventLog(log)), Ending(log)] if leads() else []
                result = self.train(None, sinks)
            state = whole_state(result.model)
        if not first:
            return None
        return state, replace(result, model=nn.Identity())

    def train(
        self, ranks: int | None, sinks: Sequence[Sink], display: Display | None = None
    ) -> Result:
        """Train on this rank."""
        out, resumes = self.out, self.keeping.resumes
        with contextlib.ExitStack() as stack:
            folder = None
            if out is not None and leads():
                folder = stack.enter_context(run_folder(out, resumes, self.keeping.goes_on))
            if self.tensorboard is not None and leads():
                stack.enter_context(output_folder(self.tensorboard, option="--tensorboard"))
            plan = self.plan or choose_plan(self.task, out, resumes, ranks, self.options)
            if display is not None:
                display.show(plan)  # now: what it takes of memory is not training's
            return self._train_into(folder, plan, [*sinks, *_and(display)])

    def _train_into(self, folder: Path | None, plan: Plan, sinks: Sequence[Sink]) -> Result:
        """Train under `plan`; `folder` is where this rank writes, if it does."""
        task, log, resumes = self.task, self.tensorboard, self.keeping.resumes
        with contextlib.ExitStack() as stack:
            readers: list[Sink] = [*sinks]
            if folder is not None:
                readers.append(stack.enter_context(RunFolder(folder, plan, resumes)))
            if log is not None and leads():
                events = None if folder is None else folder / EVENTS_FILE
                readers.append(stack.enter_context(TensorBoardLog(log, resumes, events)))
            begun: list[RunStarted] = []
            try:
                result = self._run(plan, readers, begun, folder)
                if task.tell is not None and leads():
                    said = _said(task, result.model, result.plan, folder)
                    for reader in readers:
                        reader(said)
            except BaseException:
                if folder is not None and begun:
                    _report(folder, tells=False)  # what stopped the run is told
                raise
            if folder is not None:
                _report(folder)
        _learn(plan, result)
        return result

    def _run(
        self, plan: Plan, readers: Sequence[Sink], begun: list[RunStarted], folder: Path | None
    ) -> Result:
        """The run itself, which puts its first event into `begun`."""
        clock = time.perf_counter()
        task, out, keeping, noise = self.task, self.out, self.keeping, Series()
        checkpoints = None if out is None else out / CHECKPOINTS
        survival = keeping.keep, keeping.stall_seconds
        with Session(task, plan, readers, checkpoints, *survival) as session:
            if out is not None:
                check_can_be_written(session.model)
            # A checkpoint that cannot be gone on from ends the call before anything is written.
            resumes = keeping.resumes and session.keeps
            resumed = session.resumed() if resumes else None
            started = self._told_of(session.started())
            begun.append(started)
            session.emit(started)
            if resumes:
                session.emit(resumed or _begun_anew(checkpoints))
            if out is not None and leads() and is_pretrained(session.model):
                keep_pretrained(session.model, out / PRETRAINED)
            reason = "stopped"
            finished = False
            try:
                with kept(session, keeping.every, out) as steps:
                    for done in steps:
                        noise(done)
                    if task.valid is not None and not session.evaluated_now:
                        session.evaluate()
                if out is not None:  # all ranks: each may hold a part of the weights
                    with session.to_be_evaluated():
                        save_weights(session.model, out / WEIGHTS_FILE)
                        if has_adapters(session.model):
                            save_adapters(session.model, out / ADAPTERS)
                finished, reason = True, ""
            except AnybatchError as error:
                reason = str(error)
                if isinstance(error, PeerLost) and error.backend:
                    reason += f" The network's library: {error.backend}"
                raise
            except BaseException as error:
                told = f"{type(error).__name__}: {error}".strip(": ")
                reason = " ".join([told, *getattr(error, "__notes__", ())])
                raise
            finally:
                ended = session.ended(time.perf_counter() - clock, finished, reason)
                session.emit(ended)
            last, evaluation = session.plan, session.last_evaluation
        model = session.model.eval()
        return Result(model, last, started, ended, evaluation, folder, noise.blocks)

    def _told_of(self, started: RunStarted) -> RunStarted:
        """`started`, with how and where the run was begun."""
        versions = {**started.versions, "Python": platform.python_version()}
        origin = self.task.origin
        return replace(
            started,
            versions=versions,
            command=self.command,
            host=socket.gethostname(),
            source=origin.name if origin else "",
            settings=origin.settings if origin else {},
            source_sha256=origin.sha256 if origin else "",
        )


def _begun_anew(checkpoints: Path | None) -> Resumed:
    """What tells that a run was to be resumed, and begins at its start."""
    return Resumed(time=time.time(), step=0, samples_seen=0, folder=str(checkpoints))


def _command() -> str:
    """The line of a shell by which this process was started, as short as it may be written; empty where
    there was none to speak of: a notebook, a prompt of Python, code on standard input."""
    program = Path(sys.argv[0] if sys.argv else "")
    if hasattr(sys, "ps1") or str(program) in (".", "-", "-c"):
        return ""
    if program.name == "anybatch" or program == Path(__file__).parents[1] / "__main__.py":
        return shlex.join(["anybatch", *sys.argv[1:]])
    return shlex.join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]])


def _and(display: Display | None) -> Sequence[Sink]:
    return () if display is None else (display,)


def _is_first_here() -> bool:
    member = find()
    return member is None or member.local_rank == 0


def _learn(plan: Plan, result: Result) -> None:
    """Remember for the next plans how what was measured differs from what `plan` predicted."""
    # Else what was measured is of another choice, or of a compiler too.
    compiler = plan.kernels.compile or is_compiled(result.model)
    measured_before = plan.prediction is not None and plan.prediction.rehearsed
    is_followed = plan.choice == result.plan.choice and plan.is_predicted
    if is_followed and not compiler and not measured_before:
        ended = result.ended
        # How long samples are waited for is not predicted.
        seconds = None if ended.step_seconds is None else ended.step_seconds - ended.data_seconds
        remember(plan, seconds, ended.idle_seconds)


def _report(folder: Path, tells: bool = True) -> None:
    """Write the page about the run. All that it tells of is saved: without room for it, in memory or on
    the disk, it can be written later, which a warning `tells`."""
    try:
        write(folder)
        return
    except MemoryError:
        why = "there was no memory to write the report."
    except InputError as error:
        why = str(error)
    except Exception as error:  # the run is done, and saved
        why = f"the report could not be made ({type(error).__name__}: {error})."
    if tells:
        warnings.warn(f"{why} `anybatch report {folder}` writes it later.", stacklevel=2)


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
