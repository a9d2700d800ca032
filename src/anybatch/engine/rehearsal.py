"""Rehearsal: passes over real samples that are timed, measured and undone.

Like a failed step, they leave nothing behind: gradients are dropped, buffers and the state that the
loss keeps are restored, and random state is set anew when the next step begins. Ranks do not
synchronize in them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from anybatch.compute.joint import Ask, nobody
from anybatch.engine.bad_sample_search import OneByOne, naming_samples
from anybatch.engine.context import PassContext
from anybatch.engine.joint import is_encoded_first
from anybatch.engine.limit import OverBudget
from anybatch.engine.source import MicroBatch, Source
from anybatch.events import step_number
from anybatch.oom import MemoryFailure, as_memory_failure
from anybatch.plans import Choice, KernelChoices
from anybatch.process.compilation import num_compilations
from anybatch.process.process_memory import trim
from anybatch.process.threads import Stopwatch

_CUDA_PASSES, _CUDA_SECONDS = 10, 1.0

_MOST_COMPILING = 4
"""Largest number of passes that are not measured because `torch.compile` compiled in them: it does for
the first size and for the second."""


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """Measurements of the passes.

    Attributes:
        seconds: time per sample (per sample of the longest length where lengths differ), including the
            time to fetch it; the median of all passes but the first, which has no gradients to add to,
            if there were more. For a single rank on CPU, time in which the thread had no core is
            excluded.
        peak_bytes: peak of bytes in use in any of the passes, above the baseline.
        fits: whether the peak was within the budget.
    """

    seconds: float
    peak_bytes: int
    fits: bool = True


@final
class Rehearsal:
    """Runs trial passes on a replica between two steps. `blame` finds the sample for which a pass
    raises an error."""

    def __init__(self, context: PassContext, blame: OneByOne | None) -> None:
        self._blame = blame
        self._replica, self._group = context.replica, context.group
        self._randomness, self._limit = context.randomness, context.limit
        self._meter, self._thread = context.meter, context.thread
        self._buffers, self._timer = context.buffers, context.timer
        # With several ranks, or a device to wait for, idle time does not mean that a core was missing.
        self._alone_on_cpu = context.group.size == 1 and context.device.type == "cpu"
        self._on_cuda = context.device.type == "cuda"

    def run(
        self,
        index: int,
        source: Source,
        choice: Choice,
        after: Choice,
        most: int,
        kernels: KernelChoices | None = None,
        enough_bytes: int | None = None,
    ) -> Rehearsed | None:
        """Run up to `most` passes of the step `index` under `choice`, on CUDA up to `_CUDA_PASSES`, and
        restore the choice `after` and the kernels. `kernels` replaces the kernel choices during these
        passes. No pass follows one that used more than `enough_bytes`. Returns None if memory ran out.

        Raises the errors of the data, the model or the loss.
        """
        self._randomness.begin(index)
        before = self._replica.kernels
        self._replica.switch(choice, kernels)
        self._limit.follow(choice.freed_memory)
        trim()  # memory that earlier passes left free must not be measured
        try:
            with self._replica.loss_untouched(), self._replica.alone(self._group.size):
                found = self._passes(step_number(index), source, choice, most, enough_bytes)
        finally:
            self._replica.switch(after, before)
            self._limit.follow(after.freed_memory)
            trim()
        if isinstance(found, MemoryFailure):
            self._thread.recover(found)
            return None
        return found

    def _pass(self, micro: MicroBatch, source: Source) -> None:
        """Run one pass as in a step, without what a joint loss compares with other passes or ranks."""
        replica, size = self._replica, micro.num_samples
        replica.begin_step()
        ask: Ask | None = None
        if replica.is_joint:
            is_encoded = is_encoded_first(micro, source, self._group)
            if is_encoded:
                replica.encode(micro.batch, size, micro.ghosts)
            if is_encoded or self._group.size > 1:
                ask = nobody
        replica.accumulate(micro.batch, size, micro.ghosts, ask)

    def _goes_on(self, seconds: Sequence[float], most: int) -> bool:
        """Returns whether to run another pass. On CUDA the first passes load kernels and take memory
        from the driver, so the median is taken over more passes."""
        if len(seconds) < most:
            return True
        settles = self._on_cuda and most > 1
        return settles and len(seconds) < _CUDA_PASSES and sum(seconds) < _CUDA_SECONDS

    def _again_and_again(self, source: Source, choice: Choice) -> Iterator[tuple[int, MicroBatch]]:
        """Yields the micro-batches of a step and their numbers repeatedly, each time without gradients,
        as a step begins; none if there are none. Where samples are sorted by length, they begin with
        the longest."""
        is_empty = False
        while not is_empty:
            is_empty = True
            self._replica.drop()
            for number, micro in enumerate(source.micro_batches(choice)):
                if not micro.is_drawn:
                    is_empty = False
                    yield number, micro
                del micro

    def _passes(
        self, step: int, source: Source, choice: Choice, most: int, enough_bytes: int | None
    ) -> Rehearsed | MemoryFailure:
        self._buffers.forget()
        each: list[tuple[float, float]] = []
        try:
            self._group.begin()
            self._buffers.save()
            self._meter.begin_lap()
            passes = self._again_and_again(source, choice)
            num_compiling = 0
            while self._goes_on([seconds for seconds, _ in each], most):
                before = num_compilations()
                with self._timer.running():
                    number, micro = next(passes, (0, None))
                    if micro is None or not micro.num_samples:
                        break
                    with (
                        naming_samples(self._blame, source, number, step),
                        self._limit.watched(choice.kind, micro.batch),
                    ):
                        stopwatch = Stopwatch()
                        self._pass(micro, source)
                        idle = stopwatch.idle_seconds() if self._alone_on_cpu else 0.0
                each.append((max(0.0, self._timer.wait() - idle), micro.amount))
                del micro
                if num_compilations() > before and num_compiling < _MOST_COMPILING:
                    num_compiling += 1
                    each.pop()
                    self._meter.drop_lap()
                elif enough_bytes is not None and self._meter.lap_bytes() > enough_bytes:
                    break
            if not each:  # this rank has no samples
                return Rehearsed(0.0, self._meter.lap_bytes())
            rates = [seconds / amount for seconds, amount in each[1:] or each]
            return Rehearsed(statistics.median(rates), self._meter.lap_bytes())
        except OverBudget as error:
            return Rehearsed(math.inf, error.used_bytes, fits=False)
        except Exception as error:
            failure = as_memory_failure(error)
            if failure is None:
                raise
            return failure
        finally:
            self._thread.clear()
            self._replica.drop()
            self._buffers.put_back()
