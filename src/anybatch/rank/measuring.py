"""Measuring: the micro-batch for a model that no trace could follow, from passes that were run.

    1. two small micro-batches                      bytes lie on a line through both, nearly
    2. the largest for which the line has room      was the line right?
    3. if not: between what fitted and what did not, or further up

Each is measured under the budget, with gradients in memory, on the first samples of the first step, and
nothing of it remains. What the update takes is not measured, since an update would remain: it is
reckoned from the sizes of parameters and states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from anybatch.compute import Replica
from anybatch.engine import Rehearsed
from anybatch.machine import DeviceKind
from anybatch.planner.reserve import reserve_of
from anybatch.plans import Choice, Plan, Prediction

_MOST_TRIES = 5
_FURTHEST = 8
"""No further than so many times the largest micro-batch that fitted so far: the line is only that."""

_CLOSE = 0.9
"""A micro-batch this near the largest that the line has room for is large enough."""

_SAME_TIME = 1.02

_LATER_BYTES = 1624 << 10
"""What two passes do not show: Python's objects, kernels for the rest of a step, holes of the heap."""


@dataclass(frozen=True, slots=True)
class _Size:
    """A micro-batch that fitted: the peak of a run with it, and seconds as `Rehearsed` has them."""

    micro_batch: int
    peak_bytes: int
    seconds: float


class Measuring:
    """Finds a micro-batch for `plan`, on one rank.

    Args:
        plan: without a prediction.
        replica: before its first step.
        rehearse: runs two passes under a choice; None: memory ran out.
        used_bytes: in use before any pass.
    """

    def __init__(
        self,
        plan: Plan,
        replica: Replica,
        rehearse: Callable[[Choice], Rehearsed | None],
        used_bytes: int,
    ) -> None:
        self._plan = plan
        self._rehearse = rehearse
        self._whole = plan.largest_amount
        self._unit = min(plan.task.ghost_batch or 1, self._whole)
        budget = plan.budget_bytes
        kind: DeviceKind = "cpu" if plan.device == "cpu" else "cuda"
        self._room = None if budget is None else budget - reserve_of(budget, kind)
        self._gradients = sum(p.nbytes for p in replica.parameters if p.requires_grad)
        self._states = replica.state_bytes()
        first, _ = replica.update_bytes()
        self._commit = first, first - self._states
        self._before = used_bytes
        self._later = _LATER_BYTES if plan.device == "cpu" else 0
        self._fitting: list[_Size] = []
        self._too_large = self._whole + 1

    def plan(self) -> Plan | None:
        """The plan with the fastest micro-batch that was found to fit, and what it is predicted to
        cost; None if none fitted. Raises what the data, the model or the loss raises."""
        first = self._in_units(min(2, self._whole))
        if not self._try(first) and first > self._unit:
            self._try(self._unit)
        if self._fitting:
            self._try(self._in_units(min(4 * self._fitting[-1].micro_batch, self._whole)))
            for _ in range(_MOST_TRIES):
                size = self._next()
                if size is None:
                    break
                self._try(size)
        if not self._fitting:
            return None
        least = min(one.seconds for one in self._fitting)
        best = min(
            (one for one in self._fitting if one.seconds <= least * _SAME_TIME),
            key=lambda one: one.peak_bytes,
        )
        return self._planned(best)

    def _next(self) -> int | None:
        """A micro-batch worth trying, larger than all that fitted."""
        low = max(self._fitting, key=lambda one: one.micro_batch)
        goal = min(self._by_line(), _FURTHEST * low.micro_batch, self._whole)
        if goal >= self._too_large:
            goal = (low.micro_batch + self._too_large) // 2
        size = self._in_units(goal)
        near = low.micro_batch >= goal * _CLOSE or size <= low.micro_batch
        return None if near or size >= self._too_large else size

    def _by_line(self) -> int:
        """Where the line through the two largest that fitted meets the room."""
        if self._room is None or len(self._fitting) < 2:
            return self._whole
        low, high = sorted(self._fitting, key=lambda one: one.micro_batch)[-2:]
        slope = (high.peak_bytes - low.peak_bytes) / (high.micro_batch - low.micro_batch)
        if slope <= 0:
            return self._whole
        return int(high.micro_batch + max(0.0, (self._room - high.peak_bytes) / slope))

    def _in_units(self, size: int) -> int:
        """`size` in whole ghost batches, evened out over the passes of a step."""
        units = max(1, size // self._unit)
        passes = -(-self._whole // (units * self._unit))
        return min(units, -(-self._whole // (passes * self._unit))) * self._unit

    def _try(self, size: int) -> bool:
        """Whether it fits."""
        if any(one.micro_batch == size for one in self._fitting) or size >= self._too_large:
            return False
        found = self._rehearse(self._choice(size))
        if found is not None:
            at_update = self._before + self._gradients + self._commit[0]
            peak = max(found.peak_bytes + self._states, at_update) + self._later
            if self._room is None or peak <= self._room:
                self._fitting.append(_Size(size, peak, found.seconds))
                return True
        self._too_large = size
        return False

    def _choice(self, size: int) -> Choice:
        changes = {"micro_batch": size, "evaluation_batch": size}
        return self._plan.choice.model_copy(update=changes)

    def _planned(self, best: _Size) -> Plan:
        known = {
            "parameters and buffers": self._before,
            "gradients": self._gradients,
            "optimizer state": self._states,
        }
        rest = max(0, best.peak_bytes - sum(known.values()))
        seconds = best.seconds * self._whole
        choice = self._choice(best.micro_batch)
        told = Prediction(
            choice=choice,
            peak_bytes=best.peak_bytes,
            evaluation_peak_bytes=best.peak_bytes,
            commit_bytes=self._commit,
            step_seconds=seconds,
            by_kind={"activations and temporary": rest, **known},
            method="measured in passes over real samples; the update reckoned from its tensors",
            step_parts={"forward and backward": seconds},
            seconds_method="measured in passes over real samples; without the update",
        )
        return self._plan.model_copy(update={"choice": choice, "prediction": told})
