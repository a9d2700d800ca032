"""The log for TensorBoard, written by torch's `SummaryWriter`: events as curves and texts.

    DIR/               curves against steps; texts of the plan and of events; settings
    DIR/by_samples/    loss and metrics against samples seen, for runs of different global batches

The log is generated from events, so it can be written during the run, or years later from
`events.jsonl`. A resumed run rewrites the log from the earlier events and continues it; repeated steps
replace earlier ones.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Self, final

from anybatch.errors import InputError
from anybatch.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    Replanned,
    Resumed,
    RunStarted,
    StepDone,
)
from anybatch.plans import Plan
from anybatch.report.folder import TENSORBOARD
from anybatch.report.log import iterate
from anybatch.report.sentences import describe

Scalars = dict[str, float]
"""One value for each curve, by name. TensorBoard groups names by the part before the first `/`."""

_BY_SAMPLES = "by_samples"
_HPARAMS = "tensorboard.plugins.hparams.summary_v2"
_IN_A_TABLE = str.maketrans({"|": "\\|", "\n": " "})


def tensorboard_folder(
    wish: bool | str | Path | None, out: str | Path | None, resume: bool = False
) -> Path | None:
    """The folder for the requested log; None if no log is requested.

    Args:
        wish: a folder; True or `""`: a folder inside the run folder. None or False: no log.
        out: the run folder, if there is one.
        resume: whether an existing log is continued.

    Raises `InputError` if the log cannot be written: tensorboard cannot be imported, there is no
    folder, or the given folder holds the log of another run.
    """
    if wish is None or wish is False:
        return None
    _check_tensorboard()
    own = None if out is None else Path(out) / TENSORBOARD
    if wish is True or not str(wish):
        if own is None:
            raise InputError(
                "tensorboard is True and out is not given: name a folder for the log,"
                " tensorboard='runs/log', or one for the run, out."
            )
        return own
    if not isinstance(wish, str | Path):
        raise InputError(f"tensorboard is {wish!r}: give True, or a folder for the log.")
    folder = Path(wish)
    if folder != own and not resume and event_files(folder):
        raise InputError(
            f"{folder} holds a log for TensorBoard already ({event_files(folder)[0].name}): give each"
            f" run a folder of its own, such as {folder / 'second'}, or remove that file."
        )
    return folder


def write_tensorboard(events: Path, folder: Path) -> Path:
    """Write the log of a run to `folder`, from its `events` file. An existing log is replaced.

    Raises `InputError` if the events cannot be read, or the log cannot be written.
    """
    with TensorBoardLog(folder) as log:
        try:
            for event in iterate(events):
                log.write(event)
            log.flush()
        except OSError as error:
            raise InputError(
                f"{_unwritable(folder, error)} Make room there, or give another folder."
            ) from None
    return folder


def event_files(folder: Path) -> list[Path]:
    """The files of a log in `folder`, in the order in which TensorBoard reads them."""
    return sorted(folder.glob("events.out.tfevents.*"))


@final
class TensorBoardLog:
    """A sink that writes the log to `folder`. Use it as a context manager, or call `close`.

    If the log cannot be written, for example because the disk is full, training continues: a warning is
    issued, and the rest of the log is omitted.

    Args:
        folder: created at the first event; an existing log is deleted.
        resume: whether the log begins with the `earlier` events.
        earlier: the file with the events of the run before it is resumed.

    Raises `InputError` if tensorboard cannot be imported.
    """

    def __init__(self, folder: Path, resume: bool = False, earlier: Path | None = None) -> None:
        _check_tensorboard()
        self._folder = folder
        self._given_up = False
        self._earlier = earlier if resume else None
        self._writers: list[Any] = []  # of torch's `SummaryWriter`
        self._opening: RunStarted | None = None
        self._budget: int | None = None
        self._step, self._samples_seen, self._evaluated = 0, 0, 0

    def __call__(self, event: Event) -> None:
        if self._given_up:
            return
        try:
            self.write(event)
            self.flush()  # so that a killed process loses nothing, and a full disk is noticed
        except OSError as error:
            self._given_up = True
            warnings.warn(
                f"{_unwritable(self._folder, error)} Training goes on without it; `anybatch report RUN"
                " --tensorboard` writes it from the events of the run.",
                stacklevel=2,
            )

    def flush(self) -> None:
        """Flush the files. Raises `OSError` if written data cannot be stored."""
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        """Close the files. Closing twice is allowed."""
        for writer in self._writers:
            with contextlib.suppress(OSError):  # the disk is full, which has been reported
                writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def write(self, event: Event) -> None:
        """Write `event` without flushing. Raises `OSError` if it cannot be written."""
        if not self._writers:
            self._open()
        if isinstance(event, RunStarted):
            self._opening = event  # the next event says whether it is resumed
            return
        started, self._opening = self._opening, None
        if started is not None:
            self._start(started, event if isinstance(event, Resumed) else None)
        self._add(event)

    def _open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for folder in (self._folder, self._folder / _BY_SAMPLES):
            for file in event_files(folder):
                file.unlink()
            writer: Any = SummaryWriter(str(folder))
            self._writers.append(writer)
            with contextlib.suppress(AttributeError):  # `flush` raises the error of this thread
                thread: Any = writer.file_writer.event_writer._async_writer._worker
                thread._invoke_excepthook = lambda *_: None
        if self._earlier is not None and self._earlier.exists():
            for event in iterate(self._earlier):
                self.write(event)

    def _start(self, started: RunStarted, resumed: Resumed | None) -> None:
        """Write the records that open a run, at the step from which it continues."""
        by_step, by_samples = self._writers
        if resumed is not None:
            self._step, self._samples_seen = resumed.step, resumed.samples_seen
            self._evaluated = self._evaluated if self._evaluated <= resumed.step else 0
            # TensorBoard discards the later steps that it has read.
            record = import_module("tensorboard.compat.proto.event_pb2")
            log = record.SessionLog(status=record.SessionLog.START)
            for writer, last in ((by_step, resumed.step), (by_samples, resumed.samples_seen)):
                writer.file_writer.add_event(record.Event(session_log=log), last + 1, started.time)
        else:
            hparams = import_module(_HPARAMS).hparams_pb
            settings = hparams(settings_of(started), start_time_secs=started.time)
            by_step.file_writer.add_summary(settings, walltime=started.time)
        by_step.add_text("run", _as_text(started), self._step, started.time)
        self._follow(started.plan, started.time)

    def _follow(self, plan: Mapping[str, Any], time: float) -> None:
        self._budget = _budget(plan)
        self._writers[0].add_text("plan", _plan_as_text(plan), self._step, time)

    def _add(self, event: Event) -> None:
        by_step, by_samples = self._writers
        self._step = getattr(event, "step", self._step)  # the last events have no step
        if isinstance(event, Evaluated):
            if event.step == self._evaluated:  # a finished run that is resumed is evaluated again
                return
            self._evaluated = event.step
        if isinstance(event, StepDone):
            self._samples_seen = event.samples_seen
        _add_scalars(by_step, scalars_of(event, self._budget), self._step, event.time)
        if isinstance(event, StepDone | Evaluated):
            group = "by_samples/train" if isinstance(event, StepDone) else "by_samples/held_out"
            _add_scalars(by_samples, _scores(group, event), self._samples_seen, event.time)
        elif not isinstance(event, CheckpointSaved):
            by_step.add_text(f"events/{event.kind}", describe(event), self._step, event.time)
        if isinstance(event, Replanned):
            self._follow(event.plan, event.time)


# ------------------------------------------------------------------------------------------- curves


def scalars_of(event: Event, budget_bytes: int | None) -> Scalars:
    """The values of `event` for the curves against steps; empty if the event has none."""
    if isinstance(event, Evaluated):
        return {**_scores("held_out", event), "speed/evaluation_seconds": event.seconds}
    if isinstance(event, CheckpointSaved):
        return {
            "checkpoint/bytes": event.num_bytes,
            "checkpoint/seconds": event.seconds,
            "checkpoint/held_seconds": event.held_seconds,
        }
    return _of_step(event, budget_bytes) if isinstance(event, StepDone) else {}


def _scores(group: str, event: StepDone | Evaluated) -> Scalars:
    metrics = {f"{group}/{name}": value for name, value in event.metrics.items()}
    return {f"{group}/loss": event.loss, **metrics}


def _of_step(event: StepDone, budget_bytes: int | None) -> Scalars:
    values: dict[str, float | None] = {
        **_scores("train", event),
        "optimizer/learning_rate": event.learning_rate,
        "optimizer/grad_norm": event.grad_norm,
        "optimizer/loss_scale": event.loss_scale,
        "speed/samples_per_second": event.samples / event.seconds if event.seconds > 0 else None,
        "speed/step_seconds": event.seconds,
        "speed/data_seconds": event.data_seconds,
        "memory/peak_bytes": event.memory_bytes,
        "memory/part_of_budget": event.memory_bytes / budget_bytes if budget_bytes else None,
        "batch/micro_batch": event.micro_batch,
        "batch/samples": event.samples,
        "batch/samples_seen": event.samples_seen,
        "batch/epoch": event.epoch,
        "ranks/fastest_seconds": min(event.rank_seconds, default=None),
        "ranks/slowest_seconds": max(event.rank_seconds, default=None),
    }
    return {name: value for name, value in values.items() if value is not None}


# -------------------------------------------------------------------------------- texts and settings


def _check_tensorboard() -> None:
    """Import tensorboard in advance, so that its memory is not counted as memory of training. Raises
    `InputError` if it cannot be imported."""
    try:
        import_module(_HPARAMS)
        import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise InputError(
            f"a log for TensorBoard needs tensorboard, which cannot be imported ({error}): pip install"
            " 'anybatch[tensorboard]'. Of a run without such a log, `anybatch report RUN --tensorboard`"
            " writes it later."
        ) from None


def _add_scalars(writer: Any, values: Scalars, step: int, time: float) -> None:
    """Write all values in one record: calling `add_scalar` for each takes 2 ms more per step."""
    summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
    scalars = [summary.Value(tag=name, simple_value=value) for name, value in values.items()]
    if scalars:
        writer.file_writer.add_summary(summary(value=scalars), step, time)


def _unwritable(folder: Path, error: OSError) -> str:
    return f"The log {folder} cannot be written: {error.strerror or error}."


def _as_text(started: RunStarted) -> str:
    rows = {"command": started.command, "host": started.host, **started.versions}
    table = _table([(what, how) for what, how in rows.items() if how])
    return "\n\n".join([describe(started), table, *started.notices])


def _plan_as_text(plan: Mapping[str, Any]) -> str:
    try:
        return _table(Plan.from_json(json.dumps(plan)).explain())
    except InputError:  # a plan of another version of anybatch
        return json.dumps(plan)


def _table(rows: list[tuple[str, str]]) -> str:
    cells = [f"| {what} | {how.translate(_IN_A_TABLE)} |" for what, how in rows]
    return "\n".join(["| | |", "| --- | --- |", *cells])


def _budget(plan: Mapping[str, Any]) -> int | None:
    """The budget of `plan` if it is enforced, else None: it is then the memory that was free when the
    plan was made."""
    return plan.get("budget_bytes") if plan.get("enforced") else None


def settings_of(started: RunStarted) -> dict[str, bool | float | str]:
    """The settings that distinguish runs, as far as they are recorded in events."""
    plan = started.plan
    task, choice = plan.get("task", {}), plan.get("choice", {})
    settings = {
        "task": started.task,
        "device": started.device,
        "global_batch": task.get("global_batch"),
        "trainable_parameters": task.get("trainable_parameters"),
        "ranks": len(plan.get("shares", ())) or None,
        "parallel": plan.get("parallel"),
        "budget_bytes": _budget(plan),
        "micro_batch": choice.get("micro_batch"),
        "precision": choice.get("precision"),
    }
    return {name: value for name, value in settings.items() if value is not None}
