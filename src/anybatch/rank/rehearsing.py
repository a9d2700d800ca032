"""Rehearsing: confirms or adjusts a plan by running passes over real samples on the actual device.

    1. the planned micro-batch             does it fit the budget?
    2. too large: half of it, and so on    down to the smallest possible one
    3. room is left: a larger one          between what fitted and what did not, or beyond
    4. nothing fits: the next leaner way   more recompute; finally, freed memory is returned
    5. on CUDA, the plan's rivals          one that is faster
    6. on CUDA, convolutions               on channels-last images, or in torch's default layout

Peak and time of the plan are then the measured ones. Each try runs a few passes under the budget on the
first samples of the first step, with gradients in memory, and leaves nothing behind. An update would
leave changes, so its memory is computed from the sizes of parameters and states, or from a trace.

If a trace has predicted the choice, it is tried first, and a larger micro-batch is tried only if memory
limited the choice. Without a prediction the search starts with small micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from anybatch.compute import Replica
from anybatch.engine import Rehearsed, held_bytes
from anybatch.errors import NoPlanFits
from anybatch.machine import DeviceKind
from anybatch.planner.comparison import rejected_after
from anybatch.planner.costs import Sizes
from anybatch.planner.kernel_rule import in_default_layout
from anybatch.planner.ranks import budget_for, least_budget, reserve_of
from anybatch.plans import Choice, KernelChoices, Plan, Prediction
from anybatch.units import format_bytes

REHEARSED_PASSES = 3
"""Number of passes of each try of a rehearsal. The first has no gradients to add to, and later ones see
the CPU heap as earlier passes leave it."""

_MOST_TRIES = 5
_FURTHEST = 8
"""Limit for the next micro-batch, as a multiple of the largest that fitted so far: peaks are only
approximately linear in the size."""

_PAYS = 0.96
"""Another choice or layout must take less than this fraction of the time of the plan's passes."""

_CLOSE = 0.9
"""A micro-batch of at least this fraction of the extrapolated maximum is large enough."""

_BOUND = 0.8
"""Memory limited a choice if its predicted peak is more than this fraction of the available memory."""

_USED = 0.85
"""A choice that memory limited is replaced by a larger one if its measured peak is less than this
fraction of the available memory."""


_REST = "allocator and libraries"
"""Kind of the bytes that were measured in addition to those of tensors."""


@dataclass(frozen=True, slots=True)
class _Size:
    """A measured micro-batch: the peak of a run with it, and the seconds per sample of its passes."""

    micro_batch: int
    peak_bytes: int
    seconds: float


