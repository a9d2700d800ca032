"""Planning, training and reporting in one call.

`train` detects how it was called: in a single process; as one of several ranks that were started
already, each of which calls it; or in the process that has to start the ranks. Rank 0 makes the plan,
reports to the user and writes files.
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
from anybatch.errors import AnybatchError, InputError, PeerLost, as_setting, setting
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
from anybatch.parallel import from_rank_0, leads
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
    Ending,
    EventLog,
    Progress,
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
    check_started,
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
    """Result of `train`.

    Attributes:
        model: trained module, in evaluation mode, on the device it was trained on; if the call started
            the ranks, on the device where the task builds it.
        plan: plan at the end.
        started, ended: first and last event; `ended` has the predicted and measured values.
        evaluation: last evaluation, or None without held-out data.
        folder: run folder, or None.
        noise: gradient noise measured in the steps of this call, see `insight`.
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
        """The gradient noise scale over the last quarter of the run, with which a batch size can be
        assessed; None if it was not measured, or over too few steps."""
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
        parts = [
            f"{how} after {counted(ended.steps, 'step')}",
            f"held-out {format_scores(self.evaluation)}" if self.evaluation else "",
            f"peak memory {format_bytes(ended.measured_peak_bytes)}",
            f"in {self.folder}" if self.folder else "",
        ]
        name = " ".join(self.plan.task.name.split())
        return f"<Result of {name}: {', '.join(filter(None, parts))}>"


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

    With `out`, a termination signal (SIGTERM, SIGINT) stops training after the current step, with
    everything saved; a second signal ends the process immediately.

    Args:
        task: task to train.
        memory: budget per rank, enforced by the allocator (CUDA) or the operating system (CPU, on
            Linux); None: plan for the free memory, without enforcing a budget.
        plan: plan to follow instead of making one.
        out: folder for the plan, events, checkpoints, weights and report; created if it does not exist.
            A finished run in the folder is replaced; an unfinished one with checkpoints is not, and
            raises `InputError` unless `resume` is set. None: nothing is written.
        ranks: number of processes to start on this machine. Leave it out if this process is one of
            several ranks already. None: as in the plan, or one per CUDA device.
        nodes, rendezvous: for several machines, their number, or the minimum and maximum number, and
            the address `HOST:PORT` of one of them, at which they meet. Each machine makes the same
            call, with the same secret in the environment variable `ANYBATCH_RENDEZVOUS_SECRET`.
        parallel: how the ranks share a step, see `plans.Parallel`; None: chosen automatically.
        precision, micro_batch, recompute, chunked_loss, exchange, sharding, balance: see `plan`.
        compile, rehearsal: see `plan`.
        norms: see `plan`; or `"as-written"`: BatchNorm normalizes over the whole global batch, as in a
            plain training loop with batches of that size. Equivalent to `ghost_batch=global_batch` in
            the task, and requires the memory for it, on one rank or divided over all ranks.
        resume: resume the run in `out` from its newest intact checkpoint, or start from the beginning
            if there is none. The number of ranks, the plan and the precision may differ.
        checkpoint_every: steps (`500`) or time (`"10min"`) between checkpoints; None: only when
            training has to stop, and at its end. The best evaluation is saved in any case.
        keep: number of most recent checkpoints to keep, in addition to the best evaluated one.
        restarts: maximum number of restarts of the ranks, from the newest checkpoint, after one of them
            was killed or lost. Only with `out`, and if this call starts the ranks.
        stall_seconds: seconds without progress after which a rank is considered stuck; see `Session`.
        tensorboard: folder for a TensorBoard log of this run alone; True: `tensorboard` in `out`; None:
            no log. A full disk ends the log, with a warning, but not the run.
        progress: whether to show the plan and the progress: as a bar in a notebook cell or if standard
            error is a terminal, else as lines on standard error.
        sinks: called with each event (`anybatch.events`) on the thread that trains, or on a separate
            thread if this call starts the ranks. A sink may raise `StopTraining`: training then ends
            early (within one step, if this call does not start the ranks) but regularly, with an
            evaluation, the weights and the report.

    Raises:
        Stopped: a signal has stopped training. Everything is saved, unless the message says that it
            could not be.
        NoPlanFits: no plan fits, or memory ran out under the leanest one.
        InputError: the task, its data, its loss or an argument cannot be used.
        LaunchError: the ranks could not be started, or one ended without reporting an error.

    If an error is raised after training has begun, the folder contains everything up to the error,
    including a report. If it is raised before, the folder is unchanged.
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
    wanted = num_processes(plan, ranks, parallel)
    if find() is None and (wanted > 1 or nodes not in (1, (1, 1))):
        with displayed(progress) as display:
            return job.start(wanted, nodes, rendezvous, [*sinks, *_and(display)])
    check_started(ranks)
    with joined(), displayed(progress and leads()) as display:
        return job.train(ranks, sinks, display)


