"""History: measured times of earlier runs against predicted ones, and the correction learned from them.

A prediction of time that was 1.2 times too short in the last runs of a task on this machine is made 1.2
times longer. A run that is off by more than a factor of five says that the machine is not as it was
measured: it is measured again. A run that waited for cores that other processes had teaches nothing.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from anybatch.errors import InputError
from anybatch.estimate.calibration_store import Where, forget_speeds, read, where, write
from anybatch.machine import Device, Machine
from anybatch.plans import Plan, TaskIdentity
from anybatch.process.files import cache_folder
from anybatch.process.threads import MOST_IDLE

_KEPT = 60
"""Runs that are remembered per device."""

_COUNTED = 9
"""The last ones, which a correction is made of."""

_LIMITS = (0.2, 5.0)
"""Ratios beyond these are not learned: speeds are measured again."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One run.

    Attributes:
        task: its name.
        parameters: of its model; tasks of one name may differ.
        seconds_ratio: measured time of a step by the uncorrected prediction.
    """

    task: str
    parameters: int
    seconds_ratio: float


@dataclass(frozen=True, slots=True)
class Correction:
    """How predictions are corrected.

    Attributes:
        seconds: factor of the time of a step.
        num_runs: runs that it was learned from.
    """

    seconds: float = 1.0
    num_runs: int = 0


_RUNS: TypeAdapter[tuple[Seen, ...]] = TypeAdapter(tuple[Seen, ...])


def correction(device: Device, task: TaskIdentity | None = None) -> Correction:
    """What earlier runs on `device` teach: those of the same task where there are any, else all."""
    if not device.present:
        return Correction()
    runs = _runs(where(device))
    same = [run for run in runs if task is not None and _is_of(run, task)]
    ratios = [run.seconds_ratio for run in same or runs][-_COUNTED:]
    return Correction(statistics.median(ratios), len(ratios)) if ratios else Correction()


def remember(plan: Plan, measured_step_seconds: float | None, idle_seconds: float = 0.0) -> None:
    """Keep what a run that followed `plan` to its end measured. What cannot be kept is not: this never
    fails.

    Args:
        plan: with the prediction; nothing is kept of one without, or of several ranks.
        measured_step_seconds: median time of a step.
        idle_seconds: of these, how long it waited for a core that others had.
    """
    told = plan.prediction
    if told is None or plan.num_ranks != 1 or not measured_step_seconds or told.step_seconds <= 0:
        return
    ratio = measured_step_seconds * told.seconds_corrected_by / told.step_seconds
    if idle_seconds > MOST_IDLE * measured_step_seconds or not math.isfinite(ratio):
        return
    try:
        device = Machine.here(device=plan.device).device
    except InputError:
        return
    here = where(device)
    runs = (*_runs(here), Seen(plan.task.name, plan.task.parameters, ratio))[-_KEPT:]
    if not _LIMITS[0] <= ratio <= _LIMITS[1]:
        forget_speeds(device)
        runs = ()
    write(_path(here), _RUNS, runs)


def _is_of(run: Seen, task: TaskIdentity) -> bool:
    return run.task == task.name and run.parameters == task.parameters


def _runs(here: Where) -> tuple[Seen, ...]:
    found = read(_path(here), _RUNS) or ()
    return tuple(run for run in found if _LIMITS[0] <= run.seconds_ratio <= _LIMITS[1])


def _path(here: Where) -> Path:
    return cache_folder() / f"history-{here.name}.json"
