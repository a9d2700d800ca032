"""Peak: the most bytes of a trace at any time, as every account has them, and what they are.

A device's memory has several accounts, each for a question of its own:

    allocated   in tensors, as the allocator rounds them                    what does my model need?
    active      the same, with what waits until another stream is done      on one stream: as allocated
    reserved    what the allocator has taken, with its cache and its holes  does it fit this allocator?
    total       all that the process holds there: `reserved`, libraries,    does it fit the device?
                the device's context

The budget is one of `total`. Kinds of bytes are those of the moment at which most is allocated, and
what is reserved beyond them is a kind of its own: an allocator that keeps what nobody uses has its peak
at any later time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from anybatch.estimate.allocator import Allocator, CudaCache, LiveBytes, Taken
from anybatch.estimate.allocator_settings import settings_here
from anybatch.estimate.cuda import is_overlaid
from anybatch.estimate.family import Traced
from anybatch.estimate.kinds import KINDS, OVERHEAD, Kinds
from anybatch.estimate.sharding import Division
from anybatch.estimate.trace import SCRATCH, alive
from anybatch.machine import Device
from anybatch.process.cuda_driver import TYPICAL_CONTEXT_BYTES, context_bytes

_CUDNN = (
    "Not counted: cuDNN's workspaces; where it tries its algorithms (autotuning), it may take all that"
    " is free while it does."
)
_NCCL = "Not counted: NCCL's buffers beyond those of one group's sums."
_RCCL = "Not counted: RCCL's buffers."


@dataclass(frozen=True)
class Peak:
    """The most bytes at any time.

    Attributes:
        num_bytes: as the budget counts them.
        by_kind: what they are when most is in use, in the order of `KINDS`; they add up to `num_bytes`.
        totals: the most by each account (see the module), which need not be at one time. A CPU has no
            `active`, and the others are the same there.
    """

    num_bytes: int
    by_kind: dict[str, int]
    totals: dict[str, int] = field(default_factory=dict)

    def divided(self, division: Division) -> Peak:
        """The peak of one rank, of a model that is divided, from that of the whole."""
        num_bytes, by_kind = division.divided(self.num_bytes, self.by_kind)
        less = self.num_bytes - num_bytes
        return Peak(num_bytes, by_kind, {name: size - less for name, size in self.totals.items()})


def peak_of(traced: Traced, beside: Mapping[str, int], device: Device) -> Peak:
    """The peak of `traced` on `device`, with the bytes by kind that stay `beside` its tensors."""
    return peak_at(traced, allocator_of(device).replay(traced.timeline), beside, device)


def peak_at(traced: Traced, taken: Taken, beside: Mapping[str, int], device: Device) -> Peak:
    """The same, of a timeline that was replayed."""
    sizes: Counter[str] = Counter(beside)
    kinds = Kinds(traced)
    for block in alive(traced.timeline, taken.moment):
        sizes[kinds.of(block)] += block.num_bytes
    sizes[SCRATCH] += traced.timeline.scratch.get(taken.moment, 0)
    sizes[OVERHEAD] += taken.overhead_bytes
    totals = {"allocated": taken.allocated_bytes}
    if device.kind == "cuda":
        totals["active"] = taken.allocated_bytes
    totals["reserved"] = taken.peak_bytes
    totals["total"] = taken.peak_bytes + sum(beside.values())
    return Peak(totals["total"], {kind: sizes[kind] for kind in KINDS if sizes[kind]}, totals)


def allocator_of(device: Device) -> Allocator:
    """The allocator of a device."""
    if device.kind == "cpu":
        return LiveBytes()
    limit, settings = device.budget_bytes - context_bytes_of(device), settings_here()
    return CudaCache(settings.expandable, settings.max_split_bytes, max(0, limit))


def context_bytes_of(device: Device) -> int:
    """What a process takes of a CUDA device before any tensor: measured where the device is here."""
    if not device.present:
        return TYPICAL_CONTEXT_BYTES
    return context_bytes(device.index)


def method_on(device: Device) -> str:
    """How the bytes on `device` are found, in words."""
    if device.kind == "cpu":
        return "traced on fake tensors: the bytes of the tensors that are alive at once"
    way = "traced on fake tensors, replayed through a model of torch's CUDA allocator"
    if is_overlaid(device):
        way += (
            " (no such device here: CPU tensors under CUDA's autocast lists and optimizers, with"
            " attention that keeps no scores)"
        )
    return way


def not_counted_on(device: Device, ranks: bool) -> tuple[str, ...]:
    """What else may take memory on `device`, in sentences; `ranks`: whether it is one of several."""
    if device.kind == "cpu":
        return ()
    if device.capability.startswith("gfx"):
        return (_RCCL,) if ranks else ()
    return (_CUDNN, _NCCL) if ranks else (_CUDNN,)
