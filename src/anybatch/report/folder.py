"""The run folder, and how it is read and written safely.

plan.json           the plan
events.jsonl        the events
checkpoints/        the checkpoints to resume from
model.safetensors   the weights
adapters/           adapters of peft alone, if the model has any, as peft reads them
pretrained/         for a model of transformers, all but the weights, as from_pretrained reads it
report.html         the report
tensorboard/        curves and texts for TensorBoard, if requested
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

from anybatch.errors import InputError, as_setting
from anybatch.events import (
    Evaluated,
    Event,
    Replanned,
    RunEnded,
    RunStarted,
    StepDone,
)
from anybatch.plans import Plan
from anybatch.process.locks import kept_by_one
from anybatch.report.log import EventLog, iterate

PLAN_FILE, EVENTS_FILE = "plan.json", "events.jsonl"
WEIGHTS_FILE, REPORT_FILE = "model.safetensors", "report.html"
CHECKPOINTS, ADAPTERS = "checkpoints", "adapters"
PRETRAINED, TENSORBOARD = "pretrained", "tensorboard"

_IN_USE = ".in-use"
"""Name of the lock file, held by rank 0 of the run that writes to the folder."""


_NAME_LENGTH = 60
"""Maximum number of characters of a task's name in a folder's name; file systems allow 255 bytes."""


class RunFolder:
    """A sink that writes the plan and the events of a run to a folder. Nothing is written or deleted
    before the first event, so a run that fails to start leaves an earlier run in the folder unchanged.
    Later events that cannot be written, for example because the disk is full, are omitted with a
    warning, and training continues.

    Args:
        folder: the run folder.
        plan: plan of the run.
        resume: whether to continue the run in the folder; if False, its files are deleted.
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
    """The existing files of a run folder, by their content."""
    names = {
        "plan": PLAN_FILE,
        "events": EVENTS_FILE,
        "weights": WEIGHTS_FILE,
        "report": REPORT_FILE,
        "TensorBoard": TENSORBOARD,
    }
    return {what: folder / name for what, name in names.items() if (folder / name).exists()}


def last_plan(folder: Path) -> Plan | None:
    """The last plan of the run in `folder`; None if there is no run, or it cannot be read."""
    with contextlib.suppress(InputError):
        return _logged_state(folder).read_plan()
    return None


def unfinished_step(folder: Path) -> int | None:
    """The last step of the run in `folder` if it has checkpoints and is not finished, else None."""
    saved = [one.name.removeprefix("step-") for one in (folder / CHECKPOINTS).glob("step-*")]
    if not saved:
        return None
    newest = max(int(number) if number.isdecimal() else 0 for number in saved)
    with contextlib.suppress(InputError):  # the log is missing, but there are checkpoints
        logged = _logged_state(folder)
        return None if logged.finished else logged.step or newest
    return newest


