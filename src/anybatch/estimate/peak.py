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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from anybatch.estimate.allocator import Allocator, CudaCache, LiveBytes, Taken, settings_here
from anybatch.estimate.cuda import is_overlaid
from anybatch.estimate.family import Traced
from anybatch.estimate.sharding import GATHERED, Division
from anybatch.estimate.trace import CASTS, SCRATCH, Block, Operation, alive
from anybatch.estimate.workspaces import WORKSPACES
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


LOSS = "loss and logits"
OVERHEAD = "allocator's rounding and holes"

KINDS: tuple[str, ...] = (
    "parameters",
    "gradients",
    "optimizer state",
    GATHERED,
    CASTS,
    "activations",
    LOSS,
    "input batch",
    "buffers",
    "temporary",
    SCRATCH,
    OVERHEAD,
    WORKSPACES,
    "libraries",
    "device context",
)
"""Every kind of bytes, in the order in which a table shows them.

`gathered weights and gradients`: of a model that is divided over ranks, those that a rank has whole for
a moment. `weights in half precision`: autocast's copies. `activations`: made in forward inside the
model; most are kept for backward. `loss and logits`: what the model returns, what the loss makes of it,
and the gradients of both. `temporary`: made in backward or in the update, and gone after it. `kernels'
scratch`: taken and given back inside one operation. `allocator's rounding and holes`: held by the
allocator and used by nobody when most is in use; CUDA's cache among it. `libraries' workspaces`:
cuBLAS's, in torch's allocator. `libraries`: generated code and workspaces that stay with the process.
`device context`: CUDA's own, and its kernels."""


class Kinds:
    """The kinds of the blocks of one trace.

    The loss is what runs outside the model, and what a model that returns its loss runs after the last
    of its layers. Backward begins with the same operations.
    """

    def __init__(self, traced: Traced) -> None:
        self._operations: Sequence[Operation] = traced.timeline.operations
        # A model that returns its loss first, and modules in it that do so, return a number.
        numbers = {name for name, shape in traced.shapes.items() if shape == ()}
        self._of_loss = _loss_moments(self._operations, numbers)

    def of(self, block: Block) -> str:
        """One of `KINDS`."""
        if block.kind:
            return block.kind
        if block.phase == "input":
            return "input batch"
        if block.phase != "compute" or not 0 < block.born <= len(self._operations):
            return "temporary"
        if self._of_loss[block.born]:
            return LOSS
        return "temporary" if self._operations[block.born - 1].backward else "activations"

    def is_loss(self, moment: int) -> bool:
        """Whether the operation of that moment is part of the loss, forward or backward."""
        return 0 < moment <= len(self._operations) and bool(self._of_loss[moment])


def _loss_moments(operations: Sequence[Operation], numbers: set[str]) -> bytearray:
    """For each moment whether its operation is part of the loss; `numbers`: the modules that return
    one."""
    marks = bytearray(len(operations) + 1)
    behind: list[int] = []  # forward of these modules, since the last operation of another
    in_backward = of_loss = False
    for moment, operation in enumerate(operations, 1):
        is_layer = operation.module and operation.module not in numbers
        if operation.backward:
            of_loss = (of_loss or not in_backward) and not is_layer
            marks[moment] = of_loss
        elif operation.phase == "compute":
            of_loss = False
            marks[moment] = not operation.module
            if is_layer:
                behind.clear()
            elif operation.module:
                behind.append(moment)
        if operation.backward != in_backward or operation.phase != "compute":
            for each in behind:
                marks[each] = True
            behind.clear()
        in_backward = operation.backward
    for each in behind:
        marks[each] = True
    return marks
