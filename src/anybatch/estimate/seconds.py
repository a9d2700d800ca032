"""Seconds: the time of a step, from its operations and the speeds of the device.

Each operation takes the longer of two times, that of its arithmetic and that of its memory traffic
(a roofline, Williams et al. 2009). On a CPU the time to start each operation is added. On CUDA
operations are started while earlier ones run, so the longer of the two sums counts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np
import torch
from numpy.typing import NDArray

from anybatch.compute.along_sequence import NUM_TILES
from anybatch.compute.chunked_attention import NUM_CHUNKS
from anybatch.estimate.calibration import Speeds
from anybatch.estimate.cuda import is_overlaid
from anybatch.estimate.head import Head
from anybatch.estimate.seconds_work import Counting, Operation, Work
from anybatch.estimate.subject import Subject
from anybatch.machine import Device
from anybatch.plans import Choice, Link, Precision, Recompute, StatesOn, Update

_PCIE_BYTES = {"7": 16e9, "8": 32e9, "9": 64e9}
"""Bytes per second and direction of sixteen lanes of PCIe 3, 4 and 5, by the major version of the
CUDA compute capability. This is the link between a device and its host, even if several devices are
connected by another link."""

_LATENCY_SECONDS = {"cuda": 2e-5, "cpu": 1.5e-4}
"""Latency of one hop between ranks, regardless of its size: over NCCL, and over gloo on one machine
(a sum of 4 to 200 KB on two ranks took 0.2 to 0.35 ms, which is two hops)."""

_HOST_BYTES = 20e9
"""Approximate bytes per second that the cores of one rank stream from host memory in an update."""

_MEETING_SECONDS = 4e-4
"""Time of one synchronization of ranks inside a norm, which blocks the host: two small exchanges
and their overhead, over gloo on one machine."""

_PASS_SECONDS = 3e-4
"""Overhead of a micro-batch beyond its operations: samples are fetched, collated and moved."""

_CHECKPOINT_SECONDS = 1.5e-4
"""Python overhead of recomputing a block, beyond its operations: PyTorch's checkpoint tracks the
tensors that are saved, and preserves the random state."""

_KERNEL_SECONDS = 5e-6
"""Overhead of a CUDA kernel beyond its work, while it fills the device and drains."""

_Place = tuple[str, int, bool]
"""Key of operations: their phase, their block, and whether they are products."""

_Group = tuple[str, int, str, torch.dtype]
"""Key of similar operations: their phase, their block, their name, and their dtype."""


_Amounts = NDArray[np.float64]
"""Totals over the operations of a group: the number of operations, their floating-point operations,
their bytes, and the number of calls that start them."""

_Spent = NDArray[np.float64]
"""Seconds of some operations of one micro-batch: to compute them, and to start them."""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Predicted time of one global step of one rank, by part.

    Attributes:
        forward, backward, recompute: seconds of all micro-batches. Forward includes the comparison
            of a joint loss.
        update: seconds of clipping and of the optimizer.
        exchange: seconds to exchange gradients among ranks.
    """

    forward: float
    backward: float
    recompute: float
    update: float
    exchange: float

    @property
    def total(self) -> float:
        """Total seconds of the step."""
        return self.forward + self.backward + self.recompute + self.update + self.exchange

    def corrected(self, factor: float) -> StepSeconds:
        """Return these times with all parts except the exchange multiplied by `factor`."""
        return StepSeconds(
            forward=self.forward * factor,
            backward=self.backward * factor,
            recompute=self.recompute * factor,
            update=self.update * factor,
            exchange=self.exchange,
        )


