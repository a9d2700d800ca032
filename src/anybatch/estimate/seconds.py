"""Seconds: the time of a step, from its operations and the speeds of the device.

Each operation takes the longer of two times, that of its arithmetic and that of its bytes (a roofline,
Williams et al. 2009). On a CPU the time to start each operation is added. On CUDA operations are
started while earlier ones run, so the longer of the two sums counts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from anybatch.compute.along_sequence import NUM_TILES
from anybatch.estimate.calibration import Speeds
from anybatch.estimate.cuda import is_overlaid
from anybatch.estimate.head import Head
from anybatch.estimate.seconds_work import Counting, Operation, Work
from anybatch.estimate.subject import Subject
from anybatch.machine import Device
from anybatch.plans import Choice, Link, Precision, Recompute, StatesOn, Update

_PCIE_BYTES = {"7": 16e9, "8": 32e9, "9": 64e9}
"""Bytes per second and direction of sixteen lanes of PCIe 3, 4 and 5, by the first number of CUDA's
compute capability: what joins a device to its host, also where several have a link of their own."""

_LATENCY_SECONDS = {"cuda": 2e-5, "cpu": 1.5e-4}
"""What one hop between ranks takes however little it carries: over NCCL, and over gloo on one machine
(a sum of 4 to 200 KB on two ranks took 0.2 to 0.35 ms, which is two hops)."""

_HOST_BYTES = 20e9
"""Bytes per second that one rank's cores stream from the host's memory in an update, about."""

_MEETING_SECONDS = 4e-4
"""What one meeting of ranks inside a norm takes, which the host waits for: two small exchanges and what
surrounds them, over gloo on one machine."""

_PASS_SECONDS = 3e-4
"""What a micro-batch takes beside its operations: samples are fetched, collated and moved."""

_CHECKPOINT_SECONDS = 1.5e-4
"""What computing a block again takes beside its operations, in Python: torch's checkpoint follows what
is saved, and keeps the state of random numbers."""

_KERNEL_SECONDS = 5e-6
"""What a kernel on CUDA takes beside its work, while it fills the device and drains."""

_Place = tuple[str, int, bool]
"""Of operations: their phase, their block, and whether they are products."""

_Group = tuple[str, int, str, torch.dtype]
"""Of operations that are alike: their phase, their block, their name, and their dtype."""


@dataclass(slots=True)
class _Amounts:
    """Of the operations of a group together: how many there are, their floating-point operations, their
    bytes, and how many calls start them."""

    count: float = 0.0
    flops: float = 0.0
    num_bytes: float = 0.0
    calls: float = 0.0


@dataclass(slots=True)
class _Spent:
    """Seconds of some operations of one micro-batch: to compute, and to start them."""

    work: float = 0.0
    calls: float = 0.0

    def __add__(self, other: _Spent) -> _Spent:
        """Both."""
        return _Spent(self.work + other.work, self.calls + other.calls)

    def times(self, factor: float) -> _Spent:
        """So much of both."""
        return _Spent(factor * self.work, factor * self.calls)


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Predicted time of one global step of one rank, and its parts.

    Attributes:
        forward, backward, recompute: of all micro-batches; a joint loss is compared in forward.
        update: clipping and the optimizer.
        exchange: of gradients among ranks.
    """

    forward: float
    backward: float
    recompute: float
    update: float
    exchange: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.forward + self.backward + self.recompute + self.update + self.exchange

    def corrected(self, factor: float) -> StepSeconds:
        """With all that a rank does by itself taking `factor` times as long."""
        return StepSeconds(
            forward=self.forward * factor,
            backward=self.backward * factor,
            recompute=self.recompute * factor,
            update=self.update * factor,
            exchange=self.exchange,
        )


