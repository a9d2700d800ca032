"""Seconds: the time of a step, operation by operation.

Each operation takes the longer of two times, that of its arithmetic and that of its bytes, at the rates
that the device reaches for work of that size (a roofline, Williams et al. 2009). On a CPU the time to
start each operation is added. On CUDA operations are started while earlier ones run, so the longer of
the two sums counts.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from anybatch.estimate.calibration import Speeds, rate_at
from anybatch.estimate.cuda import is_overlaid
from anybatch.estimate.head import Head
from anybatch.estimate.seconds_operations import PRODUCTS, Operation
from anybatch.estimate.seconds_work import Counting, Work, work_of
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

_THIN = 16.0
"""Smallest dim of a product with which it is half as fast as a cube of the same work (CUDA)."""

_KERNEL_SECONDS = 2e-6
"""The shortest time of a kernel on CUDA."""


@dataclass(slots=True)
class _Spent:
    """Seconds of some operations of one micro-batch.

    Attributes:
        work, calls: to compute, and to start them.
        apart: what they would take if each were waited for.
    """

    work: float = 0.0
    calls: float = 0.0
    apart: float = 0.0

    def add(self, other: _Spent, count: int = 1) -> None:
        """Operations as `other` has them, so many times."""
        self.work += count * other.work
        self.calls += count * other.calls
        self.apart += count * other.apart


_Place = tuple[str, int, bool]
"""Of operations: their phase, their block, and whether they are products."""


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
        self._halved = False
        unit = min(subject.identity.ghost_batch or 1, subject.whole)
        few = min(max(unit, -(-8 // unit) * unit), subject.whole)
        many = min(4 * few, subject.whole)
        choice = Choice(micro_batch=few, evaluation_batch=1, precision=precision)

        def count(on: Device) -> tuple[Counting, Work, Work, list[Operation]]:
            counting = Counting(subject, choice, on)
            first = counting.at(few)
            second = first if many == few else counting.at(many)
            return counting, first, second, counting.comparison() if subject.compared else []

        counting, self._first, self._second, compared = subject.following(device, count)
        device = subject.as_traced(device)
        self._stands_in = is_overlaid(device)
        self.update: Update = counting.update
        self.fuses_divided: bool = counting.fuses_divided
        self._can_part = counting.can_part
        self.compares_parameters: bool = counting.compares_parameters
        if not _are_alike(self._first, self._second):
            other = choice.model_copy(update={"micro_batch": many})
            self._second = subject.following(device, lambda on: work_of(subject, other, on))
        if not _are_alike(self._first, self._second):
            self._first = self._second  # the operations depend on the batch: proportional, then
        self._device = device
        self._subject = subject
        self._ghost = subject.identity.ghost_batch
        self._blocks = subject.blocks
        self._lines = _lines(self._first, self._second)
        self._tables: dict[int, dict[_Place, _Spent]] = {}
        self._memo: dict[tuple[int, Recompute], tuple[float, float, float]] = {}
        self._compare_seconds = self._in_a_row(self._spent(compared))
        self.update_seconds: float = self._in_a_row(
            self._spent(o for o in self._first.operations if o.phase == "update")
        )

    @property
    def measured(self) -> bool:
        """Whether the device was measured, or its figures are nominal."""
        return self._speeds.measured

    @property
    def parameter_bytes(self) -> int:
        """Of what is trained."""
        return self._first.parameter_bytes

    def has_logits(self, num_samples: int, least: int) -> bool:
        """Whether a pass over so many samples takes the softmax of more than `least` numbers at once,
        as a cross-entropy does."""
        return any(
            one.name == "_log_softmax" and sum(o.num_bytes for o in between) > 8 * least
            for one, other in self._lines
            for between in [self._between(one, other, num_samples)]
        )

    def update_on_host(self, part: float) -> float:
        """Seconds to update so large a `part` of the model on the host: every number is read, and all
        but gradients are written."""
        state = self._first.state_bytes
        return part * (3 * self._first.parameter_bytes + 2 * state) / _HOST_BYTES

    def in_half(self) -> Pace:
        """About the pace under autocast to bfloat16, of operations in float32, without tracing them in
        it: products are computed in half precision, everything else as it is."""
        other = copy.copy(self)
        other._halved, other._tables, other._memo = True, {}, {}
        return other

    def micro(
        self, micro_batch: int, recompute: Recompute, head: Head | None = None
    ) -> tuple[float, float, float]:
        """Seconds of forward, backward and recompute of one micro-batch."""
        if head is not None:
            forward, backward, again = self.micro(micro_batch, recompute)
            return forward + self._by_chunks(head, micro_batch), backward, again
        found = self._memo.get((micro_batch, recompute))
        if found is None:
            table = self._table(micro_batch)
            forward = {place: spent for place, spent in table.items() if place[0] == "forward"}
            backward = [spent for place, spent in table.items() if place[0] == "backward"]
            moved = self._crossing(micro_batch) if recompute.to_host else 0.0
            found = self._memo[micro_batch, recompute] = (
                self._in_a_row(_added(forward.values())) + _PASS_SECONDS + moved,
                self._in_a_row(_added(backward)) + moved,
                self._again(forward, recompute),
            )
        return found

    def _by_chunks(self, head: Head, micro_batch: int) -> float:
        """Seconds that the loss in chunks takes more than as it is written: logits are computed once
        more for backward in half precision, and for anything else that uses them."""
        if not head.is_left_out(micro_batch):
            return 0.0
        tokens = head.tokens * micro_batch
        numbers = tokens * head.width + head.words * head.width + tokens * head.words
        product = Operation(
            name="mm",
            family="matmul",
            dtype=head.dtype,
            flops=2 * tokens * head.width * head.words,
            num_bytes=head.dtype.itemsize * numbers,
            narrow=min(tokens, head.width, head.words),
            num_products=1,
            num_tensors=1,
            phase="forward",
            block=-1,
        )
        count = head.num_computed + (head.dtype in (torch.float16, torch.bfloat16))
        return count * self._in_a_row(self._spent([product]))

    def _crossing(self, micro_batch: int) -> float:
        """Seconds in which what forward saves goes to host memory, or comes back: queued between the
        kernels, so they add up. More than it is where blocks are recomputed too."""
        if not self.has_host:
            return 0.0
        low, high = self._first, self._second
        saved = _line(
            low.micro_batch, low.saved_bytes, high.micro_batch, high.saved_bytes, micro_batch
        )
        return saved / _bus_bytes(self._device)

    @property
    def has_host(self) -> bool:
        """Whether the host has a memory that is not the device's."""
        return self._device.kind == "cuda"

    @property
    def can_offload(self) -> bool:
        """Whether the optimizer's states can lie in host memory, and that is another than the
        device's."""
        return self._can_part and self.has_host

    def step(
        self,
        micro_batch: int,
        recompute: Recompute,
        num_samples: int,
        exchange: float = 0.0,
        states_on: StatesOn = "device",
        head: Head | None = None,
    ) -> StepSeconds:
        """Seconds of a step of `num_samples` in micro-batches of at most `micro_batch`; the loss in
        chunks of the logits of `head`, or as it is written."""
        offloaded = states_on == "host" and self.has_host
        whole, rest = divmod(num_samples, micro_batch)
        forward, backward, again = self.micro(micro_batch, recompute, head)
        last = self.micro(rest, recompute, head) if rest else (0.0, 0.0, 0.0)
        first = whole * forward + last[0]
        if self._subject.is_encoded_first(micro_batch):
            first *= 2
        return StepSeconds(
            forward=first + self._compare_seconds,
            backward=whole * backward + last[1],
            recompute=whole * again + last[2],
            update=self.update_seconds
            + (crossing_seconds(self._first.state_bytes, self._device) if offloaded else 0.0),
            exchange=exchange,
        )

    def block_seconds(self, micro_batch: int, keep_matmuls: bool = False) -> list[float]:
        """Seconds to compute each block once more; those of Python where nothing hides them."""
        seconds = [0.0 if self._speeds.overlap else _CHECKPOINT_SECONDS] * len(self._blocks)
        for (phase, block, is_product), spent in self._table(micro_batch).items():
            if phase == "forward" and block >= 0 and not (keep_matmuls and is_product):
                seconds[block] += spent.apart
        return seconds

    def block_bytes(self, micro_batch: int) -> list[tuple[float, float, float]]:
        """(kept, input, results of products) of each block, in bytes; see `BlockBytes`."""
        low, high = self._first.micro_batch, self._second.micro_batch
        return [
            (
                _line(low, a.kept_bytes, high, b.kept_bytes, micro_batch),
                _line(low, a.input_bytes, high, b.input_bytes, micro_batch),
                _line(low, a.matmul_bytes, high, b.matmul_bytes, micro_batch),
            )
            for a, b in zip(self._first.blocks, self._second.blocks, strict=True)
        ]

    def _table(self, micro_batch: int) -> dict[_Place, _Spent]:
        """What the operations of one micro-batch of that size take, by their places."""
        found = self._tables.get(micro_batch)
        if found is None:
            found = self._tables[micro_batch] = {}
            for (one, other), blocks in self._lines.items():
                spent = self._spent(self._between(one, other, micro_batch))
                for block, count in blocks.items():
                    place = one.phase, block, _is_product(one)
                    found.setdefault(place, _Spent()).add(spent, count)
        return found

    def _between(self, one: Operation, other: Operation, micro_batch: int) -> list[Operation]:
        """The operation that is `one` and `other` at the two micro-batches, at another."""
        low, high = self._first.micro_batch, self._second.micro_batch

        def between(a: float, b: float) -> float:
            return _line(low, a, high, b, micro_batch)

        scaled = replace(
            one,
            narrow=between(one.narrow, other.narrow),
            flops=between(one.flops, other.flops),
            num_bytes=between(one.num_bytes, other.num_bytes),
        )
        if not self._ghost or micro_batch <= self._ghost:
            return [scaled]
        return _over_ghosts(scaled, micro_batch / self._ghost)

    def _again(self, forward: Mapping[_Place, _Spent], recompute: Recompute) -> float:
        """Seconds of what is computed a second time (and, as a tree, more often)."""
        if not recompute.blocks:
            return 0.0
        every = _added(forward.values())
        if recompute.nested or "." in recompute.blocks:
            # A tree over n layers computes each log2(n) times more.
            levels = self._first.tree_levels if recompute.nested else 1
            every.calls += _CHECKPOINT_SECONDS * max(1, len(self._blocks))
            return levels * self._in_a_row(every)
        names = set(recompute.blocks)
        numbers = {i for i, name in enumerate(self._blocks) if _named(name, names)}
        if not numbers:  # blocks of the user's own naming: as much of forward as there are names
            every.calls += _CHECKPOINT_SECONDS * len(self._blocks)
            part = min(1.0, len(names) / max(1, len(self._blocks) or len(names)))
            return part * self._in_a_row(every)
        again = _added(
            spent
            for (_, block, is_product), spent in forward.items()
            if block in numbers and not (recompute.keep == "matmuls" and is_product)
        )
        again.calls += _CHECKPOINT_SECONDS * len(numbers)
        return self._in_a_row(again)

    def _in_a_row(self, spent: _Spent) -> float:
        """Seconds of operations that are started one after the other."""
        return max(spent.work, spent.calls) if self._speeds.overlap else spent.work + spent.calls

    def _spent(self, operations: Iterable[Operation]) -> _Spent:
        """What they take."""
        total = _Spent()
        for operation in operations:
            spent = _Spent(self._work_seconds(operation), self._call_seconds(operation))
            spent.apart = self._in_a_row(spent)
            total.add(spent)
        return total

    def _call_seconds(self, operation: Operation) -> float:
        if self._stands_in and operation.phase == "update":
            # CPU tensors stand for those of the device, on which optimizers take all parameters at
            # once.
            return self._speeds.call_seconds / 16
        more = max(0, operation.num_tensors - 3) if operation.phase == "update" else 0
        return self._speeds.call_seconds + more * self._speeds.call_seconds / 8

    def _work_seconds(self, operation: Operation) -> float:
        speeds = self._speeds
        product = _is_product(operation)
        halved = self._halved and product and operation.dtype == torch.float32
        num_bytes = (0.5 if halved else 1.0) * operation.num_bytes
        seconds = num_bytes / rate_at(speeds.memory, num_bytes)
        if operation.flops and product:
            seconds = max(seconds, operation.flops / self._product_rate(operation))
        if speeds.overlap and not (self._stands_in and operation.phase == "update"):
            seconds = max(seconds, _KERNEL_SECONDS)
        return seconds

    def _product_rate(self, operation: Operation) -> float:
        """Floating-point operations per second of a product."""
        speeds, name = self._speeds, self._arithmetic(operation)
        if operation.family == "attention" and speeds.attention:
            forward, backward = speeds.attention.get(name) or speeds.attention["float32"]
            return rate_at(backward if "backward" in operation.name else forward, operation.narrow)
        curves = speeds.convolution if operation.family == "convolution" else {}
        curves = curves or speeds.matmul
        each = operation.flops / max(1, operation.num_products)
        rate = rate_at(curves.get(name) or curves["float32"], each)
        return rate * _thinness(each, operation.narrow) if speeds.overlap else rate

    def _arithmetic(self, operation: Operation) -> str:
        """That of a product, as `Speeds` names it."""
        name = str(operation.dtype).removeprefix("torch.")
        if name != "float32":
            return name
        return "bfloat16" if self._halved else "tf32" if self._tf32 else name