class Pace:
    """Speed of a task on a device in one precision, for any micro-batch and any recompute setting.

    Traces the work of the task at two micro-batches, and interpolates and extrapolates linearly.

    Args:
        subject: the task.
        device: device on which the task runs.
        speeds: speeds of the device.
        precision: precision of the plan.

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

        def count(on: Device) -> tuple[Counting, Work, Work]:
            counting = Counting(subject, choice, on)
            first = counting.at(few)
            second = first if many == few else counting.at(many)
            return counting, first, second

        counting, self._low, self._high = subject.following(device, count)
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
        self._compare_seconds = self._seconds_of(counting.comparison)
        self.update_seconds: float = self._seconds_of(
            [o for o in self._low.operations if o.phase == "update"]
        )

    @property
    def measured(self) -> bool:
        """Whether the device was measured; otherwise its figures are nominal."""
        return self._speeds.measured

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the trained parameters."""
        return self._low.parameter_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer states that have the shapes of parameters."""
        return self._low.state_bytes

    @property
    def has_host(self) -> bool:
        """Whether the host has its own memory, separate from that of the device."""
        return self._device.kind == "cuda"

    @property
    def can_offload(self) -> bool:
        """Whether the optimizer states can be kept in host memory, and that is separate from the
        device's."""
        return self._can_part and self.has_host

    @property
    def blocks_have_products(self) -> bool:
        """Whether the recompute policy that keeps matrix products keeps anything."""
        return any(o.block >= 0 and o.flops > 0 for o in self._low.operations)

    @property
    def tileable(self) -> tuple[str, ...]:
        """Names of the MLPs inside blocks that can run in tiles along the sequence."""
        return self._low.tileable

    @property
    def has_scores(self) -> bool:
        """Whether blocks materialize the scores of attention."""
        return self._low.scores_part > 0

    def has_logits(self, num_samples: int, least: int) -> bool:
        """Return whether a pass over `num_samples` samples computes the softmax of more than
        `least` elements at once, as a cross-entropy does."""
        low, high = (
            max((o.num_bytes for o in work.operations if o.name == "_log_softmax"), default=0.0)
            for work in (self._low, self._high)
        )
        return self._line(low, high, num_samples) > 8 * least

    def update_on_host(self, part: float) -> float:
        """Return the seconds to update the fraction `part` of the model on the host: all elements
        are read, and all except gradients are written."""
        return part * (3 * self.parameter_bytes + 2 * self.state_bytes) / _HOST_BYTES

    def in_half(self) -> Pace:
        """Return the approximate pace under autocast to bfloat16, from operations in float32,
        without another trace: products run at the speed of half precision, everything else is
        unchanged."""
        other = copy.copy(self)
        matmul = self._speeds.matmul
        half = {name: max(rate, matmul.get("bfloat16", rate)) for name, rate in matmul.items()}
        other._speeds = replace(self._speeds, matmul=half)
        other._memo = {}
        return other

    def micro(
        self, micro_batch: int, recompute: Recompute, head: Head | None = None
    ) -> tuple[float, float, float]:
        """Return the seconds of forward, backward and recompute of one micro-batch. The loss is
        computed in chunks of the logits of `head`, or as it is written if `head` is None."""
        places = self._places(micro_batch)
        forward, backward = (
            sum((s for place, s in places.items() if place[0] == phase), np.zeros(2))
            for phase in ("forward", "backward")
        )
        moved = 0.0
        if recompute.to_host and self.has_host:
            # Copies are enqueued between the kernels, so the times add up.
            saved = self._line(self._low.saved_bytes, self._high.saved_bytes, micro_batch)
            moved = bus_seconds(saved, self._device)
        in_chunks = self._by_chunks(head, micro_batch) if head is not None else 0.0
        return (
            self._in_a_row(forward) + _PASS_SECONDS + moved + in_chunks,
            self._in_a_row(backward) + moved,
            self._again(places, forward, recompute),
        )

    def _by_chunks(self, head: Head, micro_batch: int) -> float:
        """Return the additional seconds of the loss in chunks: logits are computed once more for
        backward in half precision, and for each other use."""
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
        """Return the seconds of a step of `num_samples` in micro-batches of at most `micro_batch`;
        see `micro`."""
        offloaded = states_on == "host" and self.has_host
        whole, rest = divmod(num_samples, micro_batch)
        forward, backward, again = self.micro(micro_batch, recompute, head)
        last = self.micro(rest, recompute, head) if rest else (0.0, 0.0, 0.0)
        first = whole * forward + last[0]
        if self._subject.is_encoded_first(micro_batch):
            first *= 2
        # States in host memory are copied to the device and back.
        crossing = 2 * bus_seconds(self.state_bytes, self._device) if offloaded else 0.0
        return StepSeconds(
            forward=first + self._compare_seconds,
            backward=whole * backward + last[1],
            recompute=whole * again + last[2],
            update=self.update_seconds + crossing,
            exchange=exchange,
        )

    def block_seconds(self, micro_batch: int) -> list[float]:
        """Return the seconds to recompute each block."""
        spent = [_checkpoints(1) for _ in self._subject.blocks]
        for (phase, block, _), seconds in self._places(micro_batch).items():
            if phase == "forward" and block >= 0:
                spent[block] += seconds
        return [self._in_a_row(each) for each in spent]

    def block_bytes(self, micro_batch: int) -> list[float]:
        """Return the bytes that each block saves for backward."""
        ends = zip(self._low.kept_bytes, self._high.kept_bytes, strict=True)
        return [self._line(low, high, micro_batch) for low, high in ends]

    def _places(self, micro_batch: int) -> dict[_Place, _Spent]:
        """Return the seconds of the operations of one micro-batch of that size, by place."""
        found = self._memo.get(micro_batch)
        if found is None:
            found = self._memo[micro_batch] = {}
            (low, high), none = self._ends, np.zeros(4)
            for group in low | high:
                ends = zip(low.get(group, none), high.get(group, none), strict=True)
                between = np.array([self._line(*each, micro_batch) for each in ends])
                place = *group[:2], bool(between[1] > 0)
                found[place] = found.get(place, np.zeros(2)) + self._spent(group, between)
        return found

    def _line(self, at_low: float, at_high: float, micro_batch: int) -> float:
        """Return the value at `micro_batch` on the line through the values at the two traced sizes,
        or on the line through the origin if the sizes are equal."""
        low, high = self._low.micro_batch, self._high.micro_batch
        if high == low:
            return at_low * micro_batch / low
        return max(0.0, at_low + (at_high - at_low) * (micro_batch - low) / (high - low))

    def _again(self, places: dict[_Place, _Spent], forward: _Spent, recompute: Recompute) -> float:
        """Return the seconds of recompute, which in a tree repeats operations several times."""
        if not recompute.blocks:
            return 0.0
        names = self._subject.blocks
        if recompute.nested or "." in recompute.blocks:
            # A tree over n layers recomputes each layer log2(n) times.
            levels = self._low.tree_levels if recompute.nested else 1
            return levels * self._in_a_row(forward + _checkpoints(max(1, len(names))))
        asked = set(recompute.blocks)
        numbers = {i for i, name in enumerate(names) if _named(name, asked)}
        if not numbers:  # blocks named by the user: a part of forward, by the number of names
            part = min(1.0, len(asked) / max(1, len(names) or len(asked)))
            return part * self._in_a_row(forward + _checkpoints(len(names)))
        tiled, chunked = self._low.tiled_part, self._low.scores_part
        twice = (tiled if recompute.tiled else 0) + (chunked if recompute.chunked_attention else 0)
        parts = NUM_TILES * len(recompute.tiled)
        parts += NUM_CHUNKS * len(numbers) if recompute.chunked_attention else 0
        again = _checkpoints(len(numbers) + parts)
        for (phase, block, is_product), spent in places.items():
            kept = recompute.keep == "matmuls" and is_product
            if phase == "forward" and block in numbers and not kept:
                again += spent
                if twice:  # recomputed with their block, and once more on their own
                    again += twice * spent
        return self._in_a_row(again)

    def _in_a_row(self, spent: _Spent) -> float:
        """Return the seconds of operations that are started one after the other."""
        return float(spent.max() if self._speeds.overlap else spent.sum())

    def _seconds_of(self, operations: Sequence[Operation]) -> float:
        groups = _grouped(operations)
        return self._in_a_row(sum((self._spent(*each) for each in groups.items()), np.zeros(2)))

    def _spent(self, group: _Group, amounts: _Amounts) -> _Spent:
        """Return the seconds of the operations of a group."""
        phase, _, _, dtype = group
        speeds = self._speeds
        count, flops, num_bytes, starts = map(float, amounts)
        seconds = num_bytes / speeds.memory
        if flops:
            name = str(dtype).removeprefix("torch.")
            if name == "float32" and self._tf32:
                name = "tf32"
            rate = speeds.matmul.get(name) or speeds.matmul["float32"]
            seconds = max(seconds, flops / rate)
        calls = starts * speeds.call_seconds
        if phase == "update" and self._stands_in:
            # CPU tensors stand in for those of the device, where optimizers update all at once.
            return np.array([seconds, calls / 16])
        kernels = count * _KERNEL_SECONDS if speeds.overlap else 0.0
        return np.array([seconds + kernels, calls])