@dataclass(frozen=True, slots=True)
class Keeping:
    """Options of `train` for checkpoints and restarts; see `train` for the attributes."""

    resume: bool
    checkpoint_every: int | str | None
    keep: int
    restarts: int
    stall_seconds: float | None = None

    def check(self, out: str | Path | None) -> None:
        """Raises `InputError` for invalid options."""
        self.every  # noqa: B018 - raises
        check_count(self.keep, "keep")
        check_count(self.restarts, "restarts", 0)
        checked_seconds(self.stall_seconds)
        if self.resume and out is None:
            raise InputError(
                f"{as_setting('resume', True)} is given without {setting('out')}: name the folder of"
                " the run to resume."
            )

    @property
    def every(self) -> Every:
        """Interval between checkpoints; see `saving`."""
        return Every.parse(self.checkpoint_every)

    @property
    def resumes(self) -> bool:
        """Whether to resume the existing run; also True in restarted ranks."""
        return self.resume or self.goes_on

    @property
    def goes_on(self) -> bool:
        """Whether these ranks were restarted."""
        member = find()
        return member is not None and member.attempt > 0


def choose_plan(
    task: Task, out: Path | None, resumes: bool, ranks: int | None, options: PlanOptions
) -> Plan:
    """Returns the plan to train under. A resumed run in `out` reuses its last plan if ranks, devices,
    budget and options are the same, since that plan contains what the run has learned.

    Raises what `plan` raises.
    """
    if out is not None and resumes:
        before = from_rank_0(lambda: last_plan(out))
        if before is not None and serves_again(before, task, ranks, options):
            return before
    return make_plan(task, ranks=ranks, **options.given())


def num_processes(plan: Plan | None, ranks: int | None, parallel: Parallel | None) -> int:
    """Returns the number of processes to start on this machine, if this process is not a rank yet."""
    if parallel == "single" or (plan and plan.parallel == "single"):
        return 1
    if ranks is not None:
        return ranks
    return plan.num_ranks if plan else default_ranks()


@dataclass(frozen=True)
class _Job:
    """Arguments of `train`, with methods that run it in this process or in ranks to be started."""

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
        """Start ranks that train, and return their result with the trained model."""
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
        assert made is not None  # the first rank of each machine returns it
        state, result = made
        model = self.task.build_model()
        if state:  # empty for a sharded model, except on the machine of rank 0
            model.load_state_dict(state)
        return replace(result, model=model.eval())

    def train_for_another(self, log: Path) -> tuple[dict[str, Tensor], Result] | None:
        """Train on a rank that `start` has started. The first rank of each machine returns the weights
        and the result for the caller, the others None."""
        member = find()
        with joined():
            with contextlib.ExitStack() as stack:
                sinks = [stack.enter_context(EventLog(log)), Ending(log)] if leads() else []
                result = self.train(None, sinks)
            state = whole_state(result.model)
        if member is not None and member.local_rank:
            return None
        return state, replace(result, model=nn.Identity())

    def train(
        self, ranks: int | None, sinks: Sequence[Sink], display: Progress | None = None
    ) -> Result:
        """Train on this rank."""
        out, resumes = self.out, self.keeping.resumes
        with contextlib.ExitStack() as stack:
            folder = None
            if out is not None and leads():
                folder = stack.enter_context(run_folder(out, resumes, self.keeping.goes_on))
            if self.tensorboard is not None and leads():
                stack.enter_context(output_folder(self.tensorboard, name="tensorboard"))
            plan = self.plan or choose_plan(self.task, out, resumes, ranks, self.options)
            if display is not None:
                display.show(plan)  # before the baseline: its memory is not training's
            return self._train_into(folder, plan, [*sinks, *_and(display)])

    def _train_into(self, folder: Path | None, plan: Plan, sinks: Sequence[Sink]) -> Result:
        """Train under `plan`. `folder` is the run folder, on the rank that writes to it."""
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
                    _report(folder, tells=False)  # the error that stopped the run is reported
                raise
            if folder is not None:
                _report(folder)
        _learn(plan, result)
        return result

    def _run(
        self, plan: Plan, readers: Sequence[Sink], begun: list[RunStarted], folder: Path | None
    ) -> Result:
        """Run the training loop. The first event is appended to `begun`."""
        task, out, keeping, noise = self.task, self.out, self.keeping, Series()
        checkpoints = None if out is None else out / CHECKPOINTS
        survival = keeping.keep, keeping.stall_seconds
        with Session(task, plan, readers, checkpoints, *survival) as session:
            if out is not None:
                check_can_be_written(session.model)
            # If the checkpoint cannot be resumed, the call fails before anything is written.
            resumes = keeping.resumes and session.keeps
            resumed = session.resumed() if resumes else None
            started = self._described(session.started())
            begun.append(started)
            clock = time.perf_counter()
            session.emit(started)
            if resumes:
                anew = Resumed(time=time.time(), step=0, samples_seen=0, folder=str(checkpoints))
                session.emit(resumed or anew)
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
                if out is not None:  # on all ranks: each may hold a shard of the weights
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
                sentence = f"{type(error).__name__}: {error}".strip(": ")
                reason = " ".join([sentence, *getattr(error, "__notes__", ())])
                raise
            finally:
                ended = session.ended(time.perf_counter() - clock, finished, reason)
                session.emit(ended)
            last, evaluation = session.plan, session.last_evaluation
        model = session.model.eval()
        return Result(model, last, started, ended, evaluation, folder, noise.blocks)

    def _described(self, started: RunStarted) -> RunStarted:
        """Returns `started`, with the command, host and task source of the run."""
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


