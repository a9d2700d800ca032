"""StreamLoader: global steps of data sets that can only be iterated.

Every rank reads the whole stream, in the training process, and takes its ranges of each global batch.
The samples of a step are held until it is committed, since a stream cannot be read twice. A sample that
the stream fails to yield keeps its position in the global batch, as `Unreadable`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch.utils.data import default_collate

from anybatch.data.collation import Collate, collated
from anybatch.data.cut import around
from anybatch.data.failure import Bad, BadSamples, Place, described
from anybatch.data.generators import Borrowed, restore, seed_by, seed_each, snapshot
from anybatch.data.lengths import Extent
from anybatch.data.loader import StepData, StepLoader
from anybatch.data.order import mix
from anybatch.data.schedule import Span, Steps
from anybatch.errors import DataError
from anybatch.oom import is_memory_error
from anybatch.side_effects import generators_in


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Placeholder for a sample that the stream failed to yield."""

    reason: str


@final
class Reading:
    """One pass over a stream. Draws from the default generators use a separate state, seeded by `seed`
    and `epoch`, so that they do not depend on how the stream is cut into batches. Generators owned by
    the data set are seeded likewise."""

    def __init__(self, dataset: Any, seed: int, epoch: int) -> None:
        self._dataset = dataset
        self._epoch = epoch
        self._failed = ""  # why the last sample could not be read; empty if it could
        self.position: int = 0  # samples so far
        with Borrowed():
            key = mix(seed, epoch)
            seed_by(key)
            seed_each(generators_in(dataset), key)
            self._samples: Iterator[Any] = iter(dataset)
            self._state = snapshot()

    def read(self, into: MutableSequence[Any], count: int) -> None:
        """Appends the next `count` samples to `into`, fewer at the end. Raises `DataError` if the
        stream ends right after it has failed to yield a sample."""
        with Borrowed():
            restore(self._state)
            try:
                for _ in range(count):
                    into.append(self._one())
                    self.position += 1
            except StopIteration:
                if self._failed:
                    raise DataError(
                        f"sample {self.position - 1} of the stream {type(self._dataset).__name__}"
                        f" (epoch {self._epoch}) cannot be read: {self._failed}; the stream was over"
                        " after that, as a generator always is, so the rest of it cannot be told from"
                        " its end: catch the error in the stream, or give an iterator that can go on."
                    ) from None
            finally:
                self._state = snapshot()

    def _one(self) -> Any:
        try:
            sample = next(self._samples)
        except StopIteration:
            raise
        except Exception as error:
            if is_memory_error(error):
                raise
            self._failed = described(error)
            return Unreadable(self._failed)
        self._failed = ""
        return sample


def check_readable(dataset: Any, places: Sequence[Place], samples: Sequence[Any]) -> None:
    """Raises `BadSamples` with those of `samples`, located at `places`, that are `Unreadable`."""
    bad = [
        Bad(place._replace(position=number), sample.reason)
        for number, (place, sample) in enumerate(zip(places, samples, strict=True))
        if isinstance(sample, Unreadable)
    ]
    if bad:
        (_, epoch, number), reason = bad[0]
        raise BadSamples(
            f"sample {number} of the stream {type(dataset).__name__} (epoch {epoch}) cannot be read:"
            f" {reason}; mend the stream, or catch the error in it and leave the sample out.",
            bad,
        )


@dataclass(frozen=True, slots=True)
class _Held:
    """The samples of a global batch, and their location in the stream."""

    step: StepData
    samples: list[Any]
    spans: list[Span]


@final
class StreamLoader(StepLoader):
    """Loads training data in the order of the stream.

    The samples of a whole global batch are held (with last="drop" one more batch is read ahead, since
    the end of an epoch is not known otherwise). `begin` at a later step reads and discards what
    precedes it. The stream may shuffle and augment with the default random generators: they are seeded
    by (seed, epoch) for the stream alone.
    """

    can_have_workers: bool = False

    def __init__(
        self, dataset: Any, steps: Steps, *, collate: Collate | None = None, seed: int = 0
    ) -> None:
        super().__init__(collate)
        self._dataset = dataset
        self._steps = steps
        self._collate: Collate = collate or default_collate
        self._seed = seed
        self._reader = _Reader(dataset, steps, seed)
        self._held: _Held | None = None

    def extent(self, index: int, gaps: Sequence[int] = ()) -> Extent:
        assert self._held is not None
        return Extent(len(self._held.samples) - len(gaps))

    def commit(self) -> None:
        self._held = self._current = None

    def places(self, part: range) -> list[Place]:
        if self._held is None:
            return []
        stretches = around(part, self._gaps)
        return [place for whole in stretches for place in _places_in(self._held.spans, whole)]

    def alone(self, place: Place) -> Any:
        return self._batch([place])

    def together(self, part: range) -> Any:
        return self._batch(self.places(part))

    def close(self) -> None:
        super().close()
        self.commit()
        self._reader = _Reader(self._dataset, self._steps, self._seed)

    def _step(self, index: int) -> StepData | None:
        if self._held is None or self._held.step.index != index:
            if self._reader.next_index > index:
                self._reader = _Reader(self._dataset, self._steps, self._seed)
            self.commit()  # before the next is read: holding two would double the memory
            while self._reader.next_index < index:
                if self._reader.read() is None:
                    return None
            self._held = self._reader.read()
        return None if self._held is None else self._held.step

    def _fetched(self, step: StepData, number: int, parts: Sequence[range]) -> Any:
        return self._batch(self.places(parts[number]))

    def _batch(self, places: Sequence[Place]) -> Any:
        assert self._held is not None
        samples = [self._held.samples[place.position] for place in places]
        check_readable(self._dataset, places, samples)
        names = [place.name for place in places]
        with Borrowed():
            return collated(self._collate, samples, names, self._seed, self._dataset)


