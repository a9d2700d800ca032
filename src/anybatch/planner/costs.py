"""Costs: bytes and seconds of the choices that a search considers, each computed once.

Time is known for every choice without tracing it. Bytes are known from a trace of the step; between
two traces with the same recompute method, they are nearly linear in the micro-batch. `Sizes` are
the micro-batches into which the samples of a step can be split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from anybatch.compute.along_sequence import NotTileable
from anybatch.compute.chunked_attention import NotChunkable
from anybatch.compute.recompute import NotRepeated
from anybatch.errors import AnybatchError
from anybatch.estimate import Footprint, Peak, Subject, evaluation_peak, footprint
from anybatch.estimate.head import Head
from anybatch.estimate.peak import LOSS
from anybatch.estimate.seconds import StepSeconds
from anybatch.estimate.sharding import GATHERED
from anybatch.planner.exchange import seconds_of_exchange
from anybatch.planner.ranks import reserve_of
from anybatch.planner.setting import Setting
from anybatch.plans import Choice, Parallel, Recompute, StatesOn, Update


class Untraceable(Exception):
    """Raised when the user's code fails on fake tensors; `cause` is its exception.

    Attributes:
        choice: choice under which it failed.
    """

    def __init__(self, choice: Choice, cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {next(iter(str(cause).splitlines()), '')}")
        self.choice: Choice = choice
        self.cause: Exception = cause


class Costs:
    """Costs of the choices of one search for one rank. The choices differ in the recompute method
    and in the micro-batch, and have everything else in common.

    Bytes are as traced. Seconds include the correction learned from earlier runs.

    Args:
        subject: computation of one rank.
        setting: device and ranks.
        states_on: where the optimizer states are, for all choices.
        head: head whose logits the loss computes in chunks; None: the loss is computed as written.

    Attributes:
        subject, setting, states_on, head: as given.
        sizes: available micro-batches.
        room: bytes that the budget leaves after its reserve.
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
        self._read_off: dict[Choice, int] = {}  # interpolated bytes of untraced choices

    @property
    def parallel(self) -> Parallel:
        """How the ranks share a step."""
        return self.setting.layout.parallel

    def choice(self, way: Recompute, micro_batch: int) -> Choice:
        """The choice with this recompute method and micro-batch."""
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
        """The same costs under another budget."""
        device = replace(self.setting.device, budget_bytes=budget_bytes)
        setting = replace(self.setting, device=device)
        return Costs(self.subject, setting, self.states_on, self.head)

    # -------------------------------------------------------------------------------------- bytes

    def footprint(self, choice: Choice) -> Footprint:
        """The footprint of `choice`, from a trace. Raises `Untraceable`."""
        found = self._traced.get(choice)
        if found is None:
            if self.setting.watch is not None:
                self.setting.watch(f"candidate {len(self._traced) + 1}: {choice.describe()}")
            try:
                found = footprint(self.subject, choice, self.setting.device)
            except Exception as error:  # any exception of the user's code
                is_of_way = isinstance(error, NotRepeated | NotTileable | NotChunkable)
                is_final = isinstance(error, AnybatchError) and not is_of_way
                if is_final and self.head is None:
                    raise
                raise Untraceable(choice, error) from error
            self._traced[choice] = found
            by_kind = found.peak.by_kind
            saved = sum(by_kind.get(kind, 0) for kind in ("activations", LOSS, GATHERED))
            self.setting.saved_bytes[self._passes(choice)] = saved
        return found

    def _passes(self, choice: Choice) -> tuple[Choice, int]:
        """What determines the memory of a pass, except where the optimizer states are: `choice`, and
        the number of ranks that divide the model."""
        division = self.subject.division
        changes = {"optimizer_states": "device", "update": "as given"}
        return choice.model_copy(update=changes), division.ranks if division else 1

    def evaluation(self, choice: Choice) -> Peak:
        """The peak of an evaluation under `choice`, from a trace."""
        return evaluation_peak(self.subject, choice, self.setting.device)

    def peak(self, choice: Choice) -> int:
        """Peak memory of `choice` in bytes, from a trace."""
        return self.footprint(choice).peak.num_bytes

    def fits(self, choice: Choice) -> bool:
        """Whether the peak of `choice` is at most `room`, according to a trace, which is not made if a
        lower bound is more."""
        least = self.least_bytes(choice.recompute, choice.micro_batch)
        saved = self.setting.saved_bytes.get(self._passes(choice), 0)
        return max(least, saved) <= self.room >= self.peak(choice)

    def least_bytes(self, way: Recompute, micro_batch: int) -> float:
        """A lower bound of the peak: what is held, and what all blocks save for backward, or one of
        them if all are recomputed. Of other methods only what is held is known."""
        if way.nested or way.to_host or way.tiled or way.chunked_attention:
            return self.held_bytes(micro_batch)
        kept = self.setting.pace.block_bytes(micro_batch)
        saved = sum(kept)
        if way.blocks:
            saved = max(kept, default=0.0) if way.blocks == self.subject.blocks else 0.0
        return saved + self.held_bytes(micro_batch)

    def held_bytes(self, micro_batch: int) -> float:
        """Bytes of weights and optimizer states, and of gradients if passes add to them."""
        pace, division = self.setting.pace, self.subject.division
        num_bytes = pace.parameter_bytes + (0 if self.states_on == "host" else pace.state_bytes)
        if micro_batch < self.sizes.whole:
            num_bytes += pace.parameter_bytes
        if division is None:
            return num_bytes
        return 0.0 if division.offload else num_bytes / division.ranks

    def least(self, choice: Choice) -> int:
        """Peak memory of `choice` in bytes if evaluation takes one sample at a time, from traces."""
        trained = self.peak(choice)
        if self.subject.num_valid == 0:
            return trained
        single = choice.model_copy(update={"evaluation_batch": 1})
        return max(trained, self.evaluation(single).num_bytes)

    def bytes(self, choice: Choice) -> int:
        """Peak memory of `choice` in bytes, from a trace if there is one, otherwise interpolated
        between traces of the same recompute method."""
        if choice in self._traced:
            return self.peak(choice)
        if choice not in self._read_off:
            way = choice.recompute
            self.peak(self.choice(way, self.sizes.low))  # interpolation needs two points
            found = self._on_line(way, choice.micro_batch)
            if found is None:
                return self.peak(choice)
            self._read_off[choice] = int(found)
        return self._read_off[choice]

    def about(self, way: Recompute, micro_batch: int) -> float:
        """Interpolated peak memory of this choice in bytes; two sizes are traced if there are no
        traces yet. The result is not stored, so the choice does not count as considered."""
        found = self._on_line(way, micro_batch)
        if found is None:
            for size in (self.sizes.low, micro_batch):
                self.peak(self.choice(way, size))
            found = self._on_line(way, micro_batch)
        return found or float(self.peak(self.choice(way, micro_batch)))

    def most(self, way: Recompute) -> float:
        """An upper bound of the micro-batch of `way`: estimated from traces of two sizes or more,
        before that from a lower bound of the peak."""
        if len(self._known(way)) > 1:
            return max(self.sizes.low, _BEYOND * self.reach(way))
        size = self.sizes.low
        least, more = (self.least_bytes(way, each) for each in (size, size + 1))
        return size + (self.room - least) / (more - least) if more > least else self.sizes.whole

    def reach(self, way: Recompute) -> float:
        """The micro-batch at which the peak of `way` is estimated to reach the room, from the traces
        of the sizes nearest to it. Only the smallest needs to have been traced."""
        known = self._known(way)
        below = [one for one in known if one[1] <= self.room][-2:]
        above = [one for one in known if one[1] > self.room][:2]
        ends = [*below[-1:], *above[:1]] if below and above else below or above
        (size, num_bytes), *others = ends
        if others:
            ((other, more),) = others
            per_sample = (more - num_bytes) / (other - size)
        else:
            by_kind = self.footprint(self.choice(way, size)).peak.by_kind
            per_sample = sum(by_kind.get(kind, 0) for kind in _GROWING) / size
        # Where the peak is that of the update, it does not grow until that of backward exceeds it.
        saved = self.least_bytes(way, size + 1) - self.least_bytes(way, size)
        return size + (self.room - num_bytes) / max(per_sample, saved, 1.0)

    def weighed(self) -> dict[Choice, int]:
        """All choices that were considered, with their peak memory in bytes."""
        return {choice: self.bytes(choice) for choice in (*self._traced, *self._read_off)}

    def _known(self, way: Recompute) -> list[tuple[int, int]]:
        """The traced micro-batches of `way` and their peaks in bytes."""
        return sorted(
            (choice.micro_batch, seen.peak.num_bytes)
            for choice, seen in self._traced.items()
            if choice.recompute == way
        )

    def _on_line(self, way: Recompute, micro_batch: int) -> float | None:
        """The peak of `way` at `micro_batch`, interpolated between the nearest traced sizes; None
        if there are fewer than two."""
        known = self._known(way)
        if len(known) < 2:
            return None
        above = next(
            (i for i, (size, _) in enumerate(known) if size >= micro_batch), len(known) - 1
        )
        (low, least), (high, most) = known[max(0, above - 1)], known[max(1, above)]
        return least + (most - least) * (micro_batch - low) / (high - low)

    # ------------------------------------------------------------------------------------ seconds

    def step(self, choice: Choice) -> StepSeconds:
        """Seconds of a step under `choice`, by part. The correction does not apply to the exchange,
        since the runs that it is learned from had none."""
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
        """Seconds of a step under `way` if memory were unlimited."""
        sizes = self.sizes.worth_weighing(self.sizes.whole)
        return min(self.seconds(self.choice(way, size)) for size in sizes)


