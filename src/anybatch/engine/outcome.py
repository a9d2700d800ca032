"""Outcome: what a rank stages in an attempt at a global step, and what the attempt may come to."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from anybatch.data import Bad
from anybatch.engine.source import Source
from anybatch.engine.totals import Totals
from anybatch.events import step_number
from anybatch.parallel import Wish
from anybatch.parallel.failures import RankReport


@dataclass(slots=True)
class Staged:
    """What this rank has staged in one attempt.

    Attributes:
        index: of the step, from 0.
        source: its samples.
        totals: sums over the micro-batches.
        numbers: of the micro-batches that are in the totals, in that order.
        in_float16: the loss function added up in float16.
        empty: what is wrong with a mean over nothing, in words, if the loss has one.
        outputs: of this rank's part, if the loss hands any out.
        sums: the totals as the ranks add them up; None: the passes have not all been made.
        seconds: from the beginning of the attempt to the end of the vote.
    """

    index: int
    source: Source
    totals: Totals
    in_float16: bool = False
    empty: str = ""
    outputs: Any = None
    numbers: array[int] = field(default_factory=lambda: array("q"))
    sums: Tensor | None = None
    seconds: float = 0.0

    @property
    def step(self) -> int:
        """Its number, from 1."""
        return step_number(self.index)


@dataclass(frozen=True, slots=True)
class Committed:
    """A step that was done. See `events.StepDone` for the fields. `agreed_seconds` is how long this
    rank took until it knew that all had staged it, in the attempt that succeeded; `outputs` are those
    of this rank's part, see `Loss`."""

    loss: float
    weight: float
    metrics: dict[str, float]
    grad_norm: float
    rank_seconds: tuple[float, ...] = ()
    wished: Wish = Wish.NOTHING
    agreed_seconds: float = 0.0
    part_weight: float | None = None
    part_grad_norm: float | None = None
    outputs: Any = None


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A step that was left out whole: there is nothing in it to learn from. Nothing has changed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Again:
    """An attempt that left no trace.

    Attributes:
        told: what each rank has to tell, if one failed.
        bad: samples to do the step without, each with the rank that found it.
    """

    told: Sequence[RankReport] = ()
    bad: Sequence[tuple[int, Bad]] = ()


def by_rank(lists: Iterable[Iterable[Bad]]) -> list[tuple[int, Bad]]:
    """Every sample once, with the first rank that found it."""
    found: dict[int, tuple[int, Bad]] = {}
    for rank, several in enumerate(lists):
        for bad in several:
            found.setdefault(bad.place.position, (rank, bad))
    return list(found.values())
