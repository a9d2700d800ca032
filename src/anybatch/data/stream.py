"""StreamLoader: the same methods as `Loader`, for sets that can only be iterated.

Every rank reads the whole stream, in the training process, and takes its ranges of each global
batch: so the order is the stream's own and depends on no rank. What a step is made of is found as
the stream is read. The samples of a step are held until it is committed, since a stream cannot be
asked twice: a redo sees the same ones.

Where bad samples are to be left out, one that the stream fails to give has its place in the global
batch like any other, as `_Unreadable`, until the step is redone without it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from torch.utils.data import default_collate

from anybatch.data.collation import Collate, collated
from anybatch.data.cut import around
from anybatch.data.failure import Bad, BadSamples, Place, Survey, told, told_samples
from anybatch.data.generators import Borrowed, restore, seed_by, seed_each, snapshot
from anybatch.data.lengths import Extent
from anybatch.data.loader import Cut, StepData
from anybatch.data.order import mix
from anybatch.data.schedule import Span, Steps
from anybatch.errors import DataError, InputError
from anybatch.events import step_number
from anybatch.oom import is_memory_error
from anybatch.side_effects import generators_in


@dataclass(frozen=True, slots=True)
class _Held:
    """A global batch of samples, and where in the stream they come from."""

    index: int  # of the step
    first_sample: int
    samples: list[Any]
    spans: list[Span]
    epoch_end: bool
    next_epoch: int


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """Stands for a sample that the stream failed to give."""

    reason: str


@final
class StreamLoader:
    """Training data in the order of the stream; see `Loader` for the methods.

    A whole global batch of samples is held (and with last="drop" one more is read ahead, since only
    then it is known where an epoch ends). `begin` at a later step reads and discards what comes
    before it. The stream may shuffle and augment by the default random generators, and by some of
    its own: they are seeded by (seed, epoch) for it alone. `find_all`: bad samples are told all at
    once, for a whole step.
    """

    def __init__(
        self,
        dataset: Any,
        steps: Steps,
        *,
        collate: Collate | None = None,
        seed: int = 0,
        find_all: bool = False,
    ) -> None:
        self._find_all = find_all
        self._gaps: Sequence[int] = ()
        self._dataset = dataset
        self._steps = steps
        self.has_collate: bool = collate is not None
        self._collate: Collate = collate or default_collate
        self._seed = seed
        self._reader = _Reader(dataset, steps, seed, find_all)
        self._held: _Held | None = None
        self._cut: Cut | None = None
        self._next = 0
        self._life = 0

    @property
    def can_have_workers(self) -> bool:
        """Never: a stream is read by the ranks themselves, in its order."""
        return False

    def begin(self, index: int, cut: Cut) -> None:
        """Makes the step `index` the next one, under `cut`."""
        self._next, self._cut = index, cut
        self._life += 1

    def next_step(self) -> StepData | None:
        """The next global step, read from the stream; None when training is over.

        Raises `DataError` if the stream fails or gives no sample.
        """
        return self._given(())

    def _given(self, gaps: Sequence[int]) -> StepData | None:
        if self._cut is None:
            raise InputError("the loader has not begun: call begin(index, cut) first.")
        held = self._read(self._next)
        if held is None:
            return None
        self._next += 1
        self._gaps = gaps
        extent = self.extent(held.index, gaps)
        ranges = self._cut(extent)
        return StepData(
            index=held.index,
            epoch=held.spans[0].epoch,
            first_sample=held.first_sample,
            num_samples=len(held.samples),
            epoch_end=held.epoch_end,
            next_epoch=held.next_epoch,
            ranges=ranges,
            micro_batches=self._micro_batches(held, ranges, self._life),
            extent=extent,
            gaps=gaps,
        )

    def redo(self, cut: Cut, gaps: Sequence[int] = ()) -> StepData:
        """The step that `next_step` gave last, under `cut`, which holds for later steps too, without
        the samples at the positions `gaps` (in order) of its global batch."""
        if self._held is None:
            raise InputError("there is no step to redo: none is held since the last commit().")
        self.begin(self._held.index, cut)
        data = self._given(gaps)
        assert data is not None  # it is held
        return data

    def extent(self, index: int, gaps: Sequence[int] = ()) -> Extent:
        """The samples of the step `index`, which is held, without those at the positions `gaps`."""
        assert self._held is not None
        assert self._held.index == index
        return Extent(len(self._held.samples) - len(gaps))

    def commit(self) -> None:
        """The step is done: its samples are let go."""
        self._held = None

    def describe(self, part: range) -> str:
        """The samples behind `part` of the current step, by their number in the stream."""
        names = [place.name for place in self.places(part[:8])]
        return told_samples(names, len(part)) if names else "no samples"

    def places(self, part: range) -> list[Place]:
        """The samples behind `part` of the current step."""
        return [] if self._held is None else _places(self._held.spans, part, self._gaps)

    def alone(self, place: Place) -> Any:
        """A sample of the current step as a batch of its own."""
        assert self._held is not None
        return self._batch(self._held, [place])

    def together(self, part: range) -> Any:
        """The samples behind `part` of the current step as one batch."""
        assert self._held is not None
        return self._batch(self._held, self.places(part))

    def close(self) -> None:
        """Lets go of the stream and of all samples. The loader gives nothing afterwards."""
        self._held = None
        self._cut = None
        self._life += 1
        self._reader = self._new_reader()

    def _new_reader(self) -> _Reader:
        return _Reader(self._dataset, self._steps, self._seed, self._find_all)

    def _read(self, index: int) -> _Held | None:
        if self._held is not None and self._held.index == index:
            return self._held
        if self._reader.next_index > index:
            self._reader = self._new_reader()
        self._held = None  # before the next is read: two would double the memory
        while self._reader.next_index < index:
            if self._reader.read() is None:
                return None
        self._held = self._reader.read()
        return self._held

    def _micro_batches(self, held: _Held, ranges: Sequence[range], life: int) -> Iterator[Any]:
        survey = Survey(self._find_all)
        for part in ranges:
            if life != self._life:
                raise InputError(
                    f"step {step_number(held.index)} has been begun anew: take the micro-batches of"
                    " the newer StepData."
                )
            places = _places(held.spans, part, self._gaps)
            positions = [place.position for place in places]
            yield from survey.fetched(partial(self._batch, held, places), positions)
        survey.finish()

    def _batch(self, held: _Held, places: Sequence[Place]) -> Any:
        samples = [held.samples[place.position] for place in places]
        bad = [
            Bad(place._replace(position=number), sample.reason)
            for number, (place, sample) in enumerate(zip(places, samples, strict=True))
            if isinstance(sample, _Unreadable)
        ]
        if bad:
            _, epoch, number = bad[0].place
            raise BadSamples(unreadable(self._dataset, epoch, number, bad[0].reason), bad)
        names = [place.name for place in places]
        with Borrowed():
            return collated(self._collate, samples, names, self._seed, self._dataset)


@final
class _Reader:
    """Reads a stream once, from its first epoch on, as global steps."""

    def __init__(self, dataset: Any, steps: Steps, seed: int, past_errors: bool) -> None:
        self._dataset = dataset
        self._steps = steps
        self._seed = seed
        self._past_errors = past_errors
        self.next_index = 0  # of a step
        self._taken = 0  # samples in the steps so far
        self._epoch = -1
        self._samples: Iterator[Any] | None = None  # of this epoch; None between epochs
        self._position = 0  # in this epoch, of the first sample in the buffer
        self._buffer: deque[Any] = deque()
        self._state: tuple[Any, ...] | None = None  # of the generators, as the stream left them
        self._failed = ""  # why the sample that was asked for last was not given

    def read(self) -> _Held | None:
        """The next step; None when training is over."""
        steps = self._steps
        if steps.steps is not None and self.next_index >= steps.steps:
            return None
        with Borrowed():
            return self._assembled()

    def _assembled(self) -> _Held | None:
        limit = self._limit(self._taken)
        samples: list[Any] = []
        spans: list[Span] = []
        epoch_end, next_epoch = False, self._epoch
        while len(samples) < limit and (self._samples is not None or self._open()):
            self._fill(limit - len(samples))
            count = min(limit - len(samples), len(self._buffer))
            samples += [self._buffer.popleft() for _ in range(count)]
            spans.append(Span(self._epoch, self._position, self._position + count))
            self._position += count
            next_epoch = self._epoch
            if self._at_end(self._taken + len(samples)):
                self._close()
                epoch_end, next_epoch = True, self._epoch + 1
                if self._steps.last != "wrap":
                    break
        if not samples:
            return None
        held = _Held(self.next_index, self._taken, samples, spans, epoch_end, next_epoch)
        self.next_index += 1
        self._taken += len(samples)
        return held

    def _limit(self, taken: int) -> int:
        """Samples of the step that starts when `taken` are taken, if the stream has them."""
        samples = self._steps.samples
        size = self._steps.target(self.next_index, taken)
        return min(size, samples - taken if samples is not None else 1 << 62)

    def _at_end(self, taken: int) -> bool:
        """Whether the epoch has no further sample that training uses. Looks ahead by one sample, or
        with last="drop" by a step: a rest that does not fill one is no part of the epoch."""
        ahead = max(1, self._limit(taken)) if self._steps.last == "drop" else 1
        self._fill(ahead)
        return len(self._buffer) < ahead

    def _open(self) -> bool:
        """Starts the next epoch; False if it was the last one."""
        self._epoch += 1
        if self._steps.epochs is not None and self._epoch >= self._steps.epochs:
            return False
        key = mix(self._seed, self._epoch)
        seed_by(key)
        seed_each(generators_in(self._dataset), key)
        self._state = snapshot()
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._epoch)
        self._position = 0
        self._failed = ""
        self._samples = iter(self._dataset)
        needed = self._limit(self._taken) if self._steps.last == "drop" else 1
        self._fill(needed)
        if len(self._buffer) < needed:
            raise DataError(self._too_few(len(self._buffer)))
        return True

    def _close(self) -> None:
        self._samples = None
        self._buffer.clear()

    def _fill(self, count: int) -> None:
        """Reads until `count` samples are in the buffer, or the epoch's stream has ended."""
        if self._samples is None or len(self._buffer) >= count:
            return
        if self._state is not None:
            restore(self._state)
        try:
            while len(self._buffer) < count:
                self._buffer.append(self._one(self._samples))
        except StopIteration:
            if self._failed:  # the sample before
                number = self._position + len(self._buffer) - 1
                raise DataError(
                    over_after(self._dataset, self._epoch, number, self._failed)
                ) from None
        finally:
            self._state = snapshot()

    def _one(self, samples: Iterator[Any]) -> Any:
        try:
            sample = next(samples)
        except StopIteration:
            raise
        except Exception as error:
            if is_memory_error(error):
                raise
            if self._past_errors:
                self._failed = told(error)
                return _Unreadable(self._failed)
            number = self._position + len(self._buffer)
            raise DataError(unreadable(self._dataset, self._epoch, number, told(error))) from error
        self._failed = ""
        return sample

    def _too_few(self, found: int) -> str:
        name = type(self._dataset).__name__
        if found:
            return (
                f"last='drop' drops every one of the {found} samples of the stream {name} in epoch"
                f" {self._epoch}, since they do not fill one global batch of"
                f" {self._steps.global_batch}: use 'keep' or 'wrap'."
            )
        if self._epoch:
            return (
                f"the stream {name} gave samples in epoch 0 and none in epoch {self._epoch}: an"
                " iterator can be read only once; give an object whose __iter__ starts anew."
            )
        return f"the stream {name} gave no sample at all: give at least one."


