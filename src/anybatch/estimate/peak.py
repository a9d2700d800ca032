"""Peak: the maximum memory of a trace, by account, and what it consists of.

The memory of a device has several accounts, each of which answers a different question:

    allocated   in tensors, as the allocator rounds them                    what does my model need?
    active      the same, plus memory that waits for another stream         on one stream: as allocated
    reserved    taken by the allocator, with its cache and its holes        does it fit this allocator?
    total       taken by the process: `reserved`, libraries,                does it fit the device?
                the device's context

The budget limits `total`. Bytes by kind are those at the moment when most is allocated. Memory
reserved beyond them is a separate kind, since an allocator that keeps unused memory may reach its
peak at any later time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from anybatch.estimate.allocator import CudaCache, Taken, is_expandable, replay
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
    """Maximum memory at any time.

    Attributes:
        num_bytes: peak as counted against the budget.
        by_kind: bytes by kind at the moment when most is in use, in the order of `KINDS`; they add
            up to `num_bytes`.
        totals: maximum by account (see the module). The maxima may occur at different times. A CPU
            has no `active`, and its other accounts are equal.
    """

    num_bytes: int
    by_kind: dict[str, int]
    totals: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Replayed:
    """A trace, and the memory that one rank takes while it is replayed.

    Attributes:
        traced: the trace. If the model is divided, it holds no state.
        taken: result of the replay.
        state: bytes by kind of the state of a divided model, which stay allocated.
    """

    traced: Traced
    taken: Taken
    state: dict[str, int] = field(default_factory=dict)

    def peak(self, constant: Mapping[str, int], device: Device) -> Peak:
        """Return the peak. `constant` maps kinds to bytes allocated outside of the allocator."""
        taken = self.taken
        sizes: Counter[str] = Counter({**constant, **self.state})
        kinds = Kinds(self.traced)
        for block in alive(self.traced.timeline, taken.moment):
            sizes[kinds.of(block)] += block.num_bytes
        sizes[SCRATCH] += self.traced.timeline.scratch.get(taken.moment, 0)
        sizes[OVERHEAD] += taken.overhead_bytes
        kept = sum(self.state.values())
        totals = {"allocated": taken.allocated_bytes + kept}
        if device.kind == "cuda":
            totals["active"] = totals["allocated"]
        totals["reserved"] = taken.peak_bytes + kept
        totals["total"] = totals["reserved"] + sum(constant.values())
        return Peak(totals["total"], {kind: sizes[kind] for kind in KINDS if sizes[kind]}, totals)


def replayed(traced: Traced, device: Device, division: Division | None) -> Replayed:
    """Replay `traced` on `device`; of a divided model, the part of one rank."""
    if division is None:
        return Replayed(traced, replay(traced.timeline, _cache_of(device, 0)))
    last = alive(traced.timeline, traced.end)
    state = division.state(sum(b.num_bytes for b in last if b.kind == "optimizer state"))
    part = replace(traced, timeline=division.without_state(traced.timeline))
    cache = _cache_of(device, sum(state.values()))
    return Replayed(part, replay(part.timeline, cache), state)


def _cache_of(device: Device, kept: int) -> CudaCache | None:
    """Return an empty cache of the allocator of `device`, of which `kept` bytes are in use already, or
    None for a CPU."""
    if device.kind == "cpu":
        return None
    limit = device.budget_bytes - context_bytes_of(device) - kept
    return CudaCache(is_expandable(), max(0, limit))


def context_bytes_of(device: Device) -> int:
    """Return the bytes that a process takes on a CUDA device before any tensor is created; measured
    if the device is present."""
    if not device.present:
        return TYPICAL_CONTEXT_BYTES
    return context_bytes(device.index)


def method_on(device: Device) -> str:
    """Describe how the bytes on `device` are determined."""
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
    """Return sentences on other memory that may be taken on `device`. `ranks`: whether the device
    is one of several."""
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
"""All kinds of bytes, in the order in which a table shows them.

`gathered weights and gradients`: if a model is divided over ranks, those that a rank temporarily
holds whole. `weights in half precision`: autocast's copies. `activations`: created in forward
inside the model; most are saved for backward. `loss and logits`: the results of the model, what the
loss computes from them, and the gradients of both. `temporary`: created in backward or in the
update, and freed after it. `kernels' scratch`: allocated and freed within one operation.
`allocator's rounding and holes`: held by the allocator but unused when most is in use, including
CUDA's cache. `libraries' workspaces`: cuBLAS's, in PyTorch's allocator. `libraries`: generated code
and workspaces that stay with the process. `device context`: CUDA's context, and its kernels.
"""


class Kinds:
    """Kinds of the blocks of one trace.

    The loss consists of operations outside of the model and, if the model returns its loss, of
    operations after its last layer. Backward begins with the same operations.
    """

    def __init__(self, traced: Traced) -> None:
        self._operations: Sequence[Operation] = traced.timeline.operations
        # A model that returns its loss first, and submodules that do so, return a scalar.
        numbers = {name for name, shape in traced.shapes.items() if shape == ()}
        self._of_loss = _loss_moments(self._operations, numbers)

    def of(self, block: Block) -> str:
        """Return the kind of `block`, one of `KINDS`."""
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
        """Return whether the operation at that moment is part of the loss, forward or backward."""
        return 0 < moment <= len(self._operations) and bool(self._of_loss[moment])


def _loss_moments(operations: Sequence[Operation], numbers: set[str]) -> bytearray:
    """Return for each moment whether its operation is part of the loss. `numbers`: modules that
    return a scalar."""
    marks = bytearray(len(operations) + 1)
    behind: list[int] = []  # forward of these modules since the last operation of another one
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
