"""What the engine is given of a global step: its samples, as often as the step is tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from anybatch.data import Bad, Place
from anybatch.plans import Choice

Take: TypeAlias = "Callable[[int, int], Any]"
"""From a first sample to an end: these as one batch."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass.

    Attributes:
        batch: on the device; None for a pass in which only other ranks have samples.
        num_samples: in it.
        ghosts: its cut into ghost batches.
        last: whether it is this rank's last one of the step.
        padded: its padded size, in samples of the longest, where they differ in length; else None.
        is_drawn: whether its samples are some of all lengths, as they were drawn, where those after
            them are in order of length.
        ends_drawn: whether it is the last one of these.
        grain: its number in the global batch, where that is cut into grains; else None.
        part: the part of the step that it belongs to, where steps are cut into parts.
        ends_part: whether it is the last one of that part.
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
        """What it holds, as time and memory go by it: samples, or as many of the longest."""
        return self.num_samples if self.padded is None else self.padded


class Source(Protocol):
    """The samples of one global step, given as often as the step is tried. A source whose samples have
    no names takes the last four as they are."""

    @property
    def num_samples(self) -> int:
        """Of all ranks together, without those that are left out; 0: not known."""
        return 0

    def micro_batches(self, choice: Choice, keep: bool = False) -> Iterator[MicroBatch]:
        """The micro-batches of this rank under `choice`, in order, from the first. `keep`: they are
        going to be asked for `once_more`."""
        ...

    @property
    def own_samples(self) -> int:
        """In the micro-batches that are being given."""
        ...

    def once_more(self) -> Iterator[MicroBatch]:
        """The micro-batches that were kept, all of which have been given."""
        ...

    def first_samples(self, most: int, batch: Any) -> tuple[Take, int]:
        """How to take some of the first samples of this rank, on the device, and how many there are to
        take from, at most `most`. `batch`: its first micro-batch."""
        ...

    def describe(self, number: int) -> str:
        """The samples of micro-batch `number` of the last attempt, in words."""
        ...

    def is_coupled(self, batch: Any) -> bool:
        """Whether samples are made into batches in a way by which those of its first micro-batch,
        `batch`, would be others alone."""
        del batch
        return False

    def places(self, number: int) -> Sequence[Place]:
        """The samples of micro-batch `number` of the last attempt; none, if they have no names."""
        del number
        return ()

    def alone(self, place: Place) -> Any:
        """That sample as a batch of its own, on the device."""
        raise AssertionError("a sample without a name is asked for")

    def leave_out(self, bad: Sequence[Bad]) -> int:
        """From the next attempt on the step is without these samples. How many are left, on all ranks
        together."""
        raise AssertionError("a sample without a name is left out")
