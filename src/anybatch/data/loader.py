"""Loaders of the micro-batches of each global step. `Loader` is the one for map-style data sets.

    begin(index, cut)  start at this step; `cut` determines what this rank takes of each step
    next_step()        the next global step, or None when training is over
    redo(cut, gaps)    the last step once more, cut differently: the same samples, or all of them
                       except the bad ones
    commit()           the step is done (a stream releases its samples; here nothing is held)

`Loader` holds positions and indices, never samples, so a global batch may be arbitrarily large. A step
is identified by its index, as in `Steps`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import numpy as np
from torch import Tensor

from anybatch.data.collation import Collate
from anybatch.data.cut import around, positions
from anybatch.data.failure import BadSamples, Place, fetched, format_samples
from anybatch.data.fetch import Piece, Request, SampleFetch, open_fetch
from anybatch.data.lengths import Extent, lengths_of_step, num_drawn, ordered
from anybatch.data.order import Order
from anybatch.data.schedule import Steps
from anybatch.data.workers import WorkerPool
from anybatch.errors import InputError
from anybatch.events import step_number

Cut = Callable[[Extent], Sequence[range]]
"""A function from the samples of a global step to the micro-batches of this rank: ranges of these
samples, none of them empty. It must return the same ranges for the same extent."""


@dataclass(frozen=True, slots=True)
class StepData:
    """One global step as seen by this rank. Everything from `ranges` on is set when it is cut.

    Attributes:
        index: number of steps before it.
        epoch: epoch in which it starts.
        first_sample: number of samples in the steps before it, over all ranks.
        num_samples: number of samples that this step takes from the order, over all ranks.
        epoch_end: whether it takes the last (used) sample of an epoch.
        next_epoch: epoch of the sample after the step.
        ranges: this rank's micro-batches, as positions among the samples of the global batch that are
            kept.
        micro_batches: the collated batches of `ranges`, in order, fetched on demand.
        extent: the samples of all ranks that are not left out.
        gaps: positions of the samples that are left out, sorted.
    """

    index: int
    epoch: int
    first_sample: int
    num_samples: int
    epoch_end: bool
    next_epoch: int
    ranges: Sequence[range] = ()
    micro_batches: Iterator[Any] = field(default_factory=lambda: iter(()))
    extent: Extent = field(default_factory=lambda: Extent(0))
    gaps: Sequence[int] = ()


class StepLoader(ABC):
    """Base class of `Loader` and `StreamLoader`; see the module docstring.

    Attributes:
        has_collate: whether samples are collated by a user function.
        can_have_workers: whether samples can be loaded by `num_workers` processes.
    """

    can_have_workers: bool

    def __init__(self, collate: Collate | None) -> None:
        self.has_collate: bool = collate is not None
        self._cut: Cut | None = None
        self._next = 0
        self._gaps: Sequence[int] = ()  # of the step returned next, or returned last
        self._life = 0  # counts calls of `begin` and `close`, to detect stale iterators
        self._current: StepData | None = None

    def begin(self, index: int, cut: Cut) -> None:
        """Makes step `index` the next one, under `cut`; discards prefetched batches."""
        self._next, self._cut, self._gaps = index, cut, ()
        self._life += 1

    def next_step(self, gaps: Sequence[int] = ()) -> StepData | None:
        """Returns the next global step, without the samples at positions `gaps` (sorted) of its global
        batch; None when training is over. Does not collate anything yet.

        Raises `DataError` if a stream fails or yields no sample.
        """
        assert self._cut is not None  # `begin` was called
        step = self._step(self._next)
        if step is None:
            return None
        self._next += 1
        self._gaps = gaps
        extent = self.extent(step.index, gaps)
        ranges = self._cut(extent)
        batches = self._micro_batches(step, ranges, self._life)
        self._current = replace(
            step, ranges=ranges, micro_batches=batches, extent=extent, gaps=gaps
        )
        return self._current

    def redo(self, cut: Cut, gaps: Sequence[int] = ()) -> StepData:
        """Returns the last step of `next_step` again, under `cut`, which also applies to later
        steps."""
        assert self._current is not None  # `next_step` was called
        self.begin(self._current.index, cut)
        data = self.next_step(gaps)
        assert data is not None  # it was there before
        return data

    def commit(self) -> None:  # noqa: B027 - nothing is a good default
        """Marks the step as done and releases its samples, if they are held."""

    def close(self) -> None:
        """Ends the worker processes. The loader yields nothing afterwards."""
        self._life += 1
        self._cut = None

    def describe(self, part: range) -> str:
        """Describes the samples of `part` of the current step, for messages; at most eight are
        listed."""
        names = [place.name for place in self.places(part[:8])]
        return format_samples(names, len(part)) if names else "no samples"

    @abstractmethod
    def extent(self, index: int, gaps: Sequence[int] = ()) -> Extent:
        """Returns the samples of step `index`, of all ranks, without those at positions `gaps`."""

    @abstractmethod
    def places(self, part: range) -> list[Place]:
        """Returns the samples of `part` of the current step."""

    @abstractmethod
    def alone(self, place: Place) -> Any:
        """Returns one sample of the current step as a batch, fetched in this process."""

    @abstractmethod
    def together(self, part: range) -> Any:
        """Returns the samples of `part` of the current step as one batch, fetched in this process."""

    @abstractmethod
    def _step(self, index: int) -> StepData | None:
        """Returns step `index` before it is cut; None when training is over."""

    @abstractmethod
    def _fetched(self, step: StepData, number: int, parts: Sequence[range]) -> Any:
        """Returns the batch of `parts[number]` of `step`."""

    def _micro_batches(self, step: StepData, ranges: Sequence[range], life: int) -> Iterator[Any]:
        for number, part in enumerate(ranges):
            if life != self._life:
                raise InputError(
                    f"step {step_number(step.index)} has been begun anew: take the micro-batches of the"
                    " newer StepData."
                )
            ask = partial(self._fetched, step, number, ranges)
            yield fetched(ask, positions(part, self._gaps))


@final
class Loader(StepLoader):
    """Loads training data by index, in the global order.

    `num_workers` processes prefetch batches, also across steps; tensors in memory are faster without
    workers, and ignore this argument. `pin_memory` prepares the workers' batches for asynchronous
    copies to CUDA devices. `lengths` are the lengths of the samples by index, as `lengths_of` returns
    them; with `by_length` the samples of a global batch are sorted by length, longest first.
    """

    def __init__(
        self,
        dataset: Any,
        steps: Steps,
        *,
        collate: Collate | None = None,
        seed: int = 0,
        shuffle: bool = True,
        num_workers: int = 0,
        pin_memory: bool = False,
        lengths: Tensor | None = None,
        by_length: bool = False,
    ) -> None:
        super().__init__(collate)
        self._steps = steps
        self._lengths = lengths
        self._by_length = by_length
        self._order = (
            ordered(seed, lengths, steps, shuffle)
            if by_length and lengths is not None
            else Order(seed, len(dataset), shuffle)
        )
        self._fetch = open_fetch(dataset, collate, seed)
        self.can_have_workers: bool = isinstance(self._fetch, SampleFetch)
        self._workers: WorkerPool | None = None
        if num_workers and isinstance(self._fetch, SampleFetch):
            self._workers = WorkerPool(self._fetch, self._requests_ahead, num_workers, pin_memory)
        # Next micro-batch of the workers: index of its step, its number in it; None: not started.
        self._ahead: tuple[int, int] | None = None

    def begin(self, index: int, cut: Cut) -> None:
        super().begin(index, cut)
        self._ahead = None

    def close(self) -> None:
        super().close()
        if self._workers is not None:
            self._workers.close()

    def extent(self, index: int, gaps: Sequence[int] = ()) -> Extent:
        if self._lengths is None:
            return Extent(self._steps.num_samples_of(index) - len(gaps))
        lengths = lengths_of_step(index, self._lengths, self._steps, self._order)
        drawn = num_drawn(index, self._steps, self._by_length)
        if gaps:
            lengths = np.delete(lengths, list(gaps))
            drawn -= sum(gap < drawn for gap in gaps)
        return Extent(len(lengths), lengths, drawn)

    def places(self, part: range) -> list[Place]:
        if self._current is None:
            return []
        pieces = self._request(self._current.first_sample, part, self._gaps)
        names = [(piece.epoch, sample) for piece in pieces for sample in piece.indices.tolist()]
        places = positions(part, self._gaps)
        return [Place(at, *name) for at, name in zip(places, names, strict=True)]

    def alone(self, place: Place) -> Any:
        at = place.position
        return self._fetch(self._request(self._first_sample, range(at, at + 1), ()))

    def together(self, part: range) -> Any:
        return self._fetch(self._request(self._first_sample, part, self._gaps))

    @property
    def _first_sample(self) -> int:
        return 0 if self._current is None else self._current.first_sample

    def _step(self, index: int) -> StepData | None:
        steps = self._steps
        num_samples = steps.num_samples_of(index)
        if not num_samples:
            return None
        return StepData(
            index=index,
            epoch=steps.epoch_of(index),
            first_sample=steps.samples_before(index),
            num_samples=num_samples,
            epoch_end=steps.is_epoch_end(index),
            next_epoch=steps.epoch_of(index + 1),
        )

    def _fetched(self, step: StepData, number: int, parts: Sequence[range]) -> Any:
        if self._workers is None:
            return self._fetch(self._request(step.first_sample, parts[number], self._gaps))
        if self._ahead != (step.index, number):  # the first one, or a step was not finished
            self._ahead = step.index, number
            self._workers.restart()
        after = (step.index, number + 1)
        if number + 1 == len(parts):
            # Steps in which this rank has no micro-batches are skipped.
            after = next(((later, 0) for later, _ in self._steps_from(step.index + 1)), None)
        self._ahead = None
        try:
            batch = self._workers.next()
        except BadSamples:  # the workers continue
            self._ahead = after
            raise
        self._ahead = after
        return batch

    def _requests_ahead(self) -> Iterator[Request]:
        """Yields the requests from the micro-batch at `_ahead` to the end of training."""
        if self._ahead is None:
            return
        first, skipped = self._ahead
        for later, ranges in self._steps_from(first):
            first_sample = self._steps.samples_before(later)
            gaps = self._gaps_of(later)
            for part in ranges[skipped:] if later == first else ranges:
                yield self._request(first_sample, part, gaps)

    def _steps_from(self, index: int) -> Iterator[tuple[int, Sequence[range]]]:
        """Yields the steps from `index` on in which this rank has micro-batches."""
        cut, total = self._cut, self._steps.total_steps
        if cut is None or total is None:
            return
        for later in range(index, total):
            ranges = cut(self.extent(later, self._gaps_of(later)))
            if ranges:
                yield later, ranges

    def _gaps_of(self, index: int) -> Sequence[int]:
        """Returns the positions left out of step `index`; for steps after the current one none are
        known yet."""
        return self._gaps if self._current is not None and self._current.index == index else ()

    def _request(self, first_sample: int, part: range, gaps: Sequence[int]) -> Request:
        """Returns the request for the samples `part`, without `gaps`, of the global batch that starts
        at `first_sample`."""
        spans = [
            span
            for whole in around(part, gaps)
            for span in self._steps.spans(first_sample + whole.start, first_sample + whole.stop)
        ]
        return [Piece(span.epoch, self._order.indices(*span)) for span in spans]
