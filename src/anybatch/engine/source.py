"""Source: provides the samples of a global step to the engine, as often as the step is tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from anybatch.data import Bad, Place
from anybatch.plans import Choice

Take: TypeAlias = "Callable[[int, int], Any]"
"""Returns the samples from a first index up to an end index as one batch."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Input of one forward pass.

    Attributes:
        batch: batch on the device; None for a pass in which only other ranks have samples.
        num_samples: number of samples in the batch.
        ghosts: sizes of its ghost batches.
        last: whether it is this rank's last micro-batch of the step.
        padded: padded size, in samples of the longest length, where lengths differ; else None.
        is_drawn: whether its samples have mixed lengths, in the order drawn, while the samples after
            them are sorted by length.
        ends_drawn: whether it is the last such micro-batch.
        grain: its number in the global batch, where that is divided into grains; else None.
        part: the part of the step that it belongs to, where steps are divided into parts.
        ends_part: whether it is the last micro-batch of that part.
    """

    batch: Any
    num_samples: int
    ghosts: Sequence[int] = ()
    last: bool = False
    padded: float | None = None
    grain: int | None = None
    part: int = 0
    ends_part: bool = False
    is_drawn: bool = False
    ends_drawn: bool = False

    @property
    def amount(self) -> float:
        """Size that determines time and memory: in samples, or in samples of the longest length."""
        return self.num_samples if self.padded is None else self.padded


class Source(Protocol):
    """The samples of one global step, provided as often as the step is tried. A source whose samples
    have no names keeps the defaults of the last four methods."""

    @property
    def num_samples(self) -> int:
        """Number of samples over all ranks, without those left out; 0 if unknown."""
        return 0

    def micro_batches(self, choice: Choice, keep: bool = False) -> Iterator[MicroBatch]:
        """Returns the micro-batches of this rank under `choice`, in order, from the first one. `keep`:
        they will be requested again with `once_more`."""
        ...

    @property
    def own_samples(self) -> int:
        """Number of this rank's samples in the micro-batches being iterated."""
        ...

    def once_more(self) -> Iterator[MicroBatch]:
        """Returns the micro-batches that were kept, after all of them have been iterated."""
        ...

    def first_samples(self, most: int, batch: Any) -> tuple[Take, int]:
        """Returns a function that takes some of this rank's first samples, on the device, and the
        number of samples available to it, at most `most`. `batch`: its first micro-batch."""
        ...

    def describe(self, number: int) -> str:
        """Returns a description of the samples of micro-batch `number` of the last attempt."""
        ...

    @property
    def has_collate(self) -> bool:
        """Whether the user's code makes batches of samples. It may draw random numbers."""
        return False

    def is_coupled(self, batch: Any) -> bool:
        """Returns whether batching couples samples, so that those of the first micro-batch, `batch`,
        would differ if batched alone."""
        del batch
        return False

    def places(self, number: int) -> Sequence[Place]:
        """Returns the samples of micro-batch `number` of the last attempt; empty without names."""
        del number
        return ()

    def alone(self, place: Place) -> Any:
        """Returns this sample as a batch of size one, on the device."""
        raise AssertionError("a sample without a name is asked for")

    def leave_out(self, bad: Sequence[Bad]) -> int:
        """Omit these samples from the next attempt on. Returns how many are left, over all ranks."""
        raise AssertionError("a sample without a name is left out")
