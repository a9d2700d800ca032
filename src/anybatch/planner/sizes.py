"""Sizes: the micro-batches into which the samples of a step can be cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from anybatch.estimate import Subject

_LARGEST_EVALUATION_BATCH = 1024
_MOST_PASSES_MORE = 64
_FRACTIONS = (1, 3 / 4, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
_MOST_BETWEEN = 6
"""Micro-batches for which subsets of the blocks are looked at."""


def first_evaluation_batch(micro_batch: int, num_valid: int | None) -> int:
    """The batch for evaluation that goes with a micro-batch, if it fits: without a backward there is
    room for more. `num_valid` is None for a stream."""
    size = min(4 * micro_batch, _LARGEST_EVALUATION_BATCH)
    if num_valid is None:
        return size
    return min(size, num_valid) if num_valid else micro_batch


@dataclass(frozen=True, slots=True)
class Sizes:
    """Micro-batches of a step: whole ghost batches, or all samples at once.

    Attributes:
        whole: samples of a step.
        smallest: one sample, one ghost batch, or one grain.
    """

    whole: int
    smallest: int

    @classmethod
    def of(cls, subject: Subject) -> Sizes:
        """Those of a step of `subject`."""
        return cls(subject.whole, min(subject.identity.unit, subject.whole))

    @property
    def low(self) -> int:
        """Where lines over micro-batches begin. Not at one sample, if there is a choice: without a
        second one, some copies are not made, so of other sizes nothing follows from it."""
        return 2 if self.smallest == 1 and self.whole > 2 else self.smallest

    def passes(self, size: int) -> int:
        """How many passes of `size` samples a step takes."""
        return -(-self.whole // size)

    def in_units(self, size: int) -> int:
        """The largest micro-batch of at most `size`; 0: there is none."""
        return size // self.smallest * self.smallest

    def evened(self, size: int) -> int:
        """The smallest micro-batch that needs no more passes than `size` does."""
        units = -(-self.whole // (self.passes(size) * self.smallest))
        return min(units * self.smallest, size)

    def worth_weighing(self, largest: int) -> list[int]:
        """The largest, evened out over the step, and fractions of it, whose data may stay in caches;
        and near each of them the one that leaves no pass short. Three quarters, too: what an allocator
        makes of a size goes up and down, so the largest that fits may do so when the evened does
        not."""
        # All samples at once may be no whole number of ghost batches.
        sizes = [self.evened(largest)]
        for part in _FRACTIONS:
            if smaller := self.in_units(int(largest * part)):
                sizes += [self.evened(smaller), self.whole_part(smaller)]
        return list(dict.fromkeys(sizes))

    def missing(self, size: int) -> int:
        """Samples by which the last pass falls short of `size`."""
        return self.passes(size) * size - self.whole

    def whole_part(self, size: int) -> int:
        """The largest micro-batch of at most `size` that leaves no pass short, if it takes no more
        than a third more passes; else as `evened`."""
        fewest = self.passes(size)
        for passes in range(fewest, min(fewest * 4 // 3, fewest + _MOST_PASSES_MORE) + 1):
            part, rest = divmod(self.whole, passes)
            if not rest and part % self.smallest == 0:
                return part
        return self.evened(size)

    def between(self, low: int, high: int) -> list[int]:
        """A few above `low` and up to `high`, largest first: each takes about a third more passes than
        the one before. And the smallest, if `low` is 0."""
        sizes: list[int] = []
        size = high
        while size > max(low, self.smallest) and len(sizes) < _MOST_BETWEEN:
            sizes.append(self.evened(size))
            passes = self.passes(size)
            more = max(passes + 1, passes * 4 // 3)
            size = self.in_units(-(-self.whole // more))
        if low == 0 and self.smallest <= high:
            sizes.append(self.smallest)
        return list(dict.fromkeys(sizes))

    def halves(self, size: int) -> Iterator[int]:
        """Half of `size`, half of that, and so on down to the smallest."""
        while (size := self.in_units(size // 2)) >= self.smallest:
            yield size

    def doubled(self) -> Iterator[int]:
        """The smallest, twice that, and so on, each evened out; all below the whole."""
        size = self.smallest
        while size < self.whole:
            yield self.evened(size)
            size *= 2