def tabulated_link(device: Device) -> Link:
    """What joins devices like `device`, where the ranks have not measured it: all on one machine."""
    hop = _LATENCY_SECONDS.get(device.kind, _LATENCY_SECONDS["cuda"])
    return Link(bytes_per_second=device.rates.link_bytes, hop_seconds=hop)


def crossing_seconds(state_bytes: int, device: Device) -> float:
    """Time for the optimizer's states to come from host memory to `device` and go back, one after the
    other."""
    return 2 * bus_seconds(state_bytes, device)


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


def _lines(first: Work, second: Work) -> dict[tuple[Operation, Operation], Counter[int]]:
    """Every operation of a micro-batch at both sizes, without its block, and how often each block has
    it: equal blocks have equal ones."""
    found: dict[tuple[Operation, Operation], Counter[int]] = {}
    for one, other in zip(first.operations, second.operations, strict=True):
        if one.phase != "update":
            pair = _of_no_block(one), _of_no_block(other)
            found.setdefault(pair, Counter())[one.block] += 1
    return found


def _of_no_block(operation: Operation) -> Operation:
    return operation if operation.block < 0 else replace(operation, block=-1)


def _added(parts: Iterable[_Spent]) -> _Spent:
    total = _Spent()
    for part in parts:
        total.add(part)
    return total


