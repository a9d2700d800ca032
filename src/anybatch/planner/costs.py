"""Costs: bytes and seconds of the choices that a search looks at, each found once.

Time is known for every choice without tracing it. Bytes are known from a trace of the step; between two
traces of one way to recompute they lie on a nearly straight line over the micro-batch. `Sizes` are the
micro-batches into which the samples of a step can be cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from anybatch.compute.along_sequence import NotTileable
from anybatch.compute.recompute import NotRepeated
from anybatch.errors import AnybatchError
from anybatch.estimate import Footprint, Peak, Subject, evaluation_peak, footprint
from anybatch.estimate.head import Head
from anybatch.estimate.seconds import StepSeconds
from anybatch.planner.exchange import seconds_of_exchange
from anybatch.planner.ranks import reserve_of
from anybatch.planner.setting import Setting
from anybatch.plans import Choice, Parallel, Recompute, StatesOn, Update


class Untraceable(Exception):
    """The user's code raised something on fake tensors: its cause.

    Attributes:
        choice: under which.
    """

    def __init__(self, choice: Choice, cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {next(iter(str(cause).splitlines()), '')}")
        self.choice: Choice = choice
        self.cause: Exception = cause


class Costs:
    """What the choices of one search cost a rank. They differ in the way to recompute and in the
    micro-batch, and have everything else in common.

    Bytes are as traced. Seconds contain the correction learned from earlier runs.

    Args:
        subject: what a rank computes.
        setting: where, and among which ranks.
        states_on: where all of them have the optimizer's states.
        head: whose logits the loss takes in chunks; None: the loss is as it is written.

    Attributes:
        subject, setting, states_on, head: as given.
        sizes: micro-batches that there are.
        room: bytes that the budget leaves.
    """

    def __init__(
        self,
        subject: Subject,
        setting: Setting,
        states_on: StatesOn = "device",
        head: Head | None = None,
    ) -> None:
        self.subject = subject
        self.head = head
        self.setting = setting
        self.states_on: StatesOn = states_on
        pace = setting.pace
        whole = subject.division is None or pace.update != "fused" or pace.fuses_divided
        self._update: Update = pace.update if whole else "as given"
        self.sizes: Sizes = Sizes.of(subject)
        budget = setting.device.budget_bytes
        self.room: int = budget - reserve_of(budget, setting.device.kind)
        self._traced: dict[Choice, Footprint] = {}
        self._read_off: dict[Choice, int] = {}  # bytes by the line, where nothing was traced

    @property
    def parallel(self) -> Parallel:
        """How the ranks share a step."""
        return self.setting.layout.parallel

    def choice(self, way: Recompute, micro_batch: int) -> Choice:
        """The choice of that way and micro-batch."""
        return Choice(
            micro_batch=micro_batch,
            evaluation_batch=first_evaluation_batch(micro_batch, self.subject.num_valid),
            precision=self.setting.precision,
            recompute=way,
            update=self._update,
            optimizer_states=self.states_on,
            chunked_head=self.head.name if self.head else "",
        )

    def under(self, budget_bytes: int) -> Costs:
        """The same under another budget."""
        device = replace(self.setting.device, budget_bytes=budget_bytes)
        setting = replace(self.setting, device=device)
        return Costs(self.subject, setting, self.states_on, self.head)

    # -------------------------------------------------------------------------------------- bytes

    def footprint(self, choice: Choice) -> Footprint:
        """Of `choice`, from a trace. Raises `Untraceable`."""
        found = self._traced.get(choice)
        if found is None:
            if self.setting.watch is not None:
                self.setting.watch(f"candidate {len(self._traced) + 1}: {choice.describe()}")
            try:
                found = self._divided(footprint(self.subject, choice, self.setting.device))
            except Exception as error:  # whatever the user's code raises
                is_of_way = isinstance(error, NotRepeated | NotTileable)
                told = isinstance(error, AnybatchError) and not is_of_way
                if told and self.head is None:
                    raise
                raise Untraceable(choice, error) from error
            self._traced[choice] = found
        return found

    def evaluation(self, choice: Choice) -> Peak:
        """Of an evaluation under `choice`, from a trace."""
        return self._peak_divided(evaluation_peak(self.subject, choice, self.setting.device))

    def peak(self, choice: Choice) -> int:
        """Bytes at the peak of `choice`, from a trace."""
        return self.footprint(choice).peak.num_bytes

    def fits(self, choice: Choice) -> bool:
        """Whether `choice` fits the room, by a trace."""
        return self.peak(choice) <= self.room

    def least(self, choice: Choice) -> int:
        """Bytes at the peak of `choice`, where evaluation takes the fewest samples at once; from
        traces."""
        trained = self.peak(choice)
        if self.subject.num_valid == 0:
            return trained
        single = choice.model_copy(update={"evaluation_batch": 1})
        return max(trained, self.evaluation(single).num_bytes)

    def bytes(self, choice: Choice) -> int:
        """Bytes at the peak of `choice`, from a trace if there is one, else by the line of its way."""
        if choice in self._traced:
            return self.peak(choice)
        if choice not in self._read_off:
            way = choice.recompute
            self.peak(self.choice(way, self.sizes.low))  # a line has two ends
            found = self._on_line(way, choice.micro_batch)
            if found is None:
                return self.peak(choice)
            self._read_off[choice] = int(found)
        return self._read_off[choice]

    def about(self, way: Recompute, micro_batch: int) -> float:
        """Bytes at the peak of that choice by the line of its way, for which traces are made at both
        ends if there is none yet. Not remembered, so the choice is not among the weighed ones."""
        found = self._on_line(way, micro_batch)
        if found is None:
            for size in (self.sizes.low, self.sizes.whole):
                self.peak(self.choice(way, size))
            found = self._on_line(way, micro_batch)
        return found or float(self.peak(self.choice(way, micro_batch)))

    def weighed(self) -> dict[Choice, int]:
        """Every choice that was looked at, with the bytes at its peak."""
        return {choice: self.bytes(choice) for choice in (*self._traced, *self._read_off)}

    def _on_line(self, way: Recompute, micro_batch: int) -> float | None:
        """The peak of `way` at `micro_batch`, between the nearest sizes that were traced."""
        known = sorted(
            (choice.micro_batch, seen.peak.num_bytes)
            for choice, seen in self._traced.items()
            if choice.recompute == way
        )
        if len(known) < 2:
            return None
        above = next(
            (i for i, (size, _) in enumerate(known) if size >= micro_batch), len(known) - 1
        )
        (low, least), (high, most) = known[max(0, above - 1)], known[max(1, above)]
        return least + (most - least) * (micro_batch - low) / (high - low)

    def _divided(self, found: Footprint) -> Footprint:
        """`found` for a rank that holds a part of the model, if it does."""
        division = self.subject.division
        if division is None:
            return found
        part = 0.0 if division.offload else 1 / division.ranks
        first, later = found.commit_bytes
        commit = int(first * part), int(later * part)
        return replace(found, peak=self._peak_divided(found.peak), commit_bytes=commit)

    def _peak_divided(self, peak: Peak) -> Peak:
        division = self.subject.division
        return peak if division is None else peak.divided(division)

    # ------------------------------------------------------------------------------------ seconds

    def step(self, choice: Choice) -> StepSeconds:
        """Seconds of a step under `choice`, by part. Earlier runs taught nothing of the exchange: what
        is learned from had none."""
        passes = self.sizes.passes(choice.micro_batch)
        step = self.setting.pace.step(
            choice.micro_batch,
            choice.recompute,
            self.sizes.whole,
            seconds_of_exchange(self.subject, self.setting, choice, passes),
            choice.optimizer_states,
            self.head,
        )
        division = self.subject.division
        if division is not None:  # each rank updates its part
            part = 1 / division.ranks
            on_host = self.setting.pace.update_on_host(part)
            step = replace(step, update=on_host if division.offload else part * step.update)
        return step.corrected(self.setting.correction.seconds)

    def seconds(self, choice: Choice) -> float:
        """Seconds of a step under `choice`."""
        return self.step(choice).total

    def least_seconds(self, way: Recompute) -> float:
        """Seconds of a step under `way` if memory were no matter."""
        sizes = self.sizes.worth_weighing(self.sizes.whole)
        return min(self.seconds(self.choice(way, size)) for size in sizes)


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
