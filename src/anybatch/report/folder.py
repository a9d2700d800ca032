"""The run folder: what a run leaves behind, and the care with which it is written.

plan.json           how it was run
events.jsonl        what happened
checkpoints/        what it can be resumed from
model.safetensors   the weights
adapters/           those of peft alone, if the model has any, as peft reads them
pretrained/         of a model of transformers all but the weights, as from_pretrained reads it
report.html         all of it for people
tensorboard/        curves and texts for TensorBoard, if asked for
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from anybatch.errors import InputError
from anybatch.events import (
    CompileDecided,
    Evaluated,
    Event,
    Replanned,
    RunEnded,
    RunStarted,
    StepDone,
    Tried,
)
from anybatch.plans import Plan
from anybatch.process.locks import kept_by_one
from anybatch.report.log import EventLog, iterate

PLAN_FILE, EVENTS_FILE = "plan.json", "events.jsonl"
WEIGHTS_FILE, REPORT_FILE = "model.safetensors", "report.html"
CHECKPOINTS, ADAPTERS = "checkpoints", "adapters"
PRETRAINED, TENSORBOARD = "pretrained", "tensorboard"

_IN_USE = ".in-use"
"""Held by rank 0 of the run that writes there."""


_NAME_LENGTH = 60
"""Characters of a task's name that a folder's name has at most: file systems have 255 bytes."""


class RunFolder:
    """A sink that keeps plan and events in a folder, from the event that opens the run: a run that
    cannot begin leaves the folder, with the run that may be in it, as it is. Events that find no room
    later, on a full disk say, are left out, and a warning tells so: training goes on.

    Args:
        folder: of the run.
        plan: of the run.
        resume: the run that is there goes on; else its files are deleted.
    """

    def __init__(self, folder: Path, plan: Plan, resume: bool = False) -> None:
        self._folder = folder
        self._plan = plan
        self._resume = resume
        self._log: EventLog | None = None
        self._leaves_out = False

    def __call__(self, event: Event) -> None:
        if self._log is None:
            if not self._resume:
                for name in (EVENTS_FILE, WEIGHTS_FILE, REPORT_FILE):
                    (self._folder / name).unlink(missing_ok=True)
                for name in (CHECKPOINTS, ADAPTERS, PRETRAINED, TENSORBOARD):
                    shutil.rmtree(self._folder / name, ignore_errors=True)
            self._plan.save(self._folder / PLAN_FILE)
            self._log = EventLog(self._folder / EVENTS_FILE)
            self._log(event)
            return
        try:
            self._log(event)
            self._leaves_out = False
        except InputError as error:
            if not self._leaves_out:
                warnings.warn(
                    f"{error} Training goes on, and so does the log as soon as there is room: what"
                    " happens until then is not in it.",
                    stacklevel=2,
                )
            self._leaves_out = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._log is not None:
            self._log.close()


def run_files(folder: Path) -> dict[str, Path]:
    """The files of a run folder that are there, by what they hold."""
    names = {
        "plan": PLAN_FILE,
        "events": EVENTS_FILE,
        "weights": WEIGHTS_FILE,
        "report": REPORT_FILE,
        "TensorBoard": TENSORBOARD,
    }
    return {what: folder / name for what, name in names.items() if (folder / name).exists()}


def last_plan(folder: Path) -> Plan | None:
    """The plan that the run in `folder` followed last; None if there is no run, or none that can be
    read."""
    with contextlib.suppress(InputError):
        return _told_by(folder).read_plan()
    return None


def unfinished_step(folder: Path) -> int | None:
    """The last step of the run in `folder`, if it has a checkpoint and is not finished; else None."""
    saved = [one.name.removeprefix("step-") for one in (folder / CHECKPOINTS).glob("step-*")]
    if not saved:
        return None
    newest = max(int(number) if number.isdecimal() else 0 for number in saved)
    with contextlib.suppress(InputError):  # the log is gone, and the checkpoints are there
        told = _told_by(folder)
        return None if told.finished else told.step or newest
    return newest


@contextlib.contextmanager
def output_folder(folder: Path, option: str = "--out") -> Iterator[Path]:
    """`folder`, made if need be and seen to be writable before any work is done for it. If the body
    fails before it has written a file, what was made is taken away again. `option` is where another
    can be given.

    Raises `InputError` if nothing can be written there.
    """
    made = _missing(folder)
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / ".writable"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise InputError(
                f"the output folder {folder} cannot be written to: {error.strerror}. Give another"
                f" with {option}."
            ) from None
        yield folder
    except BaseException:
        _take_away(made)
        raise


@contextlib.contextmanager
def run_folder(folder: Path, resume: bool = False, again: bool = False) -> Iterator[Path]:
    """`folder` as an `output_folder`, for one run at a time. `again`: its ranks were started again, so
    whoever has it is one of them that has not ended yet.

    Raises `InputError` if another run has it, or the run that is there is not finished and is not to be
    resumed.
    """
    with output_folder(folder), kept_by_one(folder / _IN_USE) as alone:
        if not (alone or again):
            raise InputError(
                f"{folder} is in use by another run: give another folder with --out, or wait for the"
                " end of that run."
            )
        if not resume and (step := unfinished_step(folder)) is not None:
            raise InputError(
                f"{folder} holds a run that is not finished, with checkpoints (step {step}): resume it"
                " with --resume, give another folder, or remove this one."
            )
        yield folder


@contextlib.contextmanager
def new_folder(parent: Path, name: str) -> Iterator[Path]:
    """The first of `parent`/NAME-1, NAME-2, ... that is not there yet, made: so no other run takes it.
    Taken away again at the end if nothing is in it then.

    Raises `InputError` if it cannot be made.
    """
    made = _missing(parent)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = next_folder(parent, name)
        while True:
            try:
                folder.mkdir()
                break
            except FileExistsError:  # by another run, meanwhile
                folder = next_folder(parent, name)
    except OSError as error:
        raise InputError(
            f"no run folder can be made in {parent}: {error.strerror}. Give one with --out."
        ) from None
    try:
        yield folder
    finally:
        _take_away([folder, *made])


def next_folder(parent: Path, name: str) -> Path:
    """The first of `parent`/NAME-1, NAME-2, ... that is not there yet. What a file name cannot have, or
    would lead out of `parent`, is replaced in `name`."""
    plain = "".join("-" if one in "/\\" or not one.isprintable() else one for one in name)
    plain = plain.lstrip(".- ")[:_NAME_LENGTH] or "run"
    number = 1
    while (folder := parent / f"{plain}-{number}").exists():
        number += 1
    return folder


def _take_away(made: Sequence[Path]) -> None:
    """Delete these folders, innermost first, up to one that is not empty: it is kept, and so are those
    above it."""
    with contextlib.suppress(OSError):
        for level in made:
            level.rmdir()


def _missing(folder: Path) -> list[Path]:
    """The folders that are to be made for `folder` to be there, innermost first."""
    missing: list[Path] = []
    for level in (folder, *folder.parents):
        if os.path.lexists(level):
            break
        missing.append(level)
    return missing


# ------------------------------------------------------------------------------------ a run, read again


@dataclass(frozen=True, slots=True)
class PastRun:
    """A run, as its folder tells it.

    Attributes:
        folder: of the run.
        task: its name.
        source, source_sha256, settings: what the task was loaded by, see `RunStarted`; empty where that
            is not recorded.
        plan: that was followed last.
        step, epoch: how far training has come.
        finished: whether it came to its end, so that the file of weights is of that end.
    """

    folder: Path
    task: str
    source: str
    source_sha256: str
    settings: Mapping[str, str]
    plan: Plan
    step: int
    epoch: int
    finished: bool

    @property
    def weights(self) -> Path:
        """The file of weights of a run that has finished."""
        return self.folder / WEIGHTS_FILE

    @property
    def has_final_weights(self) -> bool:
        """Whether that file is there, and is of where the run stands: one that is left of an earlier
        end of a run that was taken up again is not."""
        return self.finished and self.weights.is_file()

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.folder / CHECKPOINTS


def read_run(run: str | os.PathLike[str]) -> PastRun:
    """What the folder `run` tells. Raises `InputError` if it is no run folder, or no start of a run is
    in its log."""
    folder = Path(run)
    if not (folder / EVENTS_FILE).is_file():
        raise InputError(not_a_run(folder))
    told, plan = _told_by(folder), None
    with contextlib.suppress(InputError):
        plan = told.read_plan()
    started = told.started
    if started is None or plan is None:
        raise InputError(
            f"{folder} does not tell of a run that can be taken up: no start of one, with a plan that"
            f" this version of anybatch reads, is in its {EVENTS_FILE}. Give the folder of another run,"
            " or train it again."
        )
    return PastRun(
        folder=folder,
        task=started.task,
        source=started.source,
        source_sha256=started.source_sha256,
        settings=started.settings,
        plan=plan,
        step=told.step,
        epoch=told.epoch,
        finished=told.finished,
    )


@dataclass(slots=True)
class _Told:
    """What the log of a run tells of how far it has come."""

    started: RunStarted | None = None
    plan: Mapping[str, Any] | None = None
    step: int = 0
    epoch: int = 0
    finished: bool = False

    def read_plan(self) -> Plan | None:
        return None if self.plan is None else Plan.from_json(json.dumps(self.plan))


def _told_by(folder: Path) -> _Told:
    told = _Told()
    for event in iterate(folder / EVENTS_FILE, every_step=False):
        if isinstance(event, RunStarted):
            told.started = event
        if isinstance(event, RunStarted | Replanned | CompileDecided):
            told.plan = event.plan
        elif isinstance(event, Tried) and (plan := told.plan) is not None:
            told.plan = dict(plan, rivals=())  # it has been found out
        elif isinstance(event, StepDone | Evaluated):
            told.step, told.epoch = event.step, event.epoch
        elif isinstance(event, RunEnded):
            told.step = event.steps
        if isinstance(event, RunStarted | StepDone | RunEnded):
            told.finished = isinstance(event, RunEnded) and event.finished
    return told


def not_a_run(folder: Path) -> str:
    """What is to be said of a `folder` that is none of a run."""
    if not folder.exists():
        return (
            f"{folder} does not exist (looked from {os.getcwd()}): give the folder that 'anybatch"
            " train' wrote."
        )
    return (
        f"{folder} is not a run folder, since it has no {EVENTS_FILE}: give the folder that"
        " 'anybatch train' wrote."
    )
