"""Search: of all the ways to run a task within a budget, the one predicted to be fastest.

A candidate is a way to recompute and a micro-batch; `costs` knows its seconds and bytes. For each way a
few traces find the largest micro-batch that fits (`largest`), and the rest is read off a line. Between
nothing and everything lie subsets of the blocks (`subsets`). Whatever is chosen is traced itself before
it is taken. Every candidate that was looked at stays in the plan with the reason for which it was not
taken (`comparison`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from anybatch.errors import NoPlanFits
from anybatch.estimate import Subject
from anybatch.estimate.seconds import StepSeconds
from anybatch.planner.comparison import SAME_TIME, candidate, explore, frontier, rejected
from anybatch.planner.costs import Costs
from anybatch.planner.largest import largest
from anybatch.planner.option import Option, option_of
from anybatch.planner.refusal import nothing_fits
from anybatch.planner.rivals import rivals_of
from anybatch.planner.setting import Setting, Wishes
from anybatch.planner.subsets import leanest_subset, subsets
from anybatch.planner.ways import order, ways_of
from anybatch.plans import Candidate, Choice, FrontierPoint, Recompute


@dataclass(frozen=True, slots=True)
class Found:
    """The choice taken, and the others.

    Attributes:
        option: the one taken.
        rivals: nearly as fast by prediction, the fastest first.
        rejected: all others, with reasons.
        frontier: see `Plan`.
        fits: False only for a micro-batch that the user fixed against the prediction.
    """

    option: Option
    rivals: tuple[Option, ...]
    rejected: tuple[Candidate, ...]
    frontier: tuple[FrontierPoint, ...]
    fits: bool

    @property
    def choice(self) -> Choice:
        """The one taken."""
        return self.option.choice

    @property
    def seconds(self) -> StepSeconds:
        """Of the one taken."""
        return self.option.seconds


def search(subject: Subject, setting: Setting, wishes: Wishes) -> Found:
    """The fastest choice that is predicted to fit the budget of the device.

    Optimizer states lie on the device, or in host memory where nothing else fits or where what they
    leave room for saves more time than they take to come over.

    Raises:
        NoPlanFits: none does; with the least budget under which one would.
    """
    here = _Search(Costs(subject, setting, wishes.precision), wishes)
    if not setting.pace.can_offload or subject.division is not None:
        return here.run()
    offloading = _Search(Costs(subject, setting, wishes.precision, states_on="host"), wishes)
    try:
        found = here.run()
    except NoPlanFits:
        return offloading.run()
    if not found.fits or offloading.least_seconds() < found.seconds.total:
        with suppress(NoPlanFits):
            other = offloading.run()
            if other.fits and (not found.fits or other.seconds.total < found.seconds.total):
                passed = here.compared(found.choice, other.choice)
                return replace(other, rejected=(*other.rejected, *found.rejected, passed))
    last = (found.choice, *found.option.ladder)[-1]
    leaner = last.model_copy(update={"optimizer_states": "host"})
    passed = offloading.compared(found.choice, found.choice)
    option = replace(found.option, ladder=(*found.option.ladder, leaner))
    return replace(found, option=option, rejected=(*found.rejected, passed))


class _Search:
    """One search, among choices that have the optimizer's states at one place."""

    def __init__(self, costs: Costs, wishes: Wishes) -> None:
        self._costs = costs
        self._wishes = wishes
        wished = wishes.recompute
        self._ways = tuple(ways_of(costs)) if wished is None else (wished,)

    def run(self) -> Found:
        """What is taken, or `NoPlanFits`."""
        if self._wishes.micro_batch is not None:
            return self._pinned(min(self._wishes.micro_batch, self._costs.sizes.whole))
        fitting = self._fitting()
        while fitting:
            best = self._best(fitting)
            if self._costs.fits(best):
                return self._found(best, fits=True)
            fitting.remove(best)  # it fitted by the line alone
        raise nothing_fits(self._ways, self._costs)

    def least_seconds(self) -> float:
        """Predicted time of a step if memory were no matter."""
        return min(map(self._costs.least_seconds, self._ways))

    def compared(self, choice: Choice, taken: Choice) -> Candidate:
        """`choice` with the optimizer's states where this search has them, as a candidate beside the
        one that was `taken`."""
        here = self._costs.choice(choice.recompute, choice.micro_batch)
        self._costs.footprint(here)
        return candidate(here, taken, self._costs)

    def _fitting(self) -> list[Choice]:
        """Choices that fit, by a trace or by the line, the fastest among them."""
        costs, sizes = self._costs, self._costs.sizes
        fitting: list[Choice] = []
        found: dict[Recompute, int] = {}
        for way in self._ways:
            if fitting and costs.least_seconds(way) >= costs.seconds(self._best(fitting)):
                continue  # even with all the memory it can use
            size = largest(way, costs)
            if size is None:
                continue
            found[way] = size
            fitting += [costs.choice(way, smaller) for smaller in sizes.worth_weighing(size)]
            if size == sizes.whole:
                break  # a way with all the memory it can use is not beaten by one that computes more
        fitting = list(dict.fromkeys(fitting))
        for choice in fitting:
            costs.bytes(choice)
        return fitting + subsets(self._ways, found, fitting, costs)

    def _pinned(self, size: int) -> Found:
        """For a micro-batch that the user fixed: the way to recompute."""
        costs = self._costs
        choices = [costs.choice(way, size) for way in self._ways]
        fitting = next(([c] for c in sorted(choices, key=costs.seconds) if costs.fits(c)), [])
        plain, everything = costs.choice(Recompute(), size), Recompute(blocks=costs.subject.blocks)
        if plain not in fitting and plain in choices and everything in self._ways:
            bar = min(map(costs.seconds, fitting), default=float("inf"))
            if subset := leanest_subset(size, bar, costs):
                fitting.append(subset)
        best = self._best(fitting) if fitting else min(choices, key=costs.peak)
        return self._found(best, fits=bool(fitting))

    def _best(self, fitting: Sequence[Choice]) -> Choice:
        """The fastest; of those as fast the leanest."""
        costs = self._costs
        fastest = min(map(costs.seconds, fitting))
        close = [choice for choice in fitting if costs.seconds(choice) <= fastest * SAME_TIME]
        return min(close, key=lambda c: (costs.bytes(c), costs.seconds(c), order(c)))

    def _found(self, best: Choice, fits: bool) -> Found:
        costs = self._costs
        if self._wishes.frontier:
            explore(self._ways, costs)
        # Before rivals are traced, so that all are compared by what was known when the choice was made.
        passed, points = rejected(best, costs), frontier(costs)
        rivals = rivals_of(best, self._wishes, costs) if fits else ()
        return Found(
            option=option_of(best, self._ways, costs),
            rivals=tuple(option_of(rival, self._ways, costs) for rival in rivals),
            rejected=passed,
            frontier=points,
            fits=fits,
        )
