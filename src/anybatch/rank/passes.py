"""Passes: the part of a global step that one rank runs: which samples, in which passes.

    global batch   |------------- share of rank 0 -------------|------- share of rank 1 -------|
    passes         |-- micro-batch --|-- micro-batch --|-------|-- micro-batch --|-------------|

If ranks communicate inside every pass, all run as many passes as the rank with the most. If they also
compute BatchNorm together, every ghost batch is divided over all ranks. If samples differ in length,
shares are measured by total length, and a micro-batch can be as large, when padded, as the plan's
micro-batch of the longest samples. In a reproducible run micro-batches are grains, and shares are whole
parts, measured by number of samples.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from anybatch.data import (
    Bad,
    BatchCopies,
    Extent,
    Loader,
    Place,
    StepData,
    StreamLoader,
    batch_size,
    differs,
    divided_ghosts,
    ghosts,
    least_drawn,
    micro_batches,
    micro_batches_by_length,
    on_device,
    padded_size,
    part_at,
    share,
    shows_samples,
    slice_batch,
    to_device,
)
from anybatch.engine import MicroBatch, Pulse
from anybatch.errors import DataError
from anybatch.parallel import Group
from anybatch.plans import Choice, Plan

_ALONE = 2
"""Number of samples that are collated separately, to check whether the result is the same as in a
larger batch."""


class Cutting:
    """Cuts global batches for the ranks of `group` under `plan`, by the shares of the group."""

    def __init__(self, plan: Plan, group: Group) -> None:
        self._ghost = plan.task.ghost_batch
        self._grain, self._part = plan.task.grain, plan.task.part
        self._longest = plan.task.longest or 1
        self._divides_ghosts = plan.norms == "synchronised"
        self._group = group

    def passes(self, choice: Choice, extent: Extent) -> Passes:
        """The passes of this rank in a step with `extent`."""
        group, ghost = self._group, self._ghost
        if self._divides_ghosts and ghost:
            parts = divided_ghosts(extent.num_samples, ghost, group.shares, group.rank)
            return Passes(parts, [[len(part)] if part else [] for part in parts])
        cut, padded = self._micro_batches(choice, extent, group.rank), self._padded(extent)
        if not group.lockstep:
            num_drawn = self._num_drawn(extent, len(cut))
            if num_drawn:
                cut = self._micro_batches(choice, extent, group.rank, num_drawn)
            places = self._places(extent)
            return Passes(cut, ghost, padded=padded, places=places, num_drawn=num_drawn)
        most = max(len(self._micro_batches(choice, extent, rank)) for rank in range(group.size))
        # Any samples will do, since they get no weight. A norm needs several.
        again = cut[0] if cut else range(min(ghost or 1, extent.num_samples))
        num_idle = most - len(cut)
        return Passes([*[again] * num_idle, *cut], ghost, num_idle, padded)

    def amounts(self, extent: Extent, shares: Sequence[float]) -> list[int]:
        """The work of each rank in a step with `extent`, under `shares`: see `Extent.amount`."""
        parts = (self._share(extent, shares, rank) for rank in range(self._group.size))
        return [extent.amount(part) for part in parts]

    def _share(self, extent: Extent, shares: Sequence[float], rank: int) -> range:
        if self._part is not None:
            return share(extent.num_samples, shares, rank, self._part)
        return extent.share(shares, rank, self._ghost)

    def _places(self, extent: Extent) -> Callable[[int], tuple[int, int]] | None:
        grain, part = self._grain, self._part
        if grain is None or part is None:
            return None
        return lambda start: (start // grain, part_at(start, extent.num_samples, part))

    def _padded(self, extent: Extent) -> Callable[[range], float] | None:
        lengths = extent.lengths
        if lengths is None:
            return None
        return lambda part: padded_size(lengths, part) / self._longest

    def _num_drawn(self, extent: Extent, num_passes: int) -> int:
        """Number of leading samples that are run in separate passes, with whose gradients noise is
        measured. 0 if they do not fit, or the step is a single pass, with nothing to compare to."""
        unit, part = self._ghost or 1, self._share(extent, self._group.shares, self._group.rank)
        count = -(-least_drawn(extent.num_samples) // unit) * unit
        fits = part.start == 0 and count <= extent.num_drawn and count + unit <= part.stop
        is_cut = num_passes > 1 or self._group.size > 1
        return count if fits and is_cut and self._grain is None else 0

    def _micro_batches(
        self, choice: Choice, extent: Extent, rank: int, num_drawn: int = 0
    ) -> Sequence[range]:
        part, size = self._share(extent, self._group.shares, rank), choice.micro_batch
        if extent.lengths is None or self._grain is not None:
            return micro_batches(part, size, self._ghost, extent.num_samples)
        most = size * self._longest
        parts = (range(num_drawn), range(num_drawn, part.stop)) if num_drawn else (part,)
        cuts = (micro_batches_by_length(extent.lengths, one, most, self._ghost) for one in parts)
        return [*chain.from_iterable(cuts)]


@dataclass(frozen=True)
class Passes:
    """The passes of one rank in one step."""

    parts: Sequence[range]  # positions in the global batch; empty if only other ranks have samples
    ghosts: Sequence[Sequence[int]] | int | None  # samples per ghost batch of each pass, or of all
    num_idle: int = 0
    """Number of passes that are run only because other ranks run as many. They come first, while
    buffers can still be reset to those at the start of the step."""
    padded: Callable[[range], float] | None = None
    """Maps a part to its padded size, in samples of the maximum length, if samples differ in length."""
    places: Callable[[int], tuple[int, int]] | None = None
    """Maps the first position of a pass to the numbers of its grain and of its part, if steps are cut
    into these."""
    num_drawn: int = 0  # leading samples that are run in separate passes, see `Extent`

    @property
    def num_samples(self) -> int:
        """Number of samples in the passes that count."""
        return sum(map(len, self.parts[self.num_idle :]))

    @property
    def fetched(self) -> Sequence[range]:
        """The parts that have samples."""
        if self.ghosts is None or isinstance(self.ghosts, int):
            return self.parts  # possibly a million parts: avoid a list
        return [part for part in self.parts if part]

    def micro_batch(self, number: int, batches: Iterator[Any]) -> MicroBatch:
        """Pass `number`, with the next of `batches` unless the pass has no samples."""
        part, real = self.parts[number], number >= self.num_idle
        last = number + 1 == len(self.parts)
        micro = MicroBatch(
            next(batches) if part else None,
            len(part) if real else 0,
            self._cut(number) if real else (),
            last=last,
            padded=self.padded(part) if self.padded is not None else None,
            is_drawn=part.start < self.num_drawn,
            ends_drawn=part.start < self.num_drawn == part.stop,
        )
        if self.places is None:
            return micro
        grain, place = self.places(part.start)
        ends = last or self.places(self.parts[number + 1].start)[1] > place
        return replace(micro, grain=grain, part=place, ends_part=ends)

    def _cut(self, number: int) -> Sequence[int]:
        if self.ghosts is None:
            return ()
        if isinstance(self.ghosts, int):
            return ghosts(len(self.parts[number]), self.ghosts)
        return self.ghosts[number]


class GlobalStep:
    """The samples of one global step, fetched for every attempt at the step.

    Attributes:
        kept: extent of the samples of all ranks that are not left out.
        waited_seconds: time spent waiting for samples of this rank while its device was idle.
    """

    def __init__(
        self,
        loader: Loader | StreamLoader,
        data: StepData,
        passes: Callable[[Choice, Extent], Passes],
        device: torch.device,
        pulse: Pulse,
    ) -> None:
        self.kept: Extent = data.extent
        self.waited_seconds: float = 0.0
        self._loader = loader
        self._data = data
        self._passes = passes
        self._device = device
        self._pulse = pulse
        self._given = Passes((), None)
        self._kept: deque[Any] = deque()  # batches on the host
        self._copies = BatchCopies()
        self._gaps: Sequence[int] = ()
        self._tried = False

    @property
    def num_samples(self) -> int:
        """See `Source`."""
        return self.kept.num_samples

    def micro_batches(self, choice: Choice, keep: bool = False) -> Iterator[MicroBatch]:
        """See `Source`."""
        passes = self._passes(choice, self.kept)
        self._kept.clear()
        self._copies.forget()
        # Data fetched for an attempt that did not get this far may be cut for another choice.
        if self._tried or self._data.ranges != passes.fetched:
            self._data = self._loader.redo(
                lambda extent: self._passes(choice, extent).fetched, self._gaps
            )
        self._tried = True
        self._given = passes
        fetched = self._keeping(self._data.micro_batches) if keep else self._data.micro_batches
        yield from self._run(passes, self._timed(on_device(fetched, self._device)))

    @property
    def own_samples(self) -> int:
        """See `Source`."""
        return self._given.num_samples

    def first_samples(self, most: int, batch: Any) -> tuple[Callable[[int, int], Any], int]:
        """See `engine.Source`. The samples are sliced from `batch` if it has enough of them, and each
        of its parts has a value per sample; otherwise they are collated separately."""
        parts = [part for part in self._given.parts if part][: most + 1]
        with suppress(DataError):  # which the step itself will raise
            if most <= len(parts[0]) == batch_size(batch) and shows_samples(batch):
                return partial(slice_batch, batch), most
        start, stop = parts[0].start, parts[0].stop
        for part in parts[1:]:
            stop = part.stop if part.start == stop else stop
        return partial(self._together, start), min(most, stop - start)

    @property
    def has_collate(self) -> bool:
        """See `engine.Source`."""
        return self._loader.has_collate

    def is_coupled(self, batch: Any) -> bool:
        """See `engine.Source`. Collates two of the samples separately for the comparison."""
        part = next(part for part in self._given.parts if part)
        if len(part) <= _ALONE or not self._loader.has_collate:
            return False
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                alone, again = (self._together(part.start, 0, _ALONE) for _ in range(2))
            if caught:  # for example that it draws random numbers
                return False
            return differs(slice_batch(batch, 0, _ALONE), alone) and not differs(again, alone)
        except Exception:  # the step itself will raise the error
            return False

    def _together(self, first: int, start: int, stop: int) -> Any:
        """The samples at positions `start` to `stop`, counted from `first`, collated separately."""
        batch = self._loader.together(range(first + start, first + stop))
        return to_device(batch, self._device)

    def once_more(self) -> Iterator[MicroBatch]:
        """See `Source`. Samples are fetched once and kept in host memory, as they were before a pass
        wrote to them."""
        self._copies.put_back()
        self._copies.forget()
        yield from self._run(self._given, on_device(self._let_go(), self._device))

    def _run(self, passes: Passes, batches: Iterator[Any]) -> Iterator[MicroBatch]:
        for number in range(len(passes.parts)):
            self._pulse.beat()
            yield passes.micro_batch(number, batches)

    def _keeping(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._kept.append(batch)
            if self._device.type != "cpu":  # passes get copies
                yield batch
                continue
            self._copies.keep(batch)
            yield batch
            self._copies.passed()

    def _let_go(self) -> Iterator[Any]:
        while self._kept:
            yield self._kept.popleft()

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            asked = None
            if self._device.type == "cuda":  # its queued work continues meanwhile
                asked = torch.cuda.Event()
                asked.record(torch.cuda.current_stream(self._device))
            begun = time.perf_counter()
            batch = next(batches, self)
            if asked is None or asked.query():
                self.waited_seconds += time.perf_counter() - begun
            if batch is self:
                return
            yield batch

    def describe(self, number: int) -> str:
        """See `Source`."""
        return self._loader.describe(self._given.parts[number])

    def places(self, number: int) -> Sequence[Place]:
        """See `Source`."""
        return self._loader.places(self._given.parts[number])

    def alone(self, place: Place) -> Any:
        """See `Source`."""
        self._pulse.beat()
        return to_device(self._loader.alone(place), self._device)

    def leave_out(self, bad: Sequence[Bad]) -> int:
        """See `Source`."""
        self._gaps = sorted({*self._gaps, *(one.place.position for one in bad)})
        self.kept = self._loader.extent(self._data.index, self._gaps)
        return self.kept.num_samples