class Rehearsing:
    """Finds the choice of `plan` that fits, on one rank or on several that rehearse at the same time.

    Args:
        plan: plan predicted by a trace, or without a prediction.
        replica: replica before its first step.
        rehearse: runs passes under a choice, with the given kernels or those of the plan, and returns
            what they took on the rank that took the most; None: memory ran out on a rank.
        used_bytes: memory in use before any pass.
        is_fixed: whether the micro-batch and the recomputation must not be changed.
        may_return: whether freed memory may be returned to the operating system, which is slow.
    """

    def __init__(
        self,
        plan: Plan,
        replica: Replica,
        rehearse: Callable[[Choice, KernelChoices | None], Rehearsed | None],
        used_bytes: int,
        is_fixed: bool = False,
        may_return: bool = True,
    ) -> None:
        self._plan = plan
        self._rehearse = rehearse
        self._fixed = is_fixed or plan.task.grain is not None
        self._may_return = may_return and plan.device == "cpu" and plan.enforced
        self._whole = plan.largest_amount
        self._unit = min(plan.task.unit, self._whole)
        self._sizes = Sizes(self._whole, self._unit)
        budget = plan.budget_bytes
        self._kind: DeviceKind = "cpu" if plan.device == "cpu" else "cuda"
        self._room = None if budget is None else budget - reserve_of(budget, self._kind)
        self._gradients = sum(p.nbytes for p in replica.parameters if p.requires_grad)
        self._states = new_state_bytes(plan, replica)
        first = replica.update_bytes()
        self._commit = first, max(0, first - self._states)
        if plan.prediction is not None:
            self._commit = plan.prediction.commit_bytes
        self._before = used_bytes
        self._held = min(used_bytes, held_bytes([replica.model]))
        # The smallest peak that did not fit, with the smallest micro-batch.
        self._least: tuple[int, Choice] | None = None
        self._begin()

    def plan(self) -> Plan | None:
        """The plan with the first way that fits, its largest micro-batch, and its measured peak and
        time; None if the micro-batch is fixed and does not fit.

        Raises `NoPlanFits` if nothing fits, and any error of the data, the model or the loss.
        """
        ways = list(self._ways())
        for number, way in enumerate(ways):
            self._begin()
            self._search(way, is_planned=number == 0)
            if self._fitting:
                best = max(self._fitting, key=lambda size: size.micro_batch)
                plan = self._planned(way, best, ways[number + 1 :])
                return self._in_faster_layout(*self._fastest(plan, best))
        if self._fixed:
            return None
        raise self._refusal(ways[-1])

    def _ways(self) -> Iterator[Choice]:
        """The planned choice, and leaner ones that differ in more than the micro-batch."""
        leaner = [] if self._fixed else self._plan.ladder
        ways = [self._plan.choice]
        for choice in leaner:
            if _way(choice) not in map(_way, ways):
                ways.append(choice)
        yield from ways
        if self._may_return:
            for way in ways:
                if way.freed_memory == "kept":
                    yield way.model_copy(update={"freed_memory": "returned"})

    def _begin(self) -> None:
        self._fitting: list[_Size] = []
        self._larger: list[_Size] = []  # measured, and too large
        self._too_large = self._whole + 1

    def _search(self, way: Choice, is_planned: bool) -> None:
        """Find the micro-batches of `way` that fit, the largest among them."""
        prediction = self._plan.prediction
        size = way.micro_batch if prediction or self._fixed else self._in_units(min(2, self._whole))
        while not self._try(way, size):
            if self._fixed or size <= self._unit:
                return
            size = self._in_units(size // 2)
        if self._fixed or (is_planned and prediction and not self._may_grow(prediction, way)):
            return
        for _ in range(_MOST_TRIES):
            larger = self._next()
            if larger is None:
                return
            self._try(way, larger)

    def _may_grow(self, prediction: Prediction, way: Choice) -> bool:
        """Whether memory limited the choice, but there is room left."""
        tried = self._fitting[-1]
        if tried.micro_batch < way.micro_batch:
            return True  # the planned size did not fit
        bound = self._room is not None and prediction.peak_bytes > _BOUND * self._room
        return bound and self._room is not None and tried.peak_bytes < _USED * self._room

    def _next(self) -> int | None:
        """The next micro-batch to try, larger than all that fitted; None if none is worth trying."""
        low = max(self._fitting, key=lambda one: one.micro_batch)
        goal = min(self._by_line(), _FURTHEST * low.micro_batch, self._whole)
        if goal >= self._too_large:
            goal = (low.micro_batch + self._too_large) // 2
        size = self._in_units(goal)
        near = low.micro_batch >= goal * _CLOSE or size <= low.micro_batch
        return None if near or size >= self._too_large else size

    def _by_line(self) -> int:
        """The micro-batch at which the line through the largest that fitted and its neighbour reaches
        the available memory: the next larger one if its peak was measured, otherwise the next smaller
        one; if there is neither, the origin."""
        if self._room is None:
            return self._whole
        *lower, high = sorted(self._fitting, key=lambda one: one.micro_batch)
        if not lower and not self._larger:
            return int(high.micro_batch * self._room / max(1, high.peak_bytes))
        other = min(self._larger or lower[-1:], key=lambda one: one.micro_batch)
        slope = (high.peak_bytes - other.peak_bytes) / (high.micro_batch - other.micro_batch)
        if slope <= 0:
            return self._whole
        return int(high.micro_batch + max(0.0, (self._room - high.peak_bytes) / slope))

    def _in_units(self, size: int) -> int:
        """A micro-batch of at most `size`, but at least the smallest: one that leaves no pass short, if
        it takes at most a third more passes. So measured peaks, which vary from run to run, rarely lead
        to another size."""
        return self._sizes.whole_part(self._sizes.in_units(max(size, self._unit)))

    def _try(self, way: Choice, size: int) -> bool:
        """Whether micro-batch `size` of `way` fits."""
        if any(one.micro_batch == size for one in self._fitting) or size >= self._too_large:
            return False
        choice = self._choice(way, size)
        found = self._measured(choice)
        if found is not None:
            if self._fits(found):
                self._fitting.append(found)
                return True
            self._larger.append(found)
            is_least = self._least is None or found.peak_bytes < self._least[0]
            if size <= self._unit and is_least:  # passes of larger ones may have been stopped
                self._least = found.peak_bytes, choice
        self._too_large = size
        return False

    def _measured(self, choice: Choice, kernels: KernelChoices | None = None) -> _Size | None:
        """The measured peak and time of a run under `choice`; None if memory ran out."""
        found = self._rehearse(choice, kernels)
        if found is None:
            return None
        at_update = self._before + self._gradients + self._commit[0]
        peak = max(found.peak_bytes + self._states, at_update)
        return _Size(choice.micro_batch, peak, found.seconds)

    def _fits(self, size: _Size) -> bool:
        return self._room is None or size.peak_bytes <= self._room

    def _fastest(self, plan: Plan, best: _Size) -> tuple[Plan, _Size]:
        """`plan`, or one of its rivals whose passes are clearly faster."""
        for rival in () if self._fixed else plan.rivals:
            found = self._measured(rival.choice)
            if found is None or not self._fits(found) or found.seconds >= _PAYS * best.seconds:
                continue
            best, self._plan = found, self._plan.taking(rival)
            prediction = self._prediction(rival.choice, found)
            plan = plan.taking(rival).model_copy(update={"prediction": prediction})
        return plan.model_copy(update={"rivals": ()}), best

    def _in_faster_layout(self, plan: Plan, best: _Size) -> Plan:
        """`plan`, with convolutions on channels-last images only if these are not slower than in
        torch's default layout. In a reproducible run measured times must not affect the computation."""
        if not plan.kernels.channels_last or plan.task.grain is not None:
            return plan
        kernels = plan.kernels.model_copy(update={"channels_last": False})
        other = self._measured(plan.choice, kernels)
        if other is None or not self._fits(other) or other.seconds >= _PAYS * best.seconds:
            return plan
        prediction = self._prediction(plan.choice, other)
        return in_default_layout(plan.model_copy(update={"prediction": prediction}), best.seconds)

    def _choice(self, way: Choice, size: int) -> Choice:
        if size == way.micro_batch and self._plan.prediction is not None:
            return way
        evaluation = way.evaluation_batch if self._plan.prediction is not None else size
        changes = {
            "micro_batch": size,
            "evaluation_batch": max(1, evaluation * size // way.micro_batch)
            if size < way.micro_batch
            else evaluation,
        }
        return way.model_copy(update=changes)

    def _planned(self, way: Choice, best: _Size, leaner: list[Choice]) -> Plan:
        choice = self._choice(way, best.micro_batch)
        ladder = [*self._halves(choice), *leaner]
        found = {
            "choice": choice,
            "ladder": tuple(ladder),
            "prediction": self._prediction(choice, best),
            "rejected": rejected_after(self._plan, choice, self._why_not(choice)),
        }
        return self._plan.model_copy(update=found).slowed(self._correction(way, best))

    def _why_not(self, choice: Choice) -> str:
        """Why `choice` was taken in place of the planned one."""
        if choice.micro_batch > self._plan.choice.micro_batch:
            return "left memory unused in the rehearsal, where a larger one fits"
        return "needed more memory in the rehearsal than the budget leaves"

    def _correction(self, way: Choice, best: _Size) -> float:
        """Measured / predicted time of `best`, or of the first other micro-batch whose time was
        predicted."""
        for size in (best, *self._fitting):
            choice = self._choice(way, size.micro_batch)
            predicted = self._plan.predicted_seconds(choice)
            prediction = self._plan.prediction
            if predicted and prediction is not None:
                update = prediction.step_parts.get("update", 0.0)
                return (size.seconds * self._whole + update) / predicted
        return 1.0

    def _halves(self, choice: Choice) -> Iterator[Choice]:
        """The choices with a smaller micro-batch, in case memory runs out after all."""
        size, evaluation = choice.micro_batch, choice.evaluation_batch
        while not self._fixed and size > self._unit:
            size, evaluation = self._in_units(size // 2), max(1, evaluation // 2)
            yield choice.model_copy(update={"micro_batch": size, "evaluation_batch": evaluation})

    def _prediction(self, choice: Choice, best: _Size) -> Prediction:
        """The measurements of the rehearsal, completed with values that only a trace provides."""
        planned, seconds = self._plan.prediction, best.seconds * self._whole
        rest = "device context" if self._kind == "cuda" else _REST
        known = {
            "parameters and buffers": self._held,
            "gradients": self._gradients,
            "optimizer state": self._states,
            rest: self._before - self._held,
        }
        by_kind = {"activations and temporary": max(0, best.peak_bytes - sum(known.values()))}
        by_kind |= known
        if planned is None:
            planned = Prediction(
                peak_bytes=0,
                evaluation_peak_bytes=best.peak_bytes,
                step_seconds=seconds,
                step_parts={"forward and backward": seconds},
                seconds_method="measured in passes over real samples; without the update",
            )
        else:
            # A remembered plan has the rest that was measured before.
            traced = {kind: size for kind, size in planned.by_kind.items() if kind != _REST}
            beyond = best.peak_bytes - sum(traced.values())
            if choice == self._plan.choice and traced and beyond >= 0:
                by_kind = {**traced, _REST: beyond}
            planned = _with_passes(planned, seconds)
        return planned.model_copy(
            update={
                "choice": choice,
                "peak_bytes": max(best.peak_bytes, planned.evaluation_peak_bytes),
                "commit_bytes": self._commit,
                "by_kind": by_kind,
                "totals": {},
                "learned_bytes": 0,
                "rehearsed": True,
                "method": "measured in passes over real samples; the update from its tensors",
            }
        )

    def _refusal(self, last: Choice) -> NoPlanFits:
        sentence = f"no plan fits the budget of {format_bytes(self._plan.budget_bytes or 0)}"
        if self._room is not None:
            sentence += f", of which {format_bytes(max(0, self._room))} are planned for"
        sentence += ": "
        if self._least is None:
            sentence += (
                f"memory ran out in passes under the leanest one ({last.describe()}). Give it more."
            )
            return NoPlanFits(sentence)
        peak, choice = self._least
        # Measurements vary slightly between processes.
        least = budget_for(peak + reserve_of(peak, self._kind), self._kind)
        sentence += (
            f"the leanest was measured to need {format_bytes(peak)} ({choice.describe()}). Give it at"
            f" least {least_budget(least)}."
        )
        return NoPlanFits(sentence, least_bytes=least)


def new_state_bytes(plan: Plan, replica: Replica) -> int:
    """Bytes of optimizer states that the first update will create on the device."""
    has_states = bool(replica.optimizer.state) or plan.choice.optimizer_states != "device"
    return 0 if has_states else replica.state_bytes()


def can_rehearse(plan: Plan) -> bool:
    """Whether the ranks of `plan` can run passes independently: each has the whole model, and they
    communicate once per step."""
    return plan.norms == "ghosts" and plan.parallel in ("single", "replicate")


def _with_passes(prediction: Prediction, seconds: float) -> Prediction:
    """`prediction`, with `seconds` as the time of the passes of a step."""
    parts = dict(prediction.step_parts)
    passes = [name for name in ("forward", "backward", "recompute") if name in parts]
    factor = seconds / max(1e-12, sum(parts[name] for name in passes))
    parts |= {name: parts[name] * factor for name in passes}
    return prediction.model_copy(
        update={
            "step_parts": parts,
            "step_seconds": sum(parts.values()),
            "seconds_method": "measured in passes on this device before the first step",
        }
    )


def _way(choice: Choice) -> tuple[object, ...]:
    """The properties of a choice other than its batch sizes."""
    return choice.kind, choice.optimizer_states, choice.precision, choice.update