def unreadable(dataset: Any, epoch: int, number: int, reason: str) -> str:
    """The sentence for a sample that a stream failed to give."""
    return (
        f"sample {number} of the stream {type(dataset).__name__} (epoch {epoch}) cannot be read:"
        f" {reason}; mend the stream, or catch the error in it and leave the sample out."
    )


def over_after(dataset: Any, epoch: int, number: int, reason: str) -> str:
    """The sentence for a stream that ended right after it had failed to give a sample."""
    return (
        f"the stream {type(dataset).__name__} was over after it failed to give sample {number} (epoch"
        f" {epoch}; {reason}), as a generator always is, so the rest of it cannot be told from its end:"
        " catch the error in the stream, or give an iterator that can go on."
    )


def _places(spans: Sequence[Span], part: range, gaps: Sequence[int]) -> list[Place]:
    """The samples `part` of a step made of `spans`, without `gaps`."""
    return [place for whole in around(part, gaps) for place in _places_in(spans, whole)]


def _places_in(spans: Sequence[Span], part: range) -> list[Place]:
    places, offset = [], 0
    for epoch, start, stop in spans:
        low, high = max(part.start, offset), min(part.stop, offset + stop - start)
        places += [Place(at, epoch, at - offset + start) for at in range(low, high)]
        offset += stop - start
    return places
