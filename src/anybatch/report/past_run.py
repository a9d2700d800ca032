"""PastRun: what a run folder tells of its run, for those who evaluate or export it later."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from anybatch.errors import InputError
from anybatch.events import Evaluated, RunEnded, RunStarted, StepDone
from anybatch.plans import Plan
from anybatch.report.folder import CHECKPOINTS, EVENTS_FILE, WEIGHTS_FILE, last_plan
from anybatch.report.log import iterate


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
    """What the folder `run` tells. Raises `InputError` if it is no run folder, or its log is
    damaged."""
    folder = Path(run)
    log = folder / EVENTS_FILE
    if not log.is_file():
        raise InputError(not_a_run(folder))
    started: RunStarted | None = None
    step = epoch = 0
    finished = False
    for event in iterate(log):
        if isinstance(event, RunStarted):
            started, finished = event, False
        elif isinstance(event, StepDone | Evaluated):
            step, epoch = event.step, event.epoch
        elif isinstance(event, RunEnded):
            finished, step = event.finished, event.steps
    plan = last_plan(folder)
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
        step=step,
        epoch=epoch,
        finished=finished,
    )


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