@final
class _Reader:
    """Reads a stream, starting with its first epoch, as a sequence of global steps."""

    def __init__(self, dataset: Any, steps: Steps, seed: int) -> None:
        self._dataset = dataset
        self._steps = steps
        self._seed = seed
        self.next_index = 0  # index of the next step
        self._taken = 0  # samples in the steps so far
        self._epoch = -1
        self._reading: Reading | None = None  # of this epoch; None between epochs
        self._position = 0  # in this epoch, of the first sample in the buffer
        self._buffer: deque[Any] = deque()

    def read(self) -> _Held | None:
        """Returns the next step; None when training is over."""
        steps = self._steps
        if steps.steps is not None and self.next_index >= steps.steps:
            return None
        limit = self._limit(self._taken)
        samples: list[Any] = []
        spans: list[Span] = []
        epoch_end, next_epoch = False, self._epoch
        while len(samples) < limit and (self._reading is not None or self._open()):
            self._fill(limit - len(samples))
            count = min(limit - len(samples), len(self._buffer))
            samples += [self._buffer.popleft() for _ in range(count)]
            spans.append(Span(self._epoch, self._position, self._position + count))
            self._position += count
            next_epoch = self._epoch
            if self._at_end(self._taken + len(samples)):
                self._reading = None
                self._buffer.clear()
                epoch_end, next_epoch = True, self._epoch + 1
                if self._steps.last != "wrap":
                    break
        if not samples:
            return None
        step = StepData(
            index=self.next_index,
            epoch=spans[0].epoch,
            first_sample=self._taken,
            num_samples=len(samples),
            epoch_end=epoch_end,
            next_epoch=next_epoch,
        )
        self.next_index += 1
        self._taken += len(samples)
        return _Held(step, samples, spans)

    def _limit(self, taken: int) -> int:
        """Returns the maximum number of samples in the step that starts after `taken` samples."""
        samples = self._steps.samples
        size = self._steps.target(self.next_index, taken)
        return min(size, samples - taken if samples is not None else 1 << 62)

    def _at_end(self, taken: int) -> bool:
        """Returns whether the epoch has no further sample that training uses. Looks ahead by one
        sample, or with last="drop" by one step: a remainder that does not fill a step is not part of
        the epoch."""
        ahead = max(1, self._limit(taken)) if self._steps.last == "drop" else 1
        self._fill(ahead)
        return len(self._buffer) < ahead

    def _open(self) -> bool:
        """Starts the next epoch; returns False if there is none."""
        self._epoch += 1
        if self._steps.epochs is not None and self._epoch >= self._steps.epochs:
            return False
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._epoch)
        self._position = 0
        self._reading = Reading(self._dataset, self._seed, self._epoch)
        needed = self._limit(self._taken) if self._steps.last == "drop" else 1
        self._fill(needed)
        if len(self._buffer) < needed:
            raise DataError(self._too_few(len(self._buffer)))
        return True

    def _fill(self, count: int) -> None:
        """Reads until the buffer holds `count` samples, or the stream of the epoch has ended."""
        if self._reading is not None and len(self._buffer) < count:
            self._reading.read(self._buffer, count - len(self._buffer))

    def _too_few(self, found: int) -> str:
        what = (
            f"the stream {type(self._dataset).__name__} gave {found} samples in epoch {self._epoch}"
        )
        if found:
            return (
                f"{what}, which last='drop' drops, since they do not fill one global batch of"
                f" {self._steps.global_batch}: use 'keep' or 'wrap'."
            )
        return (
            f"{what}: give at least one, and an object whose __iter__ starts anew in each epoch, where"
            " an iterator can be read only once."
        )


def _places_in(spans: Sequence[Span], part: range) -> list[Place]:
    """Returns the samples `part` of a step made of `spans`."""
    places, offset = [], 0
    for epoch, start, stop in spans:
        low, high = max(part.start, offset), min(part.stop, offset + stop - start)
        places += [Place(at, epoch, at - offset + start) for at in range(low, high)]
        offset += stop - start
    return places
