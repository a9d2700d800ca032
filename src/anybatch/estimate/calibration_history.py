"""History: predicted beside measured, run after run, and what the next prediction learns from it.

A prediction of time that was 1.2 times too short in the last runs of a task on this machine is made 1.2
times longer. Bytes are corrected upwards only: a plan that promised too much memory is safe. What a
small plan lacked is mostly a constant, and of a large one a share, so the next plan gets the lesser of
both. If times are far off in one run after the other, or out of all proportion in a single one, not
the task but the machine is not as it was measured, and it is measured again. A run that other processes
disturbed, or whose prediction was made from such a measurement, teaches nothing about time.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from anybatch.errors import InputError
from anybatch.estimate.calibration_store import (
    Where,
    forget_speeds,
    known_speeds,
    read,
    where,
    write,
)
from anybatch.files import cache_folder
from anybatch.machine import Device, Machine
from anybatch.plans import Plan, TaskIdentity
from anybatch.threads import MOST_IDLE

_KEPT = 60
"""Runs that are remembered per device."""

_COUNTED = 9
"""The last ones, which a correction is made of."""

_LIMITS = (0.2, 5.0)
"""A correction beyond these says that something else is wrong, and is not made."""

_MOST_SHARE = 1.0
"""The largest share of a prediction that is added to its bytes."""

STALE_FACTOR, STALE_RUNS = 1.6, 3
"""So many runs in a row that far off, all in one direction: the calibration is measured again."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One run.

    Attributes:
        task: its name.
        parameters: of its model; tasks of one name may differ.
        seconds_ratio: measured time of a step by the uncorrected prediction; None: not measured.
        predicted_bytes: uncorrected prediction of the peak.
        measured_bytes: the peak; None where nothing held the run to a budget, so that the allocator
            kept what it liked.
        calibration: number of the calibration that the prediction was made with.
    """

    task: str
    parameters: int
    seconds_ratio: float | None
    predicted_bytes: int
    measured_bytes: int | None
    calibration: int


@dataclass(frozen=True, slots=True)
class History:
    """The runs on one device, oldest first.

    Attributes:
        runs: see `Seen`.
        calibration: number of the present calibration.
    """

    runs: tuple[Seen, ...] = ()
    calibration: int = 0


@dataclass(frozen=True, slots=True)
class Excess:
    """What a run took beyond its prediction: so many bytes, which was a `share` of the prediction."""

    num_bytes: int
    share: float


@dataclass(frozen=True, slots=True)
class Correction:
    """How predictions are corrected.

    Attributes:
        seconds: factor of the time of a step.
        excesses: of the runs that took more bytes than predicted.
        num_runs: runs that the factor of time was learned from.
    """

    seconds: float = 1.0
    excesses: tuple[Excess, ...] = ()
    num_runs: int = 0

    def bytes_of(self, predicted_bytes: float) -> int:
        """A prediction with what the run that teaches most would add to it: its excess in bytes or its
        share, whichever is less."""
        more = (min(one.num_bytes, one.share * predicted_bytes) for one in self.excesses)
        return int(predicted_bytes + max(more, default=0))

    def room_in(self, num_bytes: float) -> int:
        """The largest prediction that is not above `num_bytes` once it is corrected."""
        room = (
            max(num_bytes - one.num_bytes, num_bytes / (1 + one.share)) for one in self.excesses
        )
        return int(min(room, default=num_bytes))


_HISTORY: TypeAdapter[History] = TypeAdapter(History)


def correction(device: Device, task: TaskIdentity | None = None) -> Correction:
    """What earlier runs on `device` teach: those of the same task where there are any, else (for time
    alone) all of them."""
    if not device.present:
        return Correction()
    found = _history(where(device))
    # Runs under an earlier calibration were compared with other figures.
    runs = [run for run in found.runs if run.calibration == found.calibration]
    same = [run for run in runs if task is not None and _is_of(run, task)]
    seconds = _ratios(same or runs)
    factor = statistics.median(seconds) if seconds else 1.0
    if not _LIMITS[0] <= factor <= _LIMITS[1]:
        factor, seconds = 1.0, []
    every = [run for run in found.runs if task is not None and _is_of(run, task)]
    excesses = tuple(excess for run in every[-_COUNTED:] if (excess := _excess(run)) is not None)
    return Correction(factor, excesses, len(seconds))


def remember(
    plan: Plan,
    measured_peak_bytes: int | None,
    measured_step_seconds: float | None,
    idle_seconds: float = 0.0,
) -> None:
    """Keep what a run that followed `plan` to its end measured. What cannot be kept is not: this never
    fails.

    Args:
        plan: with the prediction; nothing is kept of one without, or of several ranks.
        measured_peak_bytes: most that training added to the device.
        measured_step_seconds: median time of a step.
        idle_seconds: of these, how long it waited for a core that others had.
    """
    told = plan.prediction
    if told is None or plan.num_ranks != 1:
        return
    try:
        device = Machine.here(device=plan.device).device
    except InputError:
        return
    seconds = None
    speeds = known_speeds(device)
    trusted = speeds is None or not speeds.disturbed
    if measured_step_seconds and idle_seconds > MOST_IDLE * measured_step_seconds:
        trusted = False
    if trusted and measured_step_seconds and told.step_seconds > 0:
        seconds = measured_step_seconds * told.seconds_corrected_by / told.step_seconds
    here = where(device)
    before = _history(here)
    run = Seen(
        task=plan.task.name,
        parameters=plan.task.parameters,
        seconds_ratio=seconds,
        predicted_bytes=told.peak_bytes - told.learned_bytes,
        measured_bytes=measured_peak_bytes if plan.enforced else None,
        calibration=before.calibration,
    )
    after = History((*before.runs, run)[-_KEPT:], before.calibration)
    if _is_stale(after):
        forget_speeds(device)
        after = History(after.runs, after.calibration + 1)
    write(_path(here), _HISTORY, after)


def _excess(run: Seen) -> Excess | None:
    if run.measured_bytes is None or not 0 < run.predicted_bytes < run.measured_bytes:
        return None
    more = run.measured_bytes - run.predicted_bytes
    return Excess(more, min(_MOST_SHARE, more / run.predicted_bytes))


def _is_stale(history: History) -> bool:
    """Whether the last runs under this calibration were all far off to one side. Where those under the
    one before were as far off, measuring again did not help, and the correction is left to do it."""
    present = [r for r in history.runs if r.calibration == history.calibration]
    last = _ratios(present)[-STALE_RUNS:]
    if last and not _LIMITS[0] <= last[-1] <= _LIMITS[1]:
        last = last[-1:]  # no correction is made of it, so nothing is gained by waiting for more
    elif len(last) < STALE_RUNS:
        return False
    away = [math.log(ratio) for ratio in last]
    limit = math.log(STALE_FACTOR)
    if not (min(away) > limit or max(away) < -limit):
        return False
    earlier = _ratios([r for r in history.runs if r.calibration == history.calibration - 1])
    if not earlier:
        return True
    return abs(statistics.median(away) - math.log(statistics.median(earlier[-STALE_RUNS:]))) > limit


def _ratios(runs: list[Seen]) -> list[float]:
    found = [run.seconds_ratio for run in runs if run.seconds_ratio is not None]
    return [ratio for ratio in found if math.isfinite(ratio) and ratio > 0][-_COUNTED:]


def _is_of(run: Seen, task: TaskIdentity) -> bool:
    return run.task == task.name and run.parameters == task.parameters


def _history(here: Where) -> History:
    found = read(_path(here), _HISTORY)
    return found if isinstance(found, History) else History()


def _path(here: Where) -> Path:
    return cache_folder() / f"history-{here.name}.json"
