"""Outcome: what an attempt at a global step may come to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from anybatch.data import Bad
from anybatch.parallel import Wish
from anybatch.parallel.failures import RankReport


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