def _command() -> str:
    """Returns the shell command that started this process, in its short form; empty in a notebook, in
    an interactive Python session, and for code from `-c` or standard input."""
    program = Path(sys.argv[0] if sys.argv else "")
    if hasattr(sys, "ps1") or str(program) in (".", "-", "-c"):
        return ""
    if program.name == "anybatch" or program == Path(__file__).parents[1] / "__main__.py":
        return shlex.join(["anybatch", *sys.argv[1:]])
    return shlex.join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]])


def _and(display: Progress | None) -> Sequence[Sink]:
    return () if display is None else (display,)


def _learn(plan: Plan, result: Result) -> None:
    """Store the measured step time of `plan`, to correct the predictions of later plans."""
    # Otherwise the measurement is for another choice, or includes a compiler.
    compiler = plan.kernels.compile or is_compiled(result.model)
    measured_before = plan.prediction is not None and plan.prediction.rehearsed
    is_followed = plan.choice == result.plan.choice and plan.is_predicted
    if is_followed and not compiler and not measured_before:
        ended = result.ended
        # The prediction does not include waiting for samples.
        seconds = None if ended.step_seconds is None else ended.step_seconds - ended.data_seconds
        remember(plan, seconds, ended.idle_seconds)


def _report(folder: Path, tells: bool = True) -> None:
    """Write the report of the run. Its data are saved, so if writing fails (such as for lack of memory
    or disk space), it can be written later; a warning says so if `tells`."""
    try:
        write(folder)
        return
    except MemoryError:
        why = "there was no memory to write the report."
    except InputError as error:
        why = str(error)
    except Exception as error:  # the run has ended and is saved
        why = f"the report could not be made ({type(error).__name__}: {error})."
    if tells:
        warnings.warn(f"{why} `anybatch report {folder}` writes it later.", stacklevel=2)


def _said(task: Task, model: nn.Module, plan: Plan, folder: Path | None) -> Said:
    """Returns the event with the text that the task's `tell` function returns for the trained model.
    The run has ended and is saved, so an error in `tell` only becomes the text of the event."""
    assert task.tell is not None
    try:
        if plan.parallel == "shard":
            model = _whole(task, folder)
        text = str(task.tell(model))
    except Exception as error:
        text = f"The task could not tell of the trained model: {type(error).__name__}: {error}"
    return Said(time=time.time(), text=text)


def _whole(task: Task, folder: Path | None) -> nn.Module:
    """Builds the trained model on this rank alone, if the run has sharded it."""
    if folder is None or isinstance(task.model, nn.Module):
        raise InputError(
            "it is divided over the ranks. Give out, and a function that builds the model."
        )
    model = task.build_model()
    load_weights(model, folder / WEIGHTS_FILE)
    return model.eval()
