"""Outcome: what a rank stages in an attempt at a global step, and the results the attempt can have."""

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
    """State that this rank has staged in one attempt.

    Attributes:
        index: index of the step, from 0.
        source: samples of the step.
        totals: sums over the micro-batches.
        numbers: numbers of the micro-batches in the totals, in that order.
        in_float16: whether the loss function added up in float16.
        empty: description of a mean over nothing, if the loss has one.
        outputs: outputs of this rank's part, if the loss returns any.
        sums: the totals as the ranks add them up; None: not all passes have been run.
        seconds: time from the beginning of the attempt to the end of the vote.
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
        """Number of the step, from 1."""
        return step_number(self.index)


@dataclass(frozen=True, slots=True)
class Committed:
    """A step that was committed. See `events.StepDone` for the fields. `agreed_seconds` is the time, in
    the attempt that succeeded, until this rank knew that all ranks had staged the step; `outputs` are
    those of this rank's part, see `Loss`."""

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
    """A step that was skipped entirely, since it has nothing to learn from. Nothing has changed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Again:
    """An attempt that was rolled back, so that the step can be run again.

    Attributes:
        reports: the reports of all ranks, if one failed.
        bad: samples to omit from the step, each with the rank that found it.
    """

    reports: Sequence[RankReport] = ()
    bad: Sequence[tuple[int, Bad]] = ()


def by_rank(lists: Iterable[Iterable[Bad]]) -> list[tuple[int, Bad]]:
    """Returns every sample once, with the first rank that found it."""
    found: dict[int, tuple[int, Bad]] = {}
    for rank, several in enumerate(lists):
        for bad in several:
            found.setdefault(bad.place.position, (rank, bad))
    return list(found.values())
