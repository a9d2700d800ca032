"""The log that TensorBoard reads: events as curves and texts.

    DIR/               curves against steps; texts of the plan and of what happened; settings
    DIR/by_samples/    loss and metrics against samples seen, for runs of different global batches

A run that is resumed goes on in a new file beside the old one, and tells TensorBoard first that what
was read of later steps is done again. All is made from events, so a log can be written during the run
or years later from `events.jsonl`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, final

from anybatch.errors import InputError
from anybatch.events import (
    CheckpointSaved,
    CompileDecided,
    Evaluated,
    Event,
    Replanned,
    Resumed,
    RunStarted,
    StepDone,
)
from anybatch.plans import Plan
from anybatch.report.event_file import EventFile, check_tensorboard, event_files
from anybatch.report.folder import TENSORBOARD
from anybatch.report.log import iterate
from anybatch.report.scalars import scalars_by_samples, scalars_of
from anybatch.report.sentences import describe

_BY_SAMPLES = "by_samples"
_IN_A_TABLE = str.maketrans({"|": "\\|", "\n": " "})


def tensorboard_folder(
    wish: bool | str | Path | None, out: str | Path | None, resume: bool = False
) -> Path | None:
    """Where the log that is wished for belongs; None if none is.

    Args:
        wish: a folder; True or `""`: the one of the run. None or False: no log.
        out: the run's folder, if it has one.
        resume: the log that may be there is gone on with.

    Raises `InputError` if the log could not be written: tensorboard cannot be imported, there is
    no folder, or the one that is named holds the log of another run.
    """
    if wish is None or wish is False:
        return None
    check_tensorboard()
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
    """Write the log of a run into `folder`, from its `events`; one that is there is replaced.

    Raises `InputError` if the events cannot be read, or the log cannot be written.
    """
    with TensorBoardLog(folder) as log:
        try:
            for event in iterate(events):
                log.write(event)
        except OSError as error:
            raise InputError(
                f"{_unwritable(folder, error)} Make room there, or give another folder."
            ) from None
    return folder


@final
class TensorBoardLog:
    """A sink that writes the log into `folder`. Leave it as a context, or call `close`.

    A log that cannot be written, on a full disk say, does not end training: a warning tells so, once,
    and the rest is left out. What was written until then stays whole.

    Args:
        folder: made when the first event is there.
        resume: go on with the log in the folder; else that is deleted.
        earlier: events of the run before it is resumed. If the folder has no log, they are its
            beginning.

    Raises `InputError` if tensorboard cannot be imported.
    """

    def __init__(self, folder: Path, resume: bool = False, earlier: Path | None = None) -> None:
        check_tensorboard()
        self._folder = folder
        self._given_up = False
        self._resume = resume
        self._earlier = earlier
        self._files: tuple[EventFile, EventFile] | None = None
        self._opening: RunStarted | None = None
        self._budget: int | None = None
        self._step, self._samples_seen = 0, 0
        self._evaluated: set[int] = set()

    def __call__(self, event: Event) -> None:
        if self._given_up:
            return
        try:
            self.write(event)
        except OSError as error:
            self._given_up = True
            warnings.warn(
                f"{_unwritable(self._folder, error)} Training goes on without it; `anybatch report RUN"
                " --tensorboard` writes it from the events of the run.",
                stacklevel=2,
            )

    def close(self) -> None:
        """Close the files. Closing twice does no harm."""
        for file in self._files or ():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def write(self, event: Event) -> None:
        """As a call; but raises `OSError` if it cannot be written."""
        if self._files is None:
            self._files = self._open(event.time)
        if isinstance(event, RunStarted):
            self._opening = event  # whether it is the beginning is told next
            return
        started, self._opening = self._opening, None
        if started is not None:
            self._start(started, event if isinstance(event, Resumed) else None)
        self._tell(event)

    def _open(self, time: float) -> tuple[EventFile, EventFile]:
        folders = self._folder, self._folder / _BY_SAMPLES
        there = [file for folder in folders for file in event_files(folder)]
        if not self._resume:
            for file in there:
                file.unlink()
        files = EventFile(folders[0], time), EventFile(folders[1], time)
        if self._resume and self._earlier is not None and self._earlier.exists():
            self._files = files
            for event in iterate(self._earlier):
                if not there:
                    self.write(event)
                elif isinstance(event, Evaluated):
                    self._evaluated.add(event.step)
        return files

    def _start(self, started: RunStarted, resumed: Resumed | None) -> None:
        """What opens a run, at the step from which it goes on."""
        assert self._files is not None
        if resumed is not None:
            self._step, self._samples_seen = resumed.step, resumed.samples_seen
            self._evaluated = {one for one in self._evaluated if one <= resumed.step}
            for file, last in zip(self._files, (resumed.step, resumed.samples_seen), strict=True):
                file.forget(last + 1, started.time)
        else:
            self._files[0].add_settings(_settings(started), started.time)
        self._text("run", _as_text(started), started.time)
        self._follow(started.plan, started.time)

    def _follow(self, plan: Mapping[str, Any], time: float) -> None:
        self._budget = _budget(plan)
        self._text("plan", _plan_as_text(plan), time)

    def _tell(self, event: Event) -> None:
        assert self._files is not None
        if isinstance(event, Evaluated):
            if event.step in self._evaluated:  # a finished run, resumed, is evaluated once more
                return
            self._evaluated.add(event.step)
        if isinstance(event, StepDone):
            self._samples_seen = event.samples_seen
        self._step = getattr(event, "step", self._step)  # the last ones have none
        if isinstance(event, StepDone | Evaluated | CheckpointSaved):
            by_step, by_samples = self._files
            by_step.add_scalars(scalars_of(event, self._budget), self._step, event.time)
            if told := scalars_by_samples(event):
                by_samples.add_scalars(told, self._samples_seen, event.time)
        else:
            self._text(f"events/{event.kind}", describe(event), event.time)
        if isinstance(event, Replanned | CompileDecided):
            self._follow(event.plan, event.time)

    def _text(self, name: str, text: str, time: float) -> None:
        assert self._files is not None
        self._files[0].add_text(name, text, self._step, time)


def _unwritable(folder: Path, error: OSError) -> str:
    return f"The log {folder} cannot be written: {error.strerror or error}."


def _as_text(started: RunStarted) -> str:
    rows = {"command": started.command, "host": started.host, **started.versions}
    told = _table([(what, how) for what, how in rows.items() if how])
    return "\n\n".join([describe(started), told, *started.notices])


def _plan_as_text(plan: Mapping[str, Any]) -> str:
    text = json.dumps(plan)
    try:
        return _table(Plan.from_json(text).explain())
    except InputError:  # one of another version of anybatch
        return text


def _table(rows: list[tuple[str, str]]) -> str:
    """Two columns in Markdown."""
    cells = [f"| {what} | {how.translate(_IN_A_TABLE)} |" for what, how in rows]
    return "\n".join(["| | |", "| --- | --- |", *cells])


def _budget(plan: Mapping[str, Any]) -> int | None:
    """That which is enforced: else it is what was free when the plan was made."""
    return plan.get("budget_bytes") if plan.get("enforced") else None


def _settings(started: RunStarted) -> dict[str, bool | float | str]:
    """What tells runs apart, as far as events know it."""
    plan = started.plan
    task, choice = plan.get("task", {}), plan.get("choice", {})
    told = {
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
    return {name: value for name, value in told.items() if value is not None}