def _are_alike(one: Work, other: Work) -> bool:
    return [o.name for o in one.operations] == [o.name for o in other.operations]


def _over_ghosts(operation: Operation, num_ghosts: float) -> list[Operation]:
    """BatchNorm over ghost batches: as many smaller operations, and one that joins their results."""
    if "batch_norm" not in operation.name:
        return [operation]
    count = max(1, round(num_ghosts))
    part = replace(operation, num_bytes=operation.num_bytes / count)
    joined = replace(operation, name="cat")
    return [*[part] * count, joined]


def _thinness(work: float, narrow: float) -> float:
    """Part of the rate of a cube that a product of `work` operations reaches on CUDA, its smallest dim
    being `narrow`: a half where that is `_THIN`, between them by its logarithm."""
    if narrow <= 0:
        return 1.0
    side = max((work / 2) ** (1 / 3), _THIN * 1.001)
    part = min(1.0, max(0.0, math.log(narrow / _THIN) / math.log(side / _THIN)))
    return 0.5 ** (1 - part)


def _is_product(operation: Operation) -> bool:
    return operation.family in PRODUCTS


def _line(low: int, at_low: float, high: int, at_high: float, x: int) -> float:
    """The value at `x` of the line through two points; through the origin where they are one."""
    if high == low:
        return at_low * x / low
    slope = (at_high - at_low) / (high - low)
    return max(0.0, at_low + slope * (x - low))


def _named(block: str, names: set[str]) -> bool:
    """Whether `block` is one of `names`, or inside one."""
    from fnmatch import fnmatchcase

    return any(fnmatchcase(block, name) or block.startswith(f"{name}.") for name in names)
