"""Record: the progress of a run, its figures, and the events that open and close it.

The time of a step of several ranks is divided as follows:

    rank 0   samples   computing      slower ranks   exchange   update
    rank 1   samples   computing ------------------> exchange   update

The part of the exchange that overlaps with the last backward pass counts as computing, as does all
communication within passes (sharded parameters).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TypeVar

from anybatch.data import StepData, Steps
from anybatch.engine import Meter, Skips
from anybatch.events import (
    COMPUTING,
    EXCHANGE,
    SAMPLES,
    SLOWER,
    UPDATE,
    RunEnded,
    RunStarted,
)
from anybatch.parallel import Group
from anybatch.plans import Plan
from anybatch.rank.checks import versions

_T = TypeVar("_T")

_latest = partial(deque, maxlen=1000)

_METER_SECONDS = 0.5  # reading the kernel's statistics takes longer than a small step


@dataclass(slots=True)
class Position:
    """Training progress, the same on all ranks.

    Attributes:
        step: number of committed global steps, including those before a resumption; so it is the number
            of the last step, and the index of the next one.
        samples_seen: number of samples in these steps, including skipped ones.
        epoch: epoch of the next sample.
    """

    step: int = 0
    samples_seen: int = 0
    epoch: int = 0

    def advance(self, data: StepData) -> None:
        """Advance past the step of `data`, which is done."""
        self.step += 1
        self.samples_seen += data.num_samples
        self.epoch = data.next_epoch


@dataclass(eq=False, slots=True)
class Record:
    """The record of a run on one rank.

    Attributes:
        name: name of the task.
        steps: steps of the run.
        position: training progress.
        group: the ranks.
        meter: meter of the memory in use.
        skips: skipped bad samples, if any.
    """

    name: str
    steps: Steps
    position: Position
    group: Group
    meter: Meter
    skips: Skips | None
    _steps_of_late: deque[tuple[float, float, float]] = field(default_factory=_latest)
    _parts_of_late: deque[Mapping[str, float]] = field(default_factory=_latest)
    _seconds: float = 0.0
    _num_samples: int = 0
    _memory: int = 0
    _memory_read: float = 0.0

    def took(self, seconds: float, waited: float, idle: float, num_samples: int) -> None:
        """Record a step of `num_samples` samples that took `seconds`, of which it `waited` for the
        samples, and was `idle`."""
        self._steps_of_late.append((seconds, seconds - waited, idle))
        self._seconds += seconds
        self._num_samples += num_samples

    def shared(self, parts: Mapping[str, float]) -> None:
        """Record the seconds of each part of that step; called if there are several ranks."""
        self._parts_of_late.append(parts)

    def memory_bytes(self) -> int:
        """The peak memory so far, refreshed at most every `_METER_SECONDS`."""
        now = time.perf_counter()
        if now - self._memory_read > _METER_SECONDS:
            self._memory, self._memory_read = self.meter.peak_bytes(), now
        return self._memory

    def started(self, plan: Plan) -> RunStarted:
        """The event that opens a run under `plan`."""
        return RunStarted(
            time=time.time(),
            task=self.name,
            device=plan.device_name or plan.device,
            num_samples=self.steps.num_samples,
            total_steps=self.steps.total_steps,
            plan=plan.model_dump(mode="json"),
            versions=versions(),
            total_samples=self.steps.total_samples,
            notices=(*plan.notices, *plan.exchange.notices()),
        )

    def ended(
        self, given: Plan, followed: Plan, seconds: float, finished: bool, reason: str
    ) -> RunEnded:
        """The event that closes a run. `given` is the initial plan, and `followed` the plan at the end,
        which may be the same. Ranks communicate only if the run is `finished`."""
        # Otherwise the prediction is for another choice.
        prediction = given.prediction if followed.choice == given.choice else None
        steps = _without_first(self._steps_of_late)
        times = zip(*steps, strict=True) if steps else ((0.0,),) * 3
        taken, computed, idle = map(median, times)
        parts = _typical(_without_first(self._parts_of_late))
        mine = self.meter.totals()
        every = self.group.exchange(mine) if finished else [mine]
        peaks = [totals["total"] for totals in every]
        return RunEnded(
            time=time.time(),
            steps=self.position.step,
            samples_seen=self.position.samples_seen,
            seconds=seconds,
            step_seconds=taken or None,
            predicted_peak_bytes=prediction.peak_bytes if prediction else None,
            measured_peak_bytes=max(peaks),
            predicted_step_seconds=prediction.step_seconds if prediction else None,
            budget_bytes=given.budget_bytes,
            finished=finished,
            reason=reason,
            rank_peak_bytes=tuple(peaks) if len(peaks) > 1 else (),
            num_skipped=self.skips.num_samples if self.skips else 0,
            predicted_totals=prediction.totals if prediction else {},
            measured_totals=max(every, key=lambda totals: totals["total"]),
            data_seconds=taken - computed,
            idle_seconds=idle,
            step_parts=parts,
            predicted_step_parts=predicted_parts(prediction.step_parts)
            if parts and prediction
            else {},
            samples_per_second=self._num_samples / self._seconds if self._seconds else None,
        )


def _typical(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each part."""
    return {part: median(one[part] for one in parts) for part in parts[0]} if parts else {}


def _without_first(steps: Iterable[_T]) -> list[_T]:
    """All steps but the first, which is not typical, unless it is the only one."""
    every = list(steps)
    return every[1:] or every


def parts_of(
    seconds: float,
    agreed_seconds: float,
    rank_seconds: Sequence[float],
    waited_seconds: float,
    reading_seconds: float = 0.0,
) -> dict[str, float]:
    """The seconds of one step by part. They add up to `seconds` if the device reports its time
    immediately (CUDA reports the time of the previous step).

    Args:
        seconds: time of the step on rank 0.
        agreed_seconds: see `StepDone`.
        rank_seconds: time of the passes of each rank, including waiting for samples.
        waited_seconds: waiting for samples in the passes, on rank 0; assumed equal on the other ranks.
        reading_seconds: time for samples before the passes.
    """
    slowest = max(rank_seconds)
    mean = sum(rank_seconds) / len(rank_seconds)
    exchange = max(0.0, agreed_seconds - slowest)
    return {
        COMPUTING: max(0.0, mean - waited_seconds),
        SLOWER: slowest - mean,
        EXCHANGE: exchange,
        UPDATE: max(0.0, seconds - reading_seconds - slowest - exchange),
        SAMPLES: waited_seconds + reading_seconds,
    }


def predicted_parts(parts: Mapping[str, float]) -> dict[str, float]:
    """`Prediction.step_parts`, combined into the parts of `parts_of`."""
    rest = {"exchange of gradients": EXCHANGE, "update": UPDATE}
    sums = {COMPUTING: 0.0, EXCHANGE: 0.0, UPDATE: 0.0}
    for part, seconds in parts.items():
        sums[rest.get(part, COMPUTING)] += seconds
    return sums