_BEYOND = 1.25
"""A micro-batch larger than the estimated one by more than this factor is assumed not to fit."""

_GROWING = ("activations", LOSS, "input batch", "temporary")
"""Kinds of bytes that grow with the micro-batch."""

_LARGEST_EVALUATION_BATCH = 1024
_MOST_PASSES_MORE = 64
_FRACTIONS = (1, 3 / 4, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
_MOST_BETWEEN = 6
"""Maximum number of micro-batches for which subsets of the blocks are considered."""


def first_evaluation_batch(micro_batch: int, num_valid: int | None) -> int:
    """The evaluation batch that is used with a micro-batch if it fits: without backward, there is
    memory for more samples. `num_valid` is None for a stream."""
    size = min(4 * micro_batch, _LARGEST_EVALUATION_BATCH)
    if num_valid is None:
        return size
    return min(size, num_valid) if num_valid else micro_batch


@dataclass(frozen=True, slots=True)
class Sizes:
    """Micro-batches of a step: whole ghost batches, or all samples at once.

    Attributes:
        whole: number of samples of a step.
        smallest: one sample, one ghost batch, or one grain.
    """

    whole: int
    smallest: int

    @classmethod
    def of(cls, subject: Subject) -> Sizes:
        """The micro-batches of a step of `subject`."""
        return cls(subject.whole, min(subject.identity.unit, subject.whole))

    @property
    def low(self) -> int:
        """The smallest micro-batch used for interpolation. It is not one sample if this can be
        avoided: with a single sample some copies are not made, so other sizes cannot be predicted
        from it."""
        return 2 if self.smallest == 1 and self.whole > 2 else self.smallest

    def passes(self, size: int) -> int:
        """Number of passes of `size` samples that a step takes."""
        return -(-self.whole // size)

    def in_units(self, size: int) -> int:
        """The largest micro-batch of at most `size`; 0 if there is none."""
        return size // self.smallest * self.smallest

    def evened(self, size: int) -> int:
        """The smallest micro-batch that takes no more passes than `size` does."""
        units = -(-self.whole // (self.passes(size) * self.smallest))
        return min(units * self.smallest, size)

    def worth_weighing(self, largest: int) -> list[int]:
        """Micro-batches to consider: the largest, evened out over the step, and fractions of it,
        whose data may stay in caches; and near each of them the one that leaves no pass short.
        Three quarters is included since an allocator's memory does not grow monotonically with the
        size, so the largest micro-batch may fit although its evened size does not."""
        # All samples at once may not be a whole number of ghost batches.
        sizes = [self.evened(largest)]
        for part in _FRACTIONS:
            if smaller := self.in_units(int(largest * part)):
                sizes += [self.evened(smaller), self.whole_part(smaller)]
        return list(dict.fromkeys(sizes))

    def missing(self, size: int) -> int:
        """Number of samples by which the last pass falls short of `size`."""
        return self.passes(size) * size - self.whole

    def whole_part(self, size: int) -> int:
        """The largest micro-batch of at most `size` that leaves no pass short, if it takes at most
        a third more passes; otherwise the same as `evened`."""
        fewest = self.passes(size)
        for passes in range(fewest, min(fewest * 4 // 3, fewest + _MOST_PASSES_MORE) + 1):
            part, rest = divmod(self.whole, passes)
            if not rest and part % self.smallest == 0:
                return part
        return self.evened(size)

    def between(self, low: int, high: int) -> list[int]:
        """A few micro-batches above `low` and up to `high`, largest first: each takes about a third
        more passes than the previous one. The smallest is included if `low` is 0."""
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
        """Half of `size`, half of that, and so on, down to the smallest micro-batch."""
        while (size := self.in_units(size // 2)) >= self.smallest:
            yield size

    def doubled(self) -> Iterator[int]:
        """The smallest micro-batch, twice that, and so on, each evened out; all are smaller than
        the whole step."""
        size = self.smallest
        while size < self.whole:
            yield self.evened(size)
            size *= 2
