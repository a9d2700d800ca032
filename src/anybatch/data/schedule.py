"""Steps: which positions of which epoch make up a global step. Integers only, no data.

A step is given by its index, the number of steps before it.

An epoch offers `epoch_samples` positions (all of them, or with last="drop" those that fill global
batches). Laid end to end, the epochs form one line; a step is a stretch of that line. With a data
set of 10 and a global batch of 4:

    keep  | 0 1 2 3 | 4 5 6 7 | 8 9 || 0 1 2 3 | ...     3 steps per epoch, the last one smaller
    drop  | 0 1 2 3 | 4 5 6 7 || 0 1 2 3 | 4 5 6 7 ||    2 steps per epoch
    wrap  | 0 1 2 3 | 4 5 6 7 | 8 9 0 1 | 2 3 4 5 | ...  steps go across the ends of epochs
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from anybatch.errors import DataError, InputError

Last = Literal["keep", "drop", "wrap"]


class Span(NamedTuple):
    """Positions `start` to `stop` (exclusive) in the order of `epoch`."""

    epoch: int
    start: int
    stop: int


@dataclass(frozen=True)
class Steps:
    """How long training is and what each global step is made of.

    Attributes:
        num_samples: length of the data set; None for a stream, whose steps are found as it is read.
        global_batch: samples per step, over all ranks.
        last: what becomes of samples that do not fill a global batch at the end of an epoch.
        epochs, steps, samples: the length of training; exactly one of them. With `samples` the last
            step is cut short to end at exactly that many.

    Raises `InputError` (`DataError` where the data set is at fault) if no step can be made of it.
    """

    num_samples: int | None
    global_batch: int
    last: Last = "keep"
    epochs: int | None = None
    steps: int | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        lengths = {"epochs": self.epochs, "steps": self.steps, "samples": self.samples}
        given = {name: value for name, value in lengths.items() if value is not None}
        if len(given) != 1 or self.global_batch < 1 or any(v < 1 for v in given.values()):
            raise InputError(
                f"training with global_batch={self.global_batch} and {given or 'no length'} cannot"
                " be laid out: give a global_batch of at least 1 and exactly one of epochs, steps"
                " and samples, at least 1."
            )
        if self.last not in ("keep", "drop", "wrap"):
            raise InputError(f"last is {self.last!r}: give 'keep', 'drop' or 'wrap'.")
        if self.num_samples is not None and self.num_samples < 1:
            raise DataError("the training data set is empty: give at least one sample.")
        if self.num_samples is not None and self.epoch_samples == 0:
            raise DataError(
                f"last='drop' drops every one of the {self.num_samples} training samples, since"
                f" they do not fill one global batch of {self.global_batch}: use 'keep' or 'wrap'."
            )

    @cached_property
    def epoch_samples(self) -> int:
        """Samples of an epoch that training uses. Raises `InputError` for a stream."""
        length = self._length
        return length - length % self.global_batch if self.last == "drop" else length

    @cached_property
    def total_samples(self) -> int | None:
        """Samples of the whole training; None for a stream over `epochs`.

        For a stream over `steps` it is `steps` full global batches: what is read unless the stream
        ends in between, with samples left over.
        """
        if self.samples is not None:
            return self.samples
        if self.num_samples is None:
            return None if self.steps is None else self.steps * self.global_batch
        if self.epochs is not None:
            return self.epochs * self.epoch_samples
        return self._start(self.steps or 0)

    @cached_property
    def total_steps(self) -> int | None:
        """Steps of the whole training; None for a stream, unless they follow from its length."""
        if self.steps is not None:
            return self.steps
        total = self.total_samples
        if total is None or (self.num_samples is None and self.last == "keep"):
            return None
        if self.last == "keep":
            whole, rest = divmod(total, self._length)
            return whole * _ceil(self._length, self.global_batch) + _ceil(rest, self.global_batch)
        return _ceil(total, self.global_batch)

    def samples_before(self, index: int) -> int:
        """Samples that the steps before `index` take, over all ranks."""
        total = self.total_samples
        start = self._start(index)
        return start if total is None else min(start, total)

    def samples_of(self, index: int) -> tuple[Span, ...]:
        """The positions that the step `index` takes, in order; none from `total_steps` on."""
        return self.spans(self.samples_before(index), self.samples_before(index + 1))

    def spans(self, start: int, stop: int) -> tuple[Span, ...]:
        """Samples `start` to `stop` of the whole training, by epoch."""
        spans = []
        while start < stop:
            epoch, position = divmod(start, self.epoch_samples)
            taken = min(stop - start, self.epoch_samples - position)
            spans.append(Span(epoch, position, position + taken))
            start += taken
        return tuple(spans)

    def num_samples_of(self, index: int) -> int:
        """Samples that the step `index` takes, over all ranks."""
        return self.samples_before(index + 1) - self.samples_before(index)

    @cached_property
    def first_of_one(self) -> int | None:
        """The index of the first step of a single sample; None if there is none, or if that is not
        known before a stream is read."""
        total = self.total_steps
        if self.num_samples is None or total is None:
            return 0 if self.global_batch == 1 else None
        # Only the last step of an epoch, and that of the training, may be smaller than the others.
        places = {0, _ceil(self._length, self.global_batch) - 1, total - 1}
        found = [index for index in places if index < total and self.num_samples_of(index) == 1]
        return min(found, default=None)

    def epoch_of(self, index: int) -> int:
        """The epoch in which the step `index` starts."""
        return self.samples_before(index) // self.epoch_samples

    def is_epoch_end(self, index: int) -> bool:
        """Whether the step `index` takes the last sample (that is used) of an epoch."""
        ends = self.samples_before(index + 1) // self.epoch_samples
        return ends > self.epoch_of(index)

    @property
    def _length(self) -> int:
        if self.num_samples is None:
            raise InputError(
                "the positions of a step are known only where the length of the training data is:"
                " a stream is laid out as it is read."
            )
        return self.num_samples

    def _start(self, index: int) -> int:
        """Where the step `index` starts if training had no end."""
        if self.last != "keep":
            return index * self.global_batch
        epoch, index_in_epoch = divmod(index, _ceil(self._length, self.global_batch))
        return epoch * self._length + index_in_epoch * self.global_batch


def _ceil(count: int, size: int) -> int:
    return -(-count // size)