def _grouped(operations: Iterable[Operation]) -> dict[_Group, _Amounts]:
    found: dict[_Group, _Amounts] = {}
    for o in operations:
        amounts = found.setdefault((o.phase, o.block, o.name, o.dtype), np.zeros(4))
        amounts += (1.0, o.flops, o.num_bytes, max(1.0, o.num_tensors / 8))
    return found


def _checkpoints(count: int) -> _Spent:
    return np.array([0.0, count * _CHECKPOINT_SECONDS])


def tabulated_link(device: Device) -> Link:
    """Return the link between devices like `device` on one machine, for ranks that have not
    measured it."""
    hop = _LATENCY_SECONDS.get(device.kind, _LATENCY_SECONDS["cuda"])
    return Link(bytes_per_second=device.rates.link_bytes, hop_seconds=hop)


def bus_seconds(num_bytes: float, device: Device) -> float:
    """Return the seconds to copy `num_bytes` between host memory and `device`, in one direction."""
    return num_bytes / _bus_bytes(device)


def _bus_bytes(device: Device) -> float:
    """Return the bytes per second between host memory and `device`, by the generation of the bus."""
    major = device.capability.partition(".")[0]
    bus = _PCIE_BYTES.get(major, _PCIE_BYTES["9"] if major.isdigit() else _PCIE_BYTES["8"])
    return min(bus, device.rates.link_bytes)


def meeting_seconds(
    num_norms: int, num_passes: int, recompute: Recompute, link: Link | None, num_ranks: int
) -> float:
    """Return the time per step for `num_norms` norms to synchronize over ranks: in forward, in
    backward, and in recompute. If the ranks have measured their `link`, a synchronization takes at
    least as long as its two exchanges."""
    per_norm = 3 if recompute.blocks else 2
    own = 2 * link.seconds(0, num_ranks) if link is not None and link.measured else 0.0
    return per_norm * num_norms * num_passes * max(_MEETING_SECONDS, own)


def _named(block: str, names: set[str]) -> bool:
    """Return whether `block` is one of `names`, or is inside one of them."""
    return block in names or any(
        fnmatchcase(block, name) or block.startswith(f"{name}.") for name in names
    )