@contextlib.contextmanager
def output_folder(folder: Path, name: str = "out") -> Iterator[Path]:
    """Create `folder` if needed, and check that it is writable before any work is done. If the body
    fails before it has written a file, the created folders are deleted. `name` is the setting named in
    the error message.

    Raises `InputError` if the folder is not writable.
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
                f" with {as_setting(name)}."
            ) from None
        yield folder
    except BaseException:
        _take_away(made)
        raise


@contextlib.contextmanager
def run_folder(folder: Path, resume: bool = False, again: bool = False) -> Iterator[Path]:
    """An `output_folder` that is locked for one run at a time. `again`: the ranks of the run were
    restarted, so the lock may still be held by one of them that has not exited yet.

    Raises `InputError` if another run uses the folder, or if it holds an unfinished run with
    checkpoints and `resume` is False.
    """
    with output_folder(folder), kept_by_one(folder / _IN_USE) as alone:
        if not (alone or again):
            raise InputError(
                f"{folder} is in use by another run: give another folder with {as_setting('out')}, or"
                " wait for the end of that run."
            )
        if not resume and (step := unfinished_step(folder)) is not None:
            raise InputError(
                f"{folder} holds a run that is not finished, with checkpoints (step {step}): resume it"
                f" with {as_setting('resume', True)}, give another folder, or remove this one."
            )
        yield folder


@contextlib.contextmanager
def new_folder(parent: Path, name: str) -> Iterator[Path]:
    """Create the first of `parent`/NAME-1, NAME-2, ... that does not exist, so that no other run uses
    it. The folder is deleted at the end if it is empty.

    Raises `InputError` if it cannot be created.
    """
    made = _missing(parent)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = next_folder(parent, name)
        while True:
            try:
                folder.mkdir()
                break
            except FileExistsError:  # created by another run meanwhile
                folder = next_folder(parent, name)
    except OSError as error:
        raise InputError(
            f"no run folder can be made in {parent}: {error.strerror}. Give one with"
            f" {as_setting('out')}."
        ) from None
    try:
        yield folder
    finally:
        _take_away([folder, *made])


def next_folder(parent: Path, name: str) -> Path:
    """The first of `parent`/NAME-1, NAME-2, ... that does not exist. Characters of `name` that are not
    allowed in file names, or would lead out of `parent`, are replaced or removed."""
    plain = "".join("-" if one in "/\\" or not one.isprintable() else one for one in name)
    plain = plain.lstrip(".- ")[:_NAME_LENGTH] or "run"
    number = 1
    while (folder := parent / f"{plain}-{number}").exists():
        number += 1
    return folder


def _take_away(made: Sequence[Path]) -> None:
    """Delete these folders, innermost first, up to the first that is not empty. That folder and its
    parents are kept."""
    with contextlib.suppress(OSError):
        for level in made:
            level.rmdir()


def _missing(folder: Path) -> list[Path]:
    """The folders that must be created for `folder` to exist, innermost first."""
    missing: list[Path] = []
    for level in (folder, *folder.parents):
        if os.path.lexists(level):
            break
        missing.append(level)
    return missing


# ------------------------------------------------------------------------------------ a run, read again


@dataclass(frozen=True, slots=True)
class PastRun:
    """A run, as recorded in its folder.

    Attributes:
        folder: the run folder.
        task: name of the task.
        source, source_sha256, settings: what the task was loaded from, see `RunStarted`; empty if not
            recorded.
        plan: the last plan of the run.
        step, epoch: last step and epoch of training.
        finished: whether the run has finished, so that the weights file holds the final weights.
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
        """Path of the weights file, which a finished run has."""
        return self.folder / WEIGHTS_FILE

    @property
    def has_final_weights(self) -> bool:
        """Whether the weights file exists and matches the state of the run. A file from an earlier end
        of a run that has been resumed since does not."""
        return self.finished and self.weights.is_file()

    @property
    def checkpoints(self) -> Path:
        """Path of the folder of checkpoints."""
        return self.folder / CHECKPOINTS


def read_run(run: str | os.PathLike[str]) -> PastRun:
    """Read the run in the folder `run`. Raises `InputError` if it is not a run folder, or if its log
    has no start of a run with a readable plan."""
    folder = Path(run)
    if not (folder / EVENTS_FILE).is_file():
        raise InputError(not_a_run(folder))
    logged, plan = _logged_state(folder), None
    with contextlib.suppress(InputError):
        plan = logged.read_plan()
    started = logged.started
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
        step=logged.step,
        epoch=logged.epoch,
        finished=logged.finished,
    )


@dataclass(slots=True)
class _LoggedState:
    """The state of a run according to its log."""

    started: RunStarted | None = None
    plan: Mapping[str, Any] | None = None
    step: int = 0
    epoch: int = 0
    finished: bool = False

    def read_plan(self) -> Plan | None:
        return None if self.plan is None else Plan.from_json(json.dumps(self.plan))


def _logged_state(folder: Path) -> _LoggedState:
    logged = _LoggedState()
    for event in iterate(folder / EVENTS_FILE, every_step=False):
        if isinstance(event, RunStarted):
            logged.started = event
        if isinstance(event, RunStarted | Replanned):
            logged.plan = event.plan
        elif isinstance(event, StepDone | Evaluated):
            logged.step, logged.epoch = event.step, event.epoch
        elif isinstance(event, RunEnded):
            logged.step = event.steps
        if isinstance(event, RunStarted | StepDone | RunEnded):
            logged.finished = isinstance(event, RunEnded) and event.finished
    return logged


def not_a_run(folder: Path) -> str:
    """The error message for a `folder` that is not a run folder."""
    fault = f"is not a run folder, since it has no {EVENTS_FILE}"
    if not folder.exists():
        fault = f"does not exist (looked from {os.getcwd()})"
    return f"{folder} {fault}: give the folder that 'anybatch train' wrote."
