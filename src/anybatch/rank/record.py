"""Record: how far a run has come, its figures, and the events that open and close it.

Where the time of a step of several ranks goes:

    rank 0   samples   computing      slower ranks   exchange   update
    rank 1   samples   computing ------------------> exchange   update

What of the exchange the last backward pass hides is a part of computing, as is all that ranks exchange
within their passes (sharded parameters).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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

_METER_SECONDS = 0.5  # reading the kernel's books costs more than a small step


@dataclass(slots=True)
class Position:
    """How far training has come, the same on all ranks.

    Attributes:
        step: global steps that are committed, those before a resumption included; so the number of the
            last one, and the index of the one that comes next.
        samples_seen: in them, those left out included.
        epoch: that the next sample is of.
    """

    step: int = 0
    samples_seen: int = 0
    epoch: int = 0

    def advance(self, data: StepData) -> None:
        """The step of `data` is done."""
        self.step += 1
        self.samples_seen += data.num_samples
        self.epoch = data.next_epoch


class Record:
    """What a rank knows of its run.

    Args:
        name: of the task.
        steps: of the run.
        position: how far it has come.
        group: the ranks.
        meter: of the memory in use.
        skips: of bad data, if there are any.
    """

    def __init__(
        self,
        name: str,
        steps: Steps,
        position: Position,
        group: Group,
        meter: Meter,
        skips: Skips | None,
    ) -> None:
        self._name = name
        self._steps = steps
        self._position = position
        self._group = group
        self._meter = meter
        self._skips = skips
        self._steps_of_late: deque[tuple[float, float, float]] = deque(maxlen=1000)
        self._parts_of_late: deque[Mapping[str, float]] = deque(maxlen=1000)
        self._seconds = 0.0
        self._num_samples = 0
        self._memory = 0
        self._memory_read = 0.0

    def took(self, seconds: float, waited: float, idle: float, num_samples: int) -> None:
        """A step of so many samples took so long, of which it `waited` for them, and was `idle`."""
        self._steps_of_late.append((seconds, seconds - waited, idle))
        self._seconds += seconds
        self._num_samples += num_samples

    def shared(self, parts: Mapping[str, float]) -> None:
        """The seconds of that step went to these parts: it was one of several ranks."""
        self._parts_of_late.append(parts)

    def memory_bytes(self) -> int:
        """The peak so far, as it was read not long ago."""
        now = time.perf_counter()
        if now - self._memory_read > _METER_SECONDS:
            self._memory, self._memory_read = self._meter.peak_bytes(), now
        return self._memory

    def started(self, plan: Plan) -> RunStarted:
        """The event that opens a run under `plan`."""
        return RunStarted(
            time=time.time(),
            task=self._name,
            device=plan.device_name or plan.device,
            num_samples=self._steps.num_samples,
            total_steps=self._steps.total_steps,
            plan=plan.model_dump(mode="json"),
            versions=versions(),
            total_samples=self._steps.total_samples,
            notices=(*plan.notices, *plan.exchange.notices()),
        )

    def ended(
        self, given: Plan, followed: Plan, seconds: float, finished: bool, reason: str
    ) -> RunEnded:
        """The event that closes a run which was `given` one plan and `followed` another at the end, or
        the same. Ranks speak to each other only if it is `finished`."""
        # Else what was predicted is of another choice.
        told = given.prediction if followed.choice == given.choice else None
        steps = _without_first(self._steps_of_late)
        times = zip(*steps, strict=True) if steps else ((0.0,),) * 3
        taken, computed, idle = map(median, times)
        parts = _typical(_without_first(self._parts_of_late))
        mine = self._meter.totals()
        every = self._group.exchange(mine) if finished else [mine]
        peaks = [totals["total"] for totals in every]
        return RunEnded(
            time=time.time(),
            steps=self._position.step,
            samples_seen=self._position.samples_seen,
            seconds=seconds,
            step_seconds=taken or None,
            predicted_peak_bytes=told.peak_bytes if told else None,
            measured_peak_bytes=max(peaks),
            predicted_step_seconds=told.step_seconds if told else None,
            budget_bytes=given.budget_bytes,
            finished=finished,
            reason=reason,
            rank_peak_bytes=tuple(peaks) if len(peaks) > 1 else (),
            num_skipped=self._skips.num_samples if self._skips else 0,
            predicted_totals=told.totals if told else {},
            measured_totals=max(every, key=lambda totals: totals["total"]),
            data_seconds=taken - computed,
            idle_seconds=idle,
            step_parts=parts,
            predicted_step_parts=predicted_parts(told.step_parts) if parts and told else {},
            samples_per_second=self._num_samples / self._seconds if self._seconds else None,
        )


def _typical(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each part."""
    return {part: median(one[part] for one in parts) for part in parts[0]} if parts else {}


def _without_first(steps: Iterable[_T]) -> list[_T]:
    """All but the first, which is not typical, unless it is the only one."""
    every = list(steps)
    return every[1:] or every


def parts_of(
    seconds: float,
    agreed_seconds: float,
    rank_seconds: Sequence[float],
    waited_seconds: float,
    reading_seconds: float = 0.0,
) -> dict[str, float]:
    """The seconds of one step by part. They add up to `seconds` where the device tells its time at once
    (CUDA tells that of the step before).

    Args:
        seconds: of the step, on rank 0.
        agreed_seconds: see `StepDone`.
        rank_seconds: of the passes of each rank, in which it also waits for samples.
        waited_seconds: for samples in these, on rank 0; taken to be alike on the others.
        reading_seconds: for samples before them.
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
    """What `Prediction.step_parts` says of these parts."""
    rest = {"exchange of gradients": EXCHANGE, "update": UPDATE}
    told = {COMPUTING: 0.0, EXCHANGE: 0.0, UPDATE: 0.0}
    for part, seconds in parts.items():
        told[rest.get(part, COMPUTING)] += seconds
    return told
