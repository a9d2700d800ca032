"""Search: of all the ways to run a task within a budget, the one predicted to be fastest.

A candidate is a way to recompute and a micro-batch. Time is known for every candidate from two traces
of the task's work. Bytes are known from traces of the step: for each way they grow with the micro-batch
in a nearly straight line, so a few traces find the largest micro-batch that fits, and the rest is read
off the line. Between nothing and everything lie subsets of the blocks, whose bytes follow from what
each block keeps. Whatever is chosen is traced itself before it is taken. Every candidate that was
looked at stays in the plan with the reason for which it was not taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from anybatch.errors import NoPlanFits
from anybatch.estimate import Footprint, Peak, Subject, evaluation_peak, footprint
from anybatch.estimate.seconds import StepSeconds, exchange_seconds
from anybatch.planner.blocks import cheapest, level
from anybatch.planner.knobs import knobs
from anybatch.planner.setting import Setting, Wishes
from anybatch.plans import Candidate, Choice, FrontierPoint, Recompute, StatesOn
from anybatch.units import format_bytes, format_seconds

LARGEST_EVALUATION_BATCH = 1024

_SAME_TIME = 1.01
"""Predicted times that differ by less are taken as equal; then the smaller peak wins."""

_CLOSE_ENOUGH = 1.04
"""Bisection stops when the largest micro-batch that fits is known to within this factor."""

_MOST_TRIES = 4
"""Subsets of blocks that are traced for one micro-batch, each somewhat leaner than the last."""


_LEAST_RESERVE, _RESERVES = 512 << 10, 40
"""What a plan leaves free: so many bytes at least, and one part in so many."""

_CLOSE = 1.5
"""A choice that is predicted to take up to so many times as long as the fastest may be the faster one:
measured beside each other, predictions of one task were off by less."""

_MOST_RIVALS = 3


@dataclass(frozen=True, slots=True)
class Option:
    """A choice, what it costs, and what is leaner."""

    choice: Choice
    footprint: Footprint
    evaluation: Peak
    seconds: StepSeconds
    ladder: tuple[Choice, ...]


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


def reserve_of(budget_bytes: int) -> int:
    """Bytes of the budget that a plan leaves free: for what a trace does not see, such as the heap of
    the interpreter."""
    return max(_LEAST_RESERVE, budget_bytes // _RESERVES)


def budget_for(peak_bytes: int) -> int:
    """The least budget that leaves `peak_bytes` beside its reserve."""
    least = max(peak_bytes + _LEAST_RESERVE, peak_bytes * _RESERVES // (_RESERVES - 1))
    while least - reserve_of(least) < peak_bytes:  # what rounding has left out
        least += 1
    return least


def search(subject: Subject, setting: Setting, wishes: Wishes) -> Found:
    """The fastest choice that is predicted to fit the budget of the device.

    Optimizer states lie on the device, or in host memory where nothing else fits or where what they
    leave room for saves more time than they take to come over.

    Raises:
        NoPlanFits: none does; with the least budget under which one would.
    """
    search = Search(subject, setting, wishes)
    if not setting.pace.can_offload or subject.division is not None:
        return search.run()
    offloading = Search(subject, setting, wishes, states_on="host")
    try:
        found = search.run()
    except NoPlanFits:
        return offloading.run()
    if not found.fits or offloading.least_seconds() < found.seconds.total:
        with suppress(NoPlanFits):
            other = offloading.run()
            if other.fits and (not found.fits or other.seconds.total < found.seconds.total):
                passed = search.compared(found.choice, other)
                return replace(other, rejected=(*other.rejected, *found.rejected, passed))
    last = (found.choice, *found.option.ladder)[-1]
    leaner = last.model_copy(update={"optimizer_states": "host"})
    rejected = (*found.rejected, offloading.compared(found.choice, found))
    option = replace(found.option, ladder=(*found.option.ladder, leaner))
    return replace(found, option=option, rejected=rejected)


class Search:
    """One search. `peak`, `seconds` and `smallest` answer questions about any choice, too."""

    def __init__(
        self, subject: Subject, setting: Setting, wishes: Wishes, states_on: StatesOn = "device"
    ) -> None:
        self._states_on: StatesOn = states_on
        self._subject = subject
        self._setting = setting
        self._device = setting.device
        self._pace = setting.pace
        self._wishes = wishes
        budget = setting.device.budget_bytes
        self._room = int((budget - reserve_of(budget)) / setting.correction.bytes)
        self.smallest: int = min(subject.identity.ghost_batch or 1, subject.whole)
        self.whole: int = subject.whole
        self._exchange = exchange_seconds(
            self._pace.parameter_bytes, setting.device, setting.num_ranks
        )
        self._seen: dict[Choice, Footprint] = {}
        self._weighed: dict[Choice, int] = {}  # bytes by the line, where nothing was traced

    def run(self) -> Found:
        """The plan, or `NoPlanFits`."""
        ways = list(self._ways())
        if self._wishes.micro_batch is not None:
            return self._pinned(ways, self._wishes.micro_batch)
        fitting: list[Choice] = []
        largest: dict[Recompute, int] = {}
        for way in ways:
            if fitting and self._fastest(way) >= self._seconds(self._best(fitting)):
                continue  # even with all the memory it can use
            size = self._largest(way)
            if size is None:
                continue
            largest[way] = size
            fitting += [self._choice(way, smaller) for smaller in self._sizes(size)]
            if size == self.whole:
                break  # a way with all the memory it can use is not beaten by one that computes more
        fitting = list(dict.fromkeys(fitting))
        for choice in fitting:
            self._bytes(choice)
        fitting += self._some_blocks(ways, largest, fitting)
        while fitting:
            best = self._best(fitting)
            if self._fits(best):
                return self._found(best, ways, fits=True)
            fitting.remove(best)
        raise self._nothing(ways)

    # ------------------------------------------------------------------------------ what it costs

    def peak(self, choice: Choice) -> int:
        """Predicted peak of `choice`, from a trace."""
        return int(self._look(choice).peak.num_bytes * self._setting.correction.bytes)

    def seconds(self, choice: Choice) -> StepSeconds:
        """Predicted time of a step under `choice`."""
        return self._pace.step(
            choice.micro_batch,
            choice.recompute,
            self.whole,
            self._exchange,
            choice.optimizer_states,
        )

    def least_seconds(self) -> float:
        """Predicted time of a step if memory were no matter."""
        return min(map(self._fastest, self._ways()))

    def compared(self, choice: Choice, taken: Found) -> Candidate:
        """`choice` with the optimizer's states where this search has them, as a candidate beside the
        one that was taken."""
        found = self._choice(choice.recompute, choice.micro_batch)
        self._look(found)
        return Candidate(
            choice=found,
            peak_bytes=self.peak(found),
            step_seconds=self._corrected(self._seconds(found)),
            reason=self._reason(found, taken.choice),
        )

    def choice(self, way: Recompute, micro_batch: int) -> Choice:
        """The candidate of that way and micro-batch."""
        return self._choice(way, micro_batch)

    def _choice(self, way: Recompute, micro_batch: int) -> Choice:
        return Choice(
            micro_batch=micro_batch,
            evaluation_batch=1,
            precision=self._wishes.precision,
            recompute=way,
            update=self._pace.update,
            optimizer_states=self._states_on,
        )

    def _look(self, choice: Choice) -> Footprint:
        found = self._seen.get(choice)
        if found is None:
            found = footprint(self._subject, choice, self._device)
            if self._subject.division is not None:
                part = 1 / self._subject.division.ranks
                first, later = found.commit_bytes
                commit = int(first * part), int(later * part)
                found = replace(found, peak=self._divided(found.peak), commit_bytes=commit)
            self._seen[choice] = found
        return found

    def _divided(self, peak: Peak) -> Peak:
        """`peak` of a rank that holds a part of the model, if it does."""
        division = self._subject.division
        return peak if division is None else Peak(*division.divided(peak.num_bytes, peak.by_kind))

    def _peak(self, choice: Choice) -> int:
        return self._look(choice).peak.num_bytes

    def _fits(self, choice: Choice) -> bool:
        return self._peak(choice) <= self._room

    def _bytes(self, choice: Choice) -> int:
        """Predicted peak: from a trace where there is one, else by the lines."""
        if choice in self._seen:
            return self._seen[choice].peak.num_bytes
        if choice not in self._weighed:
            self._peak(self._choice(choice.recompute, self.smallest))  # a line has two ends
            found = self._on_line(choice.recompute, choice.micro_batch)
            if found is None:
                return self._peak(choice)
            self._weighed[choice] = int(found)
        return self._weighed[choice]

    def _on_line(self, way: Recompute, micro_batch: int) -> float | None:
        """The peak of `way` at `micro_batch`, between the nearest sizes that were traced."""
        known = sorted(
            (choice.micro_batch, seen.peak.num_bytes)
            for choice, seen in self._seen.items()
            if choice.recompute == way
        )
        if len(known) < 2:
            return None
        above = next(
            (i for i, (size, _) in enumerate(known) if size >= micro_batch), len(known) - 1
        )
        (low, least), (high, most) = known[max(0, above - 1)], known[max(1, above)]
        return least + (most - least) * (micro_batch - low) / (high - low)

    def _seconds(self, choice: Choice) -> float:
        return self.seconds(choice).total

    def _fastest(self, way: Recompute) -> float:
        """Time of a step if memory were no matter."""
        return min(self._seconds(self._choice(way, size)) for size in self._sizes(self.whole))

    # ---------------------------------------------------------------------------------- the ways

    def _ways(self) -> Iterable[Recompute]:
        """From the least recompute to the most."""
        if self._wishes.recompute is not None:
            yield self._wishes.recompute
            return
        yield Recompute()
        if blocks := self._subject.blocks:
            if any(matmuls > 0 for _, _, matmuls in self._pace.block_bytes(self.smallest)):
                yield Recompute(blocks=blocks, keep="matmuls")
            yield Recompute(blocks=blocks)
        if self._subject.chains:
            yield Recompute(blocks=self._subject.chains, nested=True)
        if self._pace.has_host:
            yield Recompute(to_host=True)

    def _largest(self, way: Recompute) -> int | None:
        """The largest micro-batch that fits, or None if the smallest does not."""

        def fits(size: int) -> bool:
            return self._fits(self._choice(way, size))

        if fits(self.whole):
            return self.whole
        if not fits(self.smallest):
            return None
        unit = self.smallest
        low, high = unit, self.whole
        while self._passes(low) > self._passes(high - unit) and high > low * _CLOSE_ENOUGH:
            middle = self._in_units(self._guess(way, low, high))
            middle = min(max(middle, low + unit), self._in_units(high - 1))
            if middle <= low:
                break
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _guess(self, way: Recompute, low: int, high: int) -> int:
        """Where the peak meets the room, if it grows in a straight line from `low` to `high`; kept
        off the ends, so that a bend in the line costs few steps."""
        least, most = (self._peak(self._choice(way, size)) for size in (low, high))
        part = (self._room - least) / max(1, most - least)
        return low + int((high - low) * min(max(part, 0.02), 0.98))

    def _in_units(self, size: int) -> int:
        return size // self.smallest * self.smallest

    def _sizes(self, largest: int) -> list[int]:
        """Micro-batches worth weighing: the largest, evened out over the step, and fractions of it,
        whose data may stay in caches."""
        sizes = [self._evened(largest)]
        for part in (2, 4, 8, 16):
            if smaller := self._in_units(largest // part):
                sizes.append(self._evened(smaller))
        return list(dict.fromkeys(sizes))

    def _evened(self, size: int) -> int:
        """The smallest micro-batch that needs no more passes than `size` does."""
        units = -(-self.whole // (self._passes(size) * self.smallest))
        return min(units * self.smallest, size)

    def _passes(self, size: int) -> int:
        return -(-self.whole // size)

    # ---------------------------------------------------------------------- some of the blocks

    def _some_blocks(
        self, ways: Sequence[Recompute], largest: dict[Recompute, int], fitting: Sequence[Choice]
    ) -> list[Choice]:
        """Choices that recompute some of the blocks, faster than what fits so far, each traced."""
        blocks = self._subject.blocks
        plain, everything = Recompute(), Recompute(blocks=blocks)
        if len(blocks) < 2 or plain not in ways or everything not in ways:
            return []
        if largest.get(plain) == self.whole:
            return []
        top = largest.get(everything) or self._top(everything)
        if top is None:
            return []
        found: list[Choice] = []
        for size in self._between(largest.get(plain, 0), top):
            bar = min(map(self._seconds, (*fitting, *found)), default=float("inf"))
            choice = self._leanest_subset(size, bar)
            if choice is not None:
                found.append(choice)
        return found

    def _top(self, way: Recompute) -> int | None:
        """The largest micro-batch of a way that the search passed over, by its line."""
        return self._largest(way)

    def _between(self, low: int, high: int) -> list[int]:
        """Micro-batches from above `low` to `high`, each of which saves passes; the plain way's own
        largest, with one block recomputed, saves none."""
        sizes: list[int] = []
        size = high
        while size > max(low, self.smallest) and len(sizes) < 6:
            sizes.append(self._evened(size))
            passes = -(-self.whole // size)
            # About a third more passes each time, at least one more.
            size = self._in_units(-(-self.whole // max(passes + 1, passes * 4 // 3)))
        if low == 0 and self.smallest <= high:
            sizes.append(self.smallest)
        return list(dict.fromkeys(sizes))

    def _leanest_subset(self, size: int, bar: float) -> Choice | None:
        """The blocks to recompute at micro-batch `size`, for the least time, if that is below `bar`."""
        names = self._subject.blocks
        kept = [max(0.0, k) for k, _, _ in self._pace.block_bytes(size)]
        seconds = self._pace.block_seconds(size)
        none = self._peak_of(Recompute(), size)
        every = self._peak_of(Recompute(blocks=names), size)
        highest, lowest = level(kept, ()), level(kept, range(len(kept)))
        if highest <= lowest or none <= every:
            return None
        # What a trace shows to be freed in all is what the blocks free together.
        per_byte = (none - every) / (highest - lowest)
        room = float(self._room)
        for _ in range(_MOST_TRIES):
            chosen = cheapest(kept, seconds, lowest + (room - every) / per_byte)
            if not chosen or len(chosen) == len(names):
                return None
            way = Recompute(blocks=tuple(names[number] for number in chosen))
            choice = self._choice(way, size)
            if self._seconds(choice) >= bar:
                return None
            over = self._peak(choice) - self._room
            if over <= 0:
                return choice
            room -= max(over, 0.02 * (none - every) / len(names))
        return None

    def _peak_of(self, way: Recompute, size: int) -> float:
        """By the line of traces where there is one."""
        found = self._on_line(way, size)
        if found is not None:
            return found
        for one in (self.smallest, self.whole):
            self._peak(self._choice(way, one))
        return self._on_line(way, size) or float(self._peak(self._choice(way, size)))

    # --------------------------------------------------------------------------------- the choice

    def _pinned(self, ways: list[Recompute], size: int) -> Found:
        """For a micro-batch that the user fixed: the way to recompute."""
        size = min(size, self.whole)
        choices = [self._choice(way, size) for way in ways]
        fitting: list[Choice] = []
        for choice in sorted(choices, key=self._seconds):
            if self._fits(choice):
                fitting = [choice]
                break
        everything = Recompute(blocks=self._subject.blocks)
        plain = self._choice(Recompute(), size)
        if plain not in fitting and plain in choices and everything in ways:
            bar = min(map(self._seconds, fitting), default=float("inf"))
            if subset := self._leanest_subset(size, bar):
                fitting.append(subset)
        best = self._best(fitting) if fitting else min(choices, key=self._peak)
        return self._found(best, ways, fits=bool(fitting))

    def _best(self, fitting: Sequence[Choice]) -> Choice:
        fastest = min(self._seconds(choice) for choice in fitting)
        close = [c for c in fitting if self._seconds(c) <= fastest * _SAME_TIME]
        return min(close, key=lambda c: (self._bytes(c), self._seconds(c), order(c)))

    def _found(self, best: Choice, ways: list[Recompute], fits: bool) -> Found:
        if self._wishes.frontier:
            self._explore(ways)
        factor = self._setting.correction.bytes
        weighed = {choice: self._bytes(choice) for choice in (*self._seen, *self._weighed)}
        rejected = tuple(
            Candidate(
                choice=choice,
                peak_bytes=int(peak * factor),
                step_seconds=self._corrected(self._seconds(choice)),
                reason=self._reason(choice, best),
            )
            for choice, peak in sorted(weighed.items(), key=lambda item: order(item[0]))
            if choice != best
        )
        return Found(
            option=self._option(best, ways),
            rivals=tuple(self._rivals(best, weighed, ways)) if fits else (),
            rejected=rejected,
            frontier=self._frontier(weighed),
            fits=fits,
        )

    def _option(self, choice: Choice, ways: list[Recompute]) -> Option:
        size, evaluation = self._evaluation_batch(choice)
        chosen = choice.model_copy(update={"evaluation_batch": size})
        ladder = tuple(self._ladder(chosen, ways))
        return Option(chosen, self._look(choice), evaluation, self.seconds(choice), ladder)

    def _rivals(
        self, best: Choice, weighed: dict[Choice, int], ways: list[Recompute]
    ) -> Iterator[Option]:
        """What a trial on the device may show to be faster than `best`. There has to be room for what
        the trials of all of them leave behind.

        On a CPU there are none: how fast small passes are depends on how the heap has come to lie,
        which passes of other sizes change (docs/log.md)."""
        here = self._device.present and self._device.kind == "cuda"
        open_to = self._wishes.micro_batch is None and not self._subject.long
        if not (here and open_to and self._subject.division is None):
            return
        slowest = _CLOSE * self._seconds(best)
        close = [
            choice
            for choice, peak in weighed.items()
            if choice != best and peak <= self._room and self._seconds(choice) <= slowest
        ]
        taken, highest, left = 0, self._peak(best), 0
        for choice in sorted(close, key=lambda c: (self._seconds(c), order(c))):
            found = self._look(choice)
            higher = max(highest, found.peak.num_bytes)
            if higher + left + found.kernel_bytes > self._room:
                continue
            taken, highest, left = taken + 1, higher, left + found.kernel_bytes
            yield self._option(choice, ways)
            if taken == _MOST_RIVALS:
                return

    def _corrected(self, seconds: float) -> float:
        return seconds * self._setting.correction.seconds

    def _reason(self, choice: Choice, best: Choice) -> str:
        peak = self._bytes(choice)
        if peak > self._room:
            times = peak / self._device.budget_bytes
            compared = f", {times:.1f} times the budget" if times >= 1.05 else ""
            return (
                f"needs {format_bytes(peak)}, {format_bytes(peak - self._room)} more than the budget"
                f" leaves{compared}"
            )
        slower = self._seconds(choice) / max(self._seconds(best), 1e-12) - 1
        if slower > _SAME_TIME - 1:
            return f"fits, but is predicted to be {slower:.0%} slower"
        return "fits and is as fast, but needs more memory"

    def _explore(self, ways: Sequence[Recompute]) -> None:
        """Look at every way over all micro-batches: two traces each, the rest by the line."""
        for way in ways:
            for size in (self.smallest, self.whole):
                self._peak(self._choice(way, size))
            size = self.smallest
            while size < self.whole:
                self._bytes(self._choice(way, self._evened(size)))
                size *= 2

    def _frontier(self, weighed: dict[Choice, int]) -> tuple[FrontierPoint, ...]:
        """Of all that was weighed, what nothing else beats in both bytes and time; leanest first."""
        points: list[FrontierPoint] = []
        fastest = float("inf")
        for choice, peak in sorted(
            weighed.items(), key=lambda item: (item[1], self._seconds(item[0]), order(item[0]))
        ):
            seconds = self._seconds(choice)
            if seconds < fastest / 1.001:
                fastest = seconds
                points.append(
                    FrontierPoint(
                        choice=choice,
                        peak_bytes=int(peak * self._setting.correction.bytes),
                        step_seconds=self._corrected(seconds),
                    )
                )
        return tuple(points)

    def _evaluation_batch(self, best: Choice) -> tuple[int, Peak]:
        """The batch for evaluation, and the peak that it leads to."""
        valid = self._subject.num_valid
        if valid == 0:
            return best.micro_batch, Peak(0, {})
        size = min(4 * best.micro_batch, LARGEST_EVALUATION_BATCH)
        size = min(size, valid) if valid else size
        while size > 1:
            choice = best.model_copy(update={"evaluation_batch": size})
            peak = self._divided(evaluation_peak(self._subject, choice, self._device))
            if peak.num_bytes <= self._room:
                return size, peak
            size //= 2
        single = best.model_copy(update={"evaluation_batch": 1})
        return 1, self._divided(evaluation_peak(self._subject, single, self._device))

    def _ladder(self, chosen: Choice, ways: list[Recompute]) -> Iterable[Choice]:
        """Leaner choices: smaller micro-batches first, which cost least, then more recompute."""
        size = chosen.micro_batch
        evaluation = chosen.evaluation_batch
        while (half := self._in_units(size // 2)) >= self.smallest:
            size, evaluation = half, max(1, evaluation // 2)
            yield chosen.model_copy(update={"micro_batch": size, "evaluation_batch": evaluation})
        if chosen.recompute in ways:
            more = ways[ways.index(chosen.recompute) + 1 :]
        else:  # some of the blocks: then all of them
            more = [way for way in ways if way.keep == "nothing" and way.blocks]
        for way in more:
            yield chosen.model_copy(
                update={"micro_batch": size, "evaluation_batch": evaluation, "recompute": way}
            )

    def _nothing(self, ways: list[Recompute]) -> NoPlanFits:
        leanest = min((self._choice(way, self.smallest) for way in ways), key=self._peak)
        peak = self.peak(leanest)
        least = budget_for(peak)
        budget = format_bytes(self._device.budget_bytes)
        ghost = self._subject.identity.ghost_batch
        smaller = (
            f" A ghost batch smaller than {ghost} would need less, but changes BatchNorm's result."
            if ghost and ghost > 1
            else ""
        )
        long = self._subject.long
        if long:
            smaller += f" It has to hold the longest sample: {long}; shorten what is too long."
        seconds = format_seconds(self._corrected(self._seconds(leanest)))
        return NoPlanFits(
            f"no plan fits the budget of {budget}: the leanest ({leanest.describe()}) is predicted to"
            f" need {format_bytes(peak)}, at {seconds} per step. Give it at least"
            f" {format_bytes(least)} (--memory {-(-least // (1 << 20))}MiB), or take lower"
            f" precision.{smaller}{self._bought(leanest)}",
            least_bytes=least,
        )

    def _bought(self, leanest: Choice) -> str:
        """What the knobs that no plan turns by itself would buy."""
        found = knobs(self._subject, self._setting, leanest)
        if not found:
            return ""
        rows = [
            (
                knob.what,
                format_bytes(knob.peak_bytes),
                f"{format_seconds(self._corrected(knob.step_seconds))} per step",
                knob.remark,
            )
            for knob in found
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            f"  {what:{widths[0]}}  {peak:>{widths[1]}}  {time:>{widths[2]}}  {remark}".rstrip()
            for what, peak, time, remark in rows
        ]
        return "\nFrom there, one change at a time would need:\n" + "\n".join(lines)


def order(choice: Choice) -> tuple[int, bool, str, int]:
    """Candidates in the order in which a table shows them."""
    way = choice.recompute
    return len(way.blocks), way.nested, way.keep, -choice.micro_batch
