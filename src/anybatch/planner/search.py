"""Search: finds the way to run a task within a budget that is predicted to be fastest.

The `costs` of a search hold the common settings of all of its choices (the layout of the ranks, the
precision, the place of the optimizer states). Within a search, a candidate is a recompute method
and a micro-batch: for each method, a few traces find the largest micro-batch that fits (`largest`),
and the other sizes are interpolated. Between recomputing nothing and everything are subsets of the
blocks (`subsets`). The selected choice itself is traced before it is accepted. Every candidate that
was considered stays in the plan, with the reason why it was rejected (`comparison`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from anybatch.compute.ghost_norm import depends_on_writes
from anybatch.estimate import Subject
from anybatch.estimate.seconds import StepSeconds
from anybatch.planner.comparison import (
    SAME_TIME,
    Option,
    frontier,
    impossible,
    option_of,
    order,
    rejected,
    rivals_of,
    ways_of,
)
from anybatch.planner.costs import Costs, Untraceable
from anybatch.planner.refusal import nothing_fits
from anybatch.planner.setting import Wishes
from anybatch.planner.subsets import largest, leanest_subset, subsets
from anybatch.plans import Candidate, Choice, FrontierPoint, Recompute

PAYS = 1.03
"""The common settings of all choices are replaced (by a divided model, states in host memory, a
lower precision) only if that is predicted to be faster by this factor: predictions are not more
precise."""


_LITTLE = 0.5
"""A step that takes at most this fraction of the room in one piece is not split to save memory."""

_TENSOR_CORES = 8
"""Matrix products in half precision are fastest if their dimensions are multiples of this."""


@dataclass(frozen=True, slots=True)
class Found:
    """The selected choice, and the others.

    Attributes:
        option: the selected choice, with its bytes and seconds.
        costs: those that it was selected from.
        rivals: choices that are predicted to be nearly as fast, fastest first.
        rejected: all others, with reasons.
        frontier: see `Plan`.
        fits: False only for a micro-batch that the user fixed against the prediction.
        assumptions: assumptions that were made when the model was traced, as sentences.
        otherwise: step time of the fastest choice that fits with another layout; None if there is
            none.
    """

    option: Option
    costs: Costs
    rivals: tuple[Option, ...]
    rejected: tuple[Candidate, ...]
    frontier: tuple[FrontierPoint, ...]
    fits: bool
    assumptions: tuple[str, ...]
    otherwise: StepSeconds | None

    @property
    def choice(self) -> Choice:
        """The selected choice."""
        return self.option.choice

    @property
    def seconds(self) -> StepSeconds:
        """Step time of the selected choice."""
        return self.option.seconds


def _write_notices(subject: Subject) -> tuple[str, ...]:
    """Notices on buffers that passes write to. In a reproducible run there are none, since the
    split into grains is part of the task."""
    return () if subject.identity.grain is not None else depends_on_writes([*subject.written])


def search(every: Sequence[Costs], wishes: Wishes) -> Found:
    """Find the fastest choice that is predicted to fit the budget of the device, among the choices
    of `every` costs. The first costs are preferred among equals.

    Raises:
        NoPlanFits: no choice fits; the error names the smallest budget under which one would.
        Untraceable: the model cannot be traced, even with nothing recomputed.
    """
    searches = [_Search(costs, wishes) for costs in every]
    best = _best_of(searches)
    if best is None or not best.fits:  # each method costs traces: tiles and chunks come last
        best = _best_of([one for one in searches if one.add_tiles()], best)
    if best is None:
        raise nothing_fits([(one.costs, one.ways) for one in searches if one.ways])
    assert best.taken is not None
    for one in searches if wishes.frontier else ():
        one.look_at(best.taken)
    # Before rivals are traced, so that the comparison uses what was known at the selection.
    passed = [candidate for one in searches for candidate in one.rejected(best)]
    points = frontier(every)
    rivals = rivals_of(best.taken, wishes, best.costs) if best.fits else ()
    layout = best.costs.setting.layout
    others = [one for one in searches if one.fits and one.costs.setting.layout != layout]
    return Found(
        option=option_of(best.taken, best.ways, best.costs, _leaner_costs(best.costs, every)),
        costs=best.costs,
        rivals=tuple(option_of(rival, best.ways, best.costs) for rival in rivals),
        rejected=tuple(passed),
        frontier=points,
        fits=best.fits,
        assumptions=(*best.costs.subject.assumptions, *_write_notices(best.costs.subject)),
        otherwise=min((one.step for one in others), key=lambda step: step.total, default=None),
    )


def _best_of(searches: Sequence[_Search], best: _Search | None = None) -> _Search | None:
    """Run `searches` and return the one whose choice is best, or `best` if none is better. Raises
    `Untraceable`."""
    for one in searches:
        bar = best.seconds / PAYS if best is not None and best.fits else float("inf")
        if one.least_seconds() >= bar:
            continue  # not faster, even with unlimited memory
        try:
            one.run(bar)
        except Untraceable:
            if one.costs.head is None:
                raise
            continue  # a loss that cannot be computed in chunks is computed as written
        if one.taken is not None and (best is None or one.beats(best)):
            best = one
    return best


def _leaner_costs(taken: Costs, every: Sequence[Costs]) -> list[Costs]:
    """Other settings that all choices can have in common if memory runs out, each in addition to
    the one before it: the loss in chunks, then also the states in host memory."""
    found: list[Costs] = []
    last = _turned(taken)
    for other in sorted(every, key=lambda costs: (costs.states_on == "host", bool(costs.head))):
        divided = other.subject.division is not None  # its states cannot be moved during a run
        if other.setting is taken.setting and last < _turned(other) and not divided:
            found.append(other)
            last = _turned(other)
    return found


def _turned(costs: Costs) -> frozenset[str]:
    """The memory-saving settings that all choices have in common."""
    return frozenset(["head"] * bool(costs.head) + ["states"] * (costs.states_on == "host"))


class _Search:
    """One search, among choices that have the layout, the precision and the place of states in
    common.

    Attributes:
        costs: as given.
        ways: recompute methods that can be traced, as far as is known.
        taken: choice that `run` selected; None: nothing fits.
        fits: whether that choice fits.
    """

    def __init__(self, costs: Costs, wishes: Wishes) -> None:
        self.costs = costs
        self._wishes = wishes
        wished = wishes.recompute
        self.ways: list[Recompute] = list(ways_of(costs)) if wished is None else [wished]
        self.taken: Choice | None = None
        self.fits: bool = False
        self._untraceable: list[Untraceable] = []

    @property
    def step(self) -> StepSeconds:
        """Step time of the selected choice, by part."""
        assert self.taken is not None
        return self.costs.step(self.taken)

    @property
    def seconds(self) -> float:
        """Step time of the selected choice, in seconds."""
        return self.step.total

    def add_tiles(self) -> bool:
        """Consider MLPs in tiles and attention in chunks too. Return whether the model has any, the
        user did not choose the recompute method, and blocks are not compiled."""
        subject, pace = self.costs.subject, self.costs.setting.pace
        blocks = Recompute(blocks=subject.blocks)
        # Chunks of dropout draw other numbers, which a reproducible run must not.
        chunked = pace.has_scores and subject.identity.grain is None
        compiled = self._wishes.compile or subject.compiled
        if self._wishes.recompute is not None or compiled or blocks not in self.ways:
            return False
        if not (pace.tileable or chunked):
            return False
        way = Recompute(blocks=blocks.blocks, tiled=pace.tileable, chunked_attention=chunked)
        self.ways.insert(self.ways.index(blocks) + 1, way)
        return True

    def run(self, bar: float = float("inf")) -> None:
        """Select a choice. None is selected if no step takes less than `bar` seconds. Raises
        `Untraceable`."""
        if self._wishes.micro_batch is not None:
            self._run_pinned(min(self._wishes.micro_batch, self.costs.sizes.whole))
            return
        fitting = self._fitting(bar)
        while fitting:
            best = self._best(fitting)
            if self.costs.fits(best) and self.costs.least(best) <= self.costs.room:
                self.taken, self.fits = best, True
                return
            fitting.remove(best)  # it fits only by interpolation, or its evaluation does not fit

    def least_seconds(self) -> float:
        """Predicted time of a step if memory were unlimited."""
        return min(map(self.costs.least_seconds, self.ways))

    def beats(self, other: _Search) -> bool:
        """Whether the choice selected here is preferred to that of `other`."""
        assert self.taken is not None
        assert other.taken is not None
        if not (self.fits and other.fits):
            return self.fits or (
                not other.fits and self.costs.peak(self.taken) < other.costs.peak(other.taken)
            )
        return PAYS * self.seconds < other.seconds

    def look_at(self, taken: Choice) -> None:
        """Consider the choices along the whole frontier, and the ones to compare with the choice that
        was `taken` in some search."""
        costs = self.costs
        if taken.recompute in self.ways:
            with self._dropping():
                costs.peak(costs.choice(taken.recompute, taken.micro_batch))
        for way in tuple(self.ways):
            with self._dropping():
                for size in (costs.sizes.smallest, costs.sizes.whole):
                    costs.peak(costs.choice(way, size))
                for size in costs.sizes.doubled():
                    costs.bytes(costs.choice(way, size))

    def rejected(self, best: _Search) -> Iterator[Candidate]:
        """The candidates that were considered here, or cannot be run, without the one selected by
        the search `best`."""
        costs, taken = self.costs, best.taken
        assert taken is not None
        yield from rejected(costs, taken, best.costs)
        for error in self._untraceable:
            yield impossible(error.choice, costs, f"could not be traced ({error})")

    def _fitting(self, bar: float) -> list[Choice]:
        """Choices that fit, according to a trace or by interpolation; the fastest is among them if it
        takes less than `bar` seconds."""
        costs, sizes = self.costs, self.costs.sizes
        fitting: list[Choice] = []
        found: dict[Recompute, int] = {}
        for way in tuple(self.ways):
            if costs.least_seconds(way) >= self._bar(fitting, bar):
                continue  # not faster, even with unlimited memory
            with self._dropping():
                size = largest(way, costs, self._bar(fitting, bar))
                if size is None:
                    continue
                found[way] = size
                some = [costs.choice(way, smaller) for smaller in sizes.worth_weighing(size)]
                for choice in some:
                    costs.bytes(choice)
                fitting += some
                if size == sizes.whole:
                    break  # more recompute cannot be faster than a method with all samples at once
        fitting = list(dict.fromkeys(fitting))
        with self._dropping():
            fitting += subsets(self.ways, found, self._bar(fitting, bar), costs)
        return fitting

    def _bar(self, fitting: Sequence[Choice], bar: float) -> float:
        """The seconds that a step has to stay below to be considered besides those `fitting`. Times
        that are nearly equal to one below `bar` are considered too."""
        best = self.costs.seconds(self._best(fitting)) if fitting else float("inf")
        return min(bar * SAME_TIME, best / SAME_TIME)

    def _run_pinned(self, size: int) -> None:
        """Select the recompute method for a micro-batch that the user fixed."""
        costs = self.costs
        fitting: list[Choice] = []
        for way in sorted(self.ways, key=lambda way: costs.seconds(costs.choice(way, size))):
            with self._dropping():
                if costs.fits(choice := costs.choice(way, size)):
                    fitting.append(choice)
                    break
        plain, everything = costs.choice(Recompute(), size), Recompute(blocks=costs.subject.blocks)
        if plain not in fitting and Recompute() in self.ways and everything in self.ways:
            bar = min(map(costs.seconds, fitting), default=float("inf"))
            with self._dropping():
                if subset := leanest_subset(size, bar, costs):
                    fitting.append(subset)
        self.fits = bool(fitting)
        choices = fitting or [costs.choice(way, size) for way in self.ways]
        self.taken = self._best(choices) if fitting else min(choices, key=costs.peak)

    def _best(self, fitting: Sequence[Choice]) -> Choice:
        """The fastest choice. Among equals, a step in one piece is preferred if it takes little of
        the room, then the fullest passes, then products that suit tensor cores, then the smallest
        peak."""
        costs = self.costs
        fastest = min(map(costs.seconds, fitting))
        close = [choice for choice in fitting if costs.seconds(choice) <= fastest * SAME_TIME]
        return min(close, key=self._order_of_equals)

    def _order_of_equals(self, choice: Choice) -> tuple[Any, ...]:
        costs, size = self.costs, choice.micro_batch
        odd = choice.precision not in ("fp32", "tf32") and size % _TENSOR_CORES != 0
        missing, num_bytes = costs.sizes.missing(size), costs.bytes(choice)
        is_cut = size < costs.sizes.whole or num_bytes > _LITTLE * costs.room
        return is_cut, missing, odd, num_bytes, costs.seconds(choice), order(choice)

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """Context for traces: a recompute method that cannot be traced is removed from then on, and
        recorded. If this is the plain method, or the requested one, no methods remain if the loss
        is in chunks, and otherwise the exception is raised."""
        try:
            yield
        except Untraceable as error:
            way = error.choice.recompute
            if way == (self._wishes.recompute or Recompute()):
                if self.costs.head is None:
                    raise
                self.ways.clear()
            self._untraceable.append(error)
            if way in self.ways:
                self.ways.remove(way)
