"""Trials: passes over parts of a batch that are measured and undone, before its first step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import final

from anybatch.compute import Replica
from anybatch.data.generators import Borrowed
from anybatch.engine import Rehearsed, Transactions
from anybatch.engine.meter import Meter
from anybatch.machine import USABLE, Device
from anybatch.planner import as_measured
from anybatch.plans import Choice, KernelChoices, Plan
from anybatch.rank import REHEARSED_PASSES
from anybatch.rank.rehearsing import Rehearsing, new_state_bytes
from anybatch.step.batches import Pieces
from anybatch.step.norms import Norms

_LEAST_QUARTERED = 8
"""Minimum number of samples in a batch of which a quarter is tried before the whole."""

_FAR = 2
"""Passes that are estimated to need more than this multiple of the available memory are not tried."""


@final
class Trials:
    """Trial passes over one batch of this rank.

    Args:
        pieces: the batch, cut with ghost batches of the given size, or None for the usual size.
        size: number of samples to plan for.
        index: number of steps before this one.
        where: the device.
    """

    def __init__(
        self,
        engine: Transactions,
        replica: Replica,
        meter: Meter,
        norms: Norms,
        pieces: Callable[[int | None], Pieces],
        size: int,
        index: int,
        where: Device,
    ) -> None:
        self._engine = engine
        self._replica = replica
        self._meter = meter
        self._norms = norms
        self._pieces = pieces
        self._size = size
        self._index = index
        self._where = where
        self._peaks: list[tuple[Choice, int]] = []  # of the passes so far

    def whole(self, plan: Plan) -> Plan | None:
        """`plan` with what was measured, if the batch fits in one piece; else None. A quarter of it is
        tried first, and its measurement is scaled up. The whole is then not run if it would need far
        too much memory or, on a CPU without an enforced budget, if it needs little."""
        size = self._size
        room = (plan.budget_bytes or 0) - plan.reserve_bytes
        used = self._meter.used_bytes()
        fixed = used + sum(p.nbytes for p in self._replica.parameters if p.requires_grad)
        is_run, is_tried = True, False

        def rehearse(choice: Choice, kernels: KernelChoices | None) -> Rehearsed | None:
            nonlocal is_run, is_tried
            if size >= _LEAST_QUARTERED and not is_tried:
                about = self._estimated(choice, fixed, room)
                if about is None:
                    return None
                needs_little = self._where.kind == "cpu" and not plan.enforced
                is_far = about.peak_bytes > self._worth_trying(room)
                if is_far or (needs_little and about.peak_bytes < room // 2):
                    is_run = False
                    return about
            is_tried = True
            return self._run(choice, size, most=2, kernels=kernels)

        # Cutting is faster than returning freed memory, unless BatchNorm normalizes over the whole.
        found = Rehearsing(
            plan, self._replica, rehearse, used, is_fixed=True, may_return=self._norms.is_whole
        ).plan()
        if found is None or found.prediction is None:
            return found
        prediction = found.prediction.model_copy(update={"rehearsed": is_run})
        return found.model_copy(update={"prediction": prediction})

    def _estimated(self, choice: Choice, fixed: int, room: int) -> Rehearsed | None:
        """The measurements of a pass over a quarter of the samples of the batch, with the peak
        above `fixed` bytes scaled up to all of them; None: memory ran out. On a CPU, where the kernel
        may end a process that needs more memory than there is, passes over smaller parts come first,
        and the first of which four times as much does not fit into `room` is scaled up instead."""
        size = self._size
        parts = [size // 4]
        while self._where.kind == "cpu" and parts[0] >= _LEAST_QUARTERED:
            parts.insert(0, parts[0] // 4)
        about: Rehearsed | None = None
        for part in parts:
            found = self._run(choice, part, most=1)
            if found is None:
                return None
            grown = max(0, found.peak_bytes - fixed)
            about = replace(found, peak_bytes=fixed + grown * size // part)
            if fixed + 4 * grown > room:
                break
        return about

    def largest_ghost(self, plan: Plan, whole: int) -> int:
        """The largest ghost batch of BatchNorm that fits on this rank, or the smallest if none
        does. They are the largest batch of any rank (`whole`), halved repeatedly."""
        size = self._size
        room, used = self._room_of_passes(plan), self._meter.used_bytes()
        halves: list[int] = []  # ascending
        half = whole
        while (half := half // 2) > 2:
            halves.insert(0, half)
        largest = halves[0] if halves else whole
        for before, ghost in pairwise((0, *halves)):
            if before >= size:  # was tried: this rank has no more samples
                largest = ghost
                continue
            found = self._run(plan.choice, min(ghost, size), most=3)
            if found is None or not found.fits or found.peak_bytes > room:
                break
            largest = ghost
            if 2 * found.peak_bytes - used > self._worth_trying(room):
                break
        return largest

    def _worth_trying(self, room: int) -> int:
        """Estimated bytes up to which a pass is tried although it may not fit into `room`: on a CPU no
        more than is free, since the kernel may end a process that needs more."""
        free = self._where.free_bytes
        return _FAR * room if free is None else min(_FAR * room, max(room, int(USABLE * free)))

    def _room_of_passes(self, plan: Plan) -> int:
        """Bytes available to passes: the budget without its reserve and without the optimizer states
        that the first update creates."""
        states = new_state_bytes(plan, self._replica)
        return (plan.budget_bytes or 0) - plan.reserve_bytes - states

    def rehearsed(self, plan: Plan, is_fixed: bool) -> Plan | None:
        """`plan` after it was rehearsed with passes over the batch; None if its choice `is_fixed` and
        does not fit. Raises `NoPlanFits`."""
        used = self._meter.used_bytes()
        room = self._room_of_passes(plan)

        def rehearse(choice: Choice, kernels: KernelChoices | None) -> Rehearsed | None:
            size = choice.micro_batch
            is_last = size <= plan.task.unit or plan.budget_bytes is None
            enough = None if is_last else room  # a smaller one will be tried
            if enough is not None and (peak := self._known_peak(choice)) > enough:
                return Rehearsed(math.inf, peak, fits=False)
            return self._run(choice, size, REHEARSED_PASSES, kernels, enough)

        found = Rehearsing(plan, self._replica, rehearse, used, is_fixed=is_fixed).plan()
        if found is None:
            return None
        if self._norms.is_synchronised:  # each pass was one ghost batch, whatever was asked for
            choice = found.choice.model_copy(update={"micro_batch": plan.choice.micro_batch})
            found = found.model_copy(update={"choice": choice})
        return as_measured(found, plan)

    def _known_peak(self, choice: Choice) -> int:
        """Bytes that passes under `choice` need at least, from trials of the same kind over at most as
        many samples; 0 if there were none."""
        alike = (
            peak
            for tried, peak in self._peaks
            if (tried.kind, tried.precision) == (choice.kind, choice.precision)
            and tried.micro_batch <= choice.micro_batch
        )
        return max(alike, default=0)

    def _run(
        self,
        choice: Choice,
        size: int,
        most: int,
        kernels: KernelChoices | None = None,
        enough: int | None = None,
    ) -> Rehearsed | None:
        """Measure at most `most` passes over `size` samples of the batch, and undo them; a pass of more
        than `enough` bytes is the last. None: memory ran out."""
        source = self._pieces(size if self._norms.is_whole and size < self._size else None)
        changes = {"micro_batch": size, "evaluation_batch": min(size, choice.evaluation_batch)}
        tried = choice.model_copy(update=changes)
        try:
            with Borrowed(), self._meter.aside(), source.named_in_errors():
                found = self._engine.rehearsal.run(
                    self._index, source, tried, self._engine.plan.choice, most, kernels, enough
                )
            if found is not None and kernels is None:
                self._peaks.append((tried, found.peak_bytes))
            return found
        finally:
            source.put_back()