class Pace:
    """How fast a task is on a device in one precision, for any micro-batch and any recompute.

    Traces the task's work twice, at two micro-batches; everything between and beyond lies on straight
    lines through these.

    Args:
        subject: the task.
        device: where.
        speeds: of the device.
        precision: of the plan.

    Raises whatever the model or loss raises on fake tensors.
    """

    def __init__(
        self,
        subject: Subject,
        device: Device,
        speeds: Speeds,
        precision: Precision,
    ) -> None:
        self._speeds = speeds
        self._tf32 = precision == "tf32"
        unit = min(subject.identity.ghost_batch or 1, subject.whole)
        few = min(max(unit, -(-8 // unit) * unit), subject.whole)
        many = min(4 * few, subject.whole)
        choice = Choice(micro_batch=few, evaluation_batch=1, precision=precision)

        def count(on: Device) -> tuple[Counting, Work, Work, list[Operation]]:
            counting = Counting(subject, choice, on)
            first = counting.at(few)
            second = first if many == few else counting.at(many)
            return counting, first, second, counting.comparison() if subject.compared else []

        counting, self._low, self._high, compared = subject.following(device, count)
        self._device = device = subject.as_traced(device)
        self._stands_in = is_overlaid(device)
        self._subject = subject
        self.update: Update = counting.update
        self.fuses_divided: bool = counting.fuses_divided
        self._can_part = counting.can_part
        self.compares_parameters: bool = counting.compares_parameters
        passes = (
            [o for o in work.operations if o.phase != "update"] for work in (self._low, self._high)
        )
        self._ends = tuple(map(_grouped, passes))
        self._memo: dict[int, dict[_Place, _Spent]] = {}
        self._compare_seconds = self._seconds_of(compared)
        self.update_seconds: float = self._seconds_of(
            [o for o in self._low.operations if o.phase == "update"]
        )

    @property
    def measured(self) -> bool:
        """Whether the device was measured, or its figures are nominal."""
        return self._speeds.measured

    @property
    def parameter_bytes(self) -> int:
        """Of what is trained."""
        return self._low.parameter_bytes

    @property
    def has_host(self) -> bool:
        """Whether the host has a memory that is not the device's."""
        return self._device.kind == "cuda"

    @property
    def can_offload(self) -> bool:
        """Whether the optimizer's states can lie in host memory, and that is another than the
        device's."""
        return self._can_part and self.has_host

    @property
    def blocks_have_products(self) -> bool:
        """Whether the policy that keeps matrix products keeps anything."""
        return any(o.block >= 0 and o.flops > 0 for o in self._low.operations)

    @property
    def tileable(self) -> tuple[str, ...]:
        """Names of MLPs inside of blocks that can run in tiles along the sequence."""
        return self._low.tileable

    def has_logits(self, num_samples: int, least: int) -> bool:
        """Whether a pass over so many samples takes the softmax of more than `least` numbers at once,
        as a cross-entropy does."""
        low, high = (
            max((o.num_bytes for o in work.operations if o.name == "_log_softmax"), default=0.0)
            for work in (self._low, self._high)
        )
        return self._line(low, high, num_samples) > 8 * least

    def update_on_host(self, part: float) -> float:
        """Seconds to update so large a `part` of the model on the host: every number is read, and all
        but gradients are written."""
        return part * (3 * self.parameter_bytes + 2 * self._low.state_bytes) / _HOST_BYTES

    def in_half(self) -> Pace:
        """About the pace under autocast to bfloat16, of operations in float32, without tracing them in
        it: products are computed in half precision, everything else as it is."""
        other = copy.copy(self)
        matmul = self._speeds.matmul
        half = {name: max(rate, matmul.get("bfloat16", rate)) for name, rate in matmul.items()}
        other._speeds = replace(self._speeds, matmul=half)
        other._memo = {}
        return other

    def micro(
        self, micro_batch: int, recompute: Recompute, head: Head | None = None
    ) -> tuple[float, float, float]:
        """Seconds of forward, backward and recompute of one micro-batch; the loss in chunks of the
        logits of `head`, or as it is written."""
        places = self._places(micro_batch)
        forward = sum((s for place, s in places.items() if place[0] == "forward"), _Spent())
        backward = sum((s for place, s in places.items() if place[0] == "backward"), _Spent())
        moved = 0.0
        if recompute.to_host and self.has_host:
            # Queued between the kernels, so it adds up.
            saved = self._line(self._low.saved_bytes, self._high.saved_bytes, micro_batch)
            moved = bus_seconds(saved, self._device)
        in_chunks = self._by_chunks(head, micro_batch) if head is not None else 0.0
        return (
            self._in_a_row(forward) + _PASS_SECONDS + moved + in_chunks,
            self._in_a_row(backward) + moved,
            self._again(places, forward, recompute),
        )

    def _by_chunks(self, head: Head, micro_batch: int) -> float:
        """Seconds that the loss in chunks takes more than as it is written: logits are computed once
        more for backward in half precision, and for anything else that uses them."""
        if not head.is_left_out(micro_batch):
            return 0.0
        tokens = head.tokens * micro_batch
        numbers = tokens * head.width + head.words * head.width + tokens * head.words
        product = Operation(
            name="mm",
            dtype=head.dtype,
            flops=2 * tokens * head.width * head.words,
            num_bytes=head.dtype.itemsize * numbers,
            phase="forward",
        )
        count = head.num_computed + (head.dtype in (torch.float16, torch.bfloat16))
        return count * self._seconds_of([product])

    def step(
        self,
        micro_batch: int,
        recompute: Recompute,
        num_samples: int,
        exchange: float = 0.0,
        states_on: StatesOn = "device",
        head: Head | None = None,
    ) -> StepSeconds:
        """Seconds of a step of `num_samples` in micro-batches of at most `micro_batch`; see `micro`."""
        offloaded = states_on == "host" and self.has_host
        whole, rest = divmod(num_samples, micro_batch)
        forward, backward, again = self.micro(micro_batch, recompute, head)
        last = self.micro(rest, recompute, head) if rest else (0.0, 0.0, 0.0)
        first = whole * forward + last[0]
        if self._subject.is_encoded_first(micro_batch):
            first *= 2
        # Of states in host memory: to the device, and back.
        crossing = 2 * bus_seconds(self._low.state_bytes, self._device) if offloaded else 0.0
        return StepSeconds(
            forward=first + self._compare_seconds,
            backward=whole * backward + last[1],
            recompute=whole * again + last[2],
            update=self.update_seconds + crossing,
            exchange=exchange,
        )

    def block_seconds(self, micro_batch: int) -> list[float]:
        """Seconds to compute each block once more."""
        spent = [_Spent(0.0, _CHECKPOINT_SECONDS) for _ in self._subject.blocks]
        for (phase, block, _), seconds in self._places(micro_batch).items():
            if phase == "forward" and block >= 0:
                spent[block] += seconds
        return [self._in_a_row(each) for each in spent]

    def block_bytes(self, micro_batch: int) -> list[float]:
        """Bytes that each block keeps for backward."""
        ends = zip(self._low.kept_bytes, self._high.kept_bytes, strict=True)
        return [self._line(low, high, micro_batch) for low, high in ends]

    def _places(self, micro_batch: int) -> dict[_Place, _Spent]:
        """What the operations of one micro-batch of that size take, by their places."""
        found = self._memo.get(micro_batch)
        if found is None:
            found = self._memo[micro_batch] = {}
            (low, high), none = self._ends, _Amounts()
            for group in low | high:
                a, b = low.get(group, none), high.get(group, none)
                between = _Amounts(
                    self._line(a.count, b.count, micro_batch),
                    self._line(a.flops, b.flops, micro_batch),
                    self._line(a.num_bytes, b.num_bytes, micro_batch),
                    self._line(a.calls, b.calls, micro_batch),
                )
                place = *group[:2], between.flops > 0
                found[place] = found.get(place, _Spent()) + self._spent(group, between)
        return found

    def _line(self, at_low: float, at_high: float, micro_batch: int) -> float:
        """The value at `micro_batch` of the line through those at the sizes that were traced; through
        the origin where they are one."""
        low, high = self._low.micro_batch, self._high.micro_batch
        if high == low:
            return at_low * micro_batch / low
        return max(0.0, at_low + (at_high - at_low) * (micro_batch - low) / (high - low))

    def _again(self, places: dict[_Place, _Spent], forward: _Spent, recompute: Recompute) -> float:
        """Seconds of what is computed a second time (and, as a tree, more often)."""
        if not recompute.blocks:
            return 0.0
        names = self._subject.blocks
        if recompute.nested or "." in recompute.blocks:
            # A tree over n layers computes each log2(n) times more.
            levels = self._low.tree_levels if recompute.nested else 1
            return levels * self._in_a_row(forward + _checkpoints(max(1, len(names))))
        asked = set(recompute.blocks)
        numbers = {i for i, name in enumerate(names) if _named(name, asked)}
        if not numbers:  # blocks of the user's own naming: as much of forward as there are names
            part = min(1.0, len(asked) / max(1, len(names) or len(asked)))
            return part * self._in_a_row(forward + _checkpoints(len(names)))
        again = _checkpoints(len(numbers) + NUM_TILES * len(recompute.tiled))
        for (phase, block, is_product), spent in places.items():
            kept = recompute.keep == "matmuls" and is_product
            if phase == "forward" and block in numbers and not kept:
                again += spent
                if recompute.tiled:  # in the second run of their block, and once more by themselves
                    again += spent.times(self._low.tiled_part)
        return self._in_a_row(again)

    def _in_a_row(self, spent: _Spent) -> float:
        """Seconds of operations that are started one after the other."""
        return max(spent.work, spent.calls) if self._speeds.overlap else spent.work + spent.calls

    def _seconds_of(self, operations: Sequence[Operation]) -> float:
        groups = _grouped(operations)
        return self._in_a_row(sum((self._spent(*each) for each in groups.items()), _Spent()))

    def _spent(self, group: _Group, amounts: _Amounts) -> _Spent:
        """What operations of a group take."""
        phase, _, _, dtype = group
        speeds = self._speeds
        seconds = amounts.num_bytes / speeds.memory
        if amounts.flops:
            name = str(dtype).removeprefix("torch.")
            if name == "float32" and self._tf32:
                name = "tf32"
            rate = speeds.matmul.get(name) or speeds.matmul["float32"]
            seconds = max(seconds, amounts.flops / rate)
        calls = amounts.calls * speeds.call_seconds
        if phase == "update" and self._stands_in:
            # CPU tensors stand for those of the device, on which optimizers take all at once.
            return _Spent(seconds, calls / 16)
        kernels = amounts.count * _KERNEL_SECONDS if speeds.overlap else 0.0
        return _Spent(seconds + kernels, calls)


def _grouped(operations: Iterable[Operation]) -> dict[_Group, _Amounts]:
    found: dict[_Group, _Amounts] = {}
    for o in operations:
        amounts = found.setdefault((o.phase, o.block, o.name, o.dtype), _Amounts())
        amounts.count += 1
        amounts.flops += o.flops
        amounts.num_bytes += o.num_bytes
        amounts.calls += max(1.0, o.num_tensors / 8)
    return found


def _checkpoints(count: int) -> _Spent:
    return _Spent(0.0, count * _CHECKPOINT_SECONDS)


def tabulated_link(device: Device) -> Link:
    """What joins devices like `device`, where the ranks have not measured it: all on one machine."""
    hop = _LATENCY_SECONDS.get(device.kind, _LATENCY_SECONDS["cuda"])
    return Link(bytes_per_second=device.rates.link_bytes, hop_seconds=hop)


def bus_seconds(num_bytes: float, device: Device) -> float:
    """Time for so many bytes to cross between host memory and `device`, one way."""
    return num_bytes / _bus_bytes(device)


def _bus_bytes(device: Device) -> float:
    """Bytes per second between the host's memory and `device`, by the bus of its generation."""
    major = device.capability.partition(".")[0]
    bus = _PCIE_BYTES.get(major, _PCIE_BYTES["9"] if major.isdigit() else _PCIE_BYTES["8"])
    return min(bus, device.rates.link_bytes)


def meeting_seconds(
    num_norms: int, num_passes: int, recompute: Recompute, link: Link | None, num_ranks: int
) -> float:
    """Time of a step in which so many norms meet over ranks: forward, backward, and in what is
    computed again. Where the ranks have measured their `link`, a meeting takes no less than its two
    exchanges."""
    per_norm = 3 if recompute.blocks else 2
    own = 2 * link.seconds(0, num_ranks) if link is not None and link.measured else 0.0
    return per_norm * num_norms * num_passes * max(_MEETING_SECONDS, own)


def _named(block: str, names: set[str]) -> bool:
    """Whether `block` is one of `names`, or inside one."""
    return any(fnmatchcase(block, name) or block.startswith(f"{name}.") for name in names)
