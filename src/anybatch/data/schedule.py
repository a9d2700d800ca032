"""Steps: which positions of which epoch form a global step. Works on integers only, without data.

A step is identified by its index, the number of steps before it.

An epoch has `epoch_samples` positions (all of them, or with last="drop" those that fill global
batches). The epochs are concatenated, and a step is a contiguous range of the result. With a data set
of 10 and a global batch of 4:

    keep  | 0 1 2 3 | 4 5 6 7 | 8 9 || 0 1 2 3 | ...     3 steps per epoch, the last one smaller
    drop  | 0 1 2 3 | 4 5 6 7 || 0 1 2 3 | 4 5 6 7 ||    2 steps per epoch
    wrap  | 0 1 2 3 | 4 5 6 7 | 8 9 0 1 | 2 3 4 5 | ...  steps cross epoch boundaries

If the global batch is in tokens, or grows, its rule determines the size of each step: see `boundaries`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import numpy as np

from anybatch.batch_rule import (
    BatchRule,
    Ramp,
    as_text,
    largest_target,
    rate_factor,
    target_at,
)
from anybatch.data.boundaries import Boundaries, Reached, most_samples
from anybatch.errors import InputError

Last = Literal["keep", "drop", "wrap"]

ALL_MEASURED, MEASURED_EVERY = 256, 4
"""The noise of gradients is measured in each of the first `ALL_MEASURED` steps, and in every
`MEASURED_EVERY`-th step after that, since the measurement takes a few percent of a small step."""


def measures_noise(index: int) -> bool:
    """Returns whether the noise of gradients is measured in step `index`."""
    return index < ALL_MEASURED or index % MEASURED_EVERY == 0


class Span(NamedTuple):
    """Positions `start` to `stop` (exclusive) in the order of `epoch`."""

    epoch: int
    start: int
    stop: int


@dataclass(frozen=True)
class Steps:
    """The length of training and the composition of each global step.

    Attributes:
        num_samples: length of the data set; None for a stream, whose steps are determined as it is
            read.
        global_batch: samples per step, over all ranks; or `Tokens` or a `Ramp`.
        last: how to handle samples that do not fill a global batch at the end of an epoch.
        epochs, steps, samples: the length of training; exactly one of them. With `samples` the last
            step is cut short to end at exactly that number.
        lengths: function from an epoch to the lengths of its samples in their order, int64, shape
            `[num_samples]`, if the global batch is in tokens.

    Raises `InputError` for a ramp over `epochs` of a stream of unknown length. `Task` checks the rest.
    """

    num_samples: int | None
    global_batch: BatchRule
    last: Last = "keep"
    epochs: int | None = None
    steps: int | None = None
    samples: int | None = None
    lengths: Callable[[int], np.ndarray] | None = None

    def __post_init__(self) -> None:
        rule = self.global_batch
        if isinstance(rule, Ramp) and self.steps is None and self._given_samples is None:
            raise InputError(
                f"global_batch is {as_text(rule)}, which goes by the part of training that is done, and"
                " the length of the training data is unknown: give steps=... or samples=... instead of"
                " epochs=..."
            )

    @cached_property
    def epoch_samples(self) -> int:
        """Number of samples of an epoch that training uses. Raises `InputError` for a stream."""
        length, size = self._length, self.global_batch
        return length - length % size if self.last == "drop" and isinstance(size, int) else length

    @cached_property
    def total_samples(self) -> int | None:
        """Number of samples in the whole training; None for a stream over `epochs`.

        For a stream over `steps` this is that number of full global batches, which is what training
        reads unless the stream ends in between with samples left over.
        """
        if self.steps is None:
            return self._given_samples
        if self.num_samples is None and isinstance(self.global_batch, int):
            return self.steps * self.global_batch
        return self._start(self.steps)

    @cached_property
    def total_steps(self) -> int | None:
        """Number of steps in the whole training; None for a stream, unless it follows from the length
        of training."""
        if self.steps is not None:
            return self.steps
        total, size = self.total_samples, self.global_batch
        if total is None or (self.num_samples is None and self.last == "keep"):
            return None
        if not isinstance(size, int):
            return self._boundaries.count(total)
        if self.last == "keep":
            whole, rest = divmod(total, self._length)
            return whole * _ceil(self._length, size) + _ceil(rest, size)
        return _ceil(total, size)

    @cached_property
    def most_samples(self) -> int:
        """Number of samples in the largest step that is possible under any order of the samples."""
        target = largest_target(self.global_batch)
        if self.lengths is None:
            return target
        return most_samples(self.lengths(0), target, self.last == "wrap")

    @cached_property
    def largest_step(self) -> int:
        """Index of a step with the maximum number of samples, with which a plan can be rehearsed. With
        a global batch in tokens any step will do."""
        total = self.total_samples
        if not isinstance(self.global_batch, Ramp) or total is None or self.num_samples is None:
            return 0
        return int(self._boundaries.sizes(total).argmax())

    @property
    def total_tokens(self) -> int | None:
        """Number of tokens in the whole training; None if the global batch is in samples."""
        total = self.total_samples
        return None if self.lengths is None or total is None else self._tokens_until(total)

    def tokens_before(self, index: int) -> int | None:
        """Returns the number of tokens in the steps before `index`, over all ranks; None if the global
        batch is in samples."""
        return None if self.lengths is None else self._tokens_until(self.samples_before(index))

    def rate_factor(self, index: int, first_sample: int) -> float:
        """Returns the factor by which the learning rate of step `index`, which begins at
        `first_sample`, is multiplied to account for its batch size."""
        return rate_factor(self.global_batch, self._done(index, first_sample))

    def target(self, index: int, first_sample: int) -> int:
        """Returns the target size of step `index`, in samples or tokens, if it begins at
        `first_sample`."""
        if isinstance(self.global_batch, int):
            return self.global_batch
        return target_at(self.global_batch, self._done(index, first_sample))

    def steps_in(self, epoch: int) -> np.ndarray:
        """Returns the index of the step that each position of `epoch` belongs to: int64, shape
        `[num_samples]`, ascending. Positions that no step takes have the index of a later step."""
        length, size, line = self._length, self.global_batch, epoch * self.epoch_samples
        at = np.arange(length)
        if not isinstance(size, int):
            steps = self._boundaries.steps(line, line + length)
        elif self.last == "wrap":
            steps = (at + epoch * length) // size
        else:
            steps = at // size + epoch * _ceil(self.epoch_samples, size)
        if self.samples is not None:  # the last step may be cut short
            steps = steps + (at + (epoch * length if self.last == "wrap" else line) >= self.samples)
        return steps

    def samples_before(self, index: int) -> int:
        """Returns the number of samples in the steps before `index`, over all ranks."""
        total = self.total_samples
        start = self._start(index)
        return start if total is None else min(start, total)

    def samples_of(self, index: int) -> tuple[Span, ...]:
        """Returns the positions that step `index` takes, in order; none from `total_steps` on."""
        return self.spans(self.samples_before(index), self.samples_before(index + 1))

    def spans(self, start: int, stop: int) -> tuple[Span, ...]:
        """Returns samples `start` to `stop` of the whole training, by epoch."""
        spans = []
        while start < stop:
            epoch, position = divmod(start, self.epoch_samples)
            taken = min(stop - start, self.epoch_samples - position)
            spans.append(Span(epoch, position, position + taken))
            start += taken
        return tuple(spans)

    def num_samples_of(self, index: int) -> int:
        """Returns the number of samples in step `index`, over all ranks."""
        return self.samples_before(index + 1) - self.samples_before(index)

    @cached_property
    def first_of_one(self) -> int | None:
        """Index of the first step with a single sample; None if there is none, or if it is not known
        before a stream is read."""
        total, size = self.total_steps, self.global_batch
        if self.num_samples is None or total is None:
            return 0 if size == 1 else None
        if not isinstance(size, int):
            found = np.flatnonzero(self._boundaries.sizes(self.samples_before(total)) == 1)
            return int(found[0]) if len(found) else None
        # Only the last step of an epoch, and that of the training, may be smaller than the others.
        places = {0, _ceil(self._length, size) - 1, total - 1}
        found = [index for index in places if index < total and self.num_samples_of(index) == 1]
        return min(found, default=None)

    def epoch_of(self, index: int) -> int:
        """Returns the epoch in which step `index` starts."""
        return self.samples_before(index) // self.epoch_samples

    def is_epoch_end(self, index: int) -> bool:
        """Returns whether step `index` takes the last sample (that is used) of an epoch."""
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

    @property
    def _given_samples(self) -> int | None:
        """Number of samples in the whole training, if it does not depend on the steps."""
        if self.epochs is None or self.num_samples is None:
            return self.samples
        return self.epochs * self.epoch_samples

    def _start(self, index: int) -> int:
        """Returns where step `index` would start if training had no end."""
        size = self.global_batch
        if not isinstance(size, int):
            return self._boundaries.start(index)
        if self.last != "keep":
            return index * size
        epoch, index_in_epoch = divmod(index, _ceil(self._length, size))
        return epoch * self._length + index_in_epoch * size

    @cached_property
    def _boundaries(self) -> Boundaries:
        reached = None if self.lengths is None else self._reached
        return Boundaries(self.target, self.num_samples, self.last == "wrap", reached)

    def _done(self, index: int, first_sample: int) -> float:
        """Returns the fraction of training that is done before step `index`, which begins at
        `first_sample`. It does not depend on the sizes of earlier steps, so the definition of a ramp is
        not circular."""
        if self.steps is not None:
            return index / self.steps
        total = self._given_samples
        if total is None:
            return 0.0  # and the batch is not a ramp
        if self.lengths is None:
            return first_sample / total
        return self._tokens_until(first_sample) / self._tokens_until(total)

    def _tokens_until(self, sample: int) -> int:
        """Returns the total length of the first `sample` samples, counted over the concatenated
        epochs."""
        epoch, position = divmod(sample, self._length)
        reached = self._reached(epoch)
        return epoch * int(reached[-1]) + int(reached[position])

    @cached_property
    def _reached(self) -> Reached:
        lengths = self.lengths
        assert lengths is not None

        @lru_cache(_EPOCHS_KEPT)
        def reached(epoch: int) -> np.ndarray:
            return np.concatenate(([0], np.cumsum(lengths(epoch))))

        return reached


_EPOCHS_KEPT = 2  # a step of last="wrap" mostly spans two; more would only cost memory


def _ceil(count: int, size: int) -> int:
    return -(-count // size)
