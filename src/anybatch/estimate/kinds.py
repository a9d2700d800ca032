"""Kinds: what each block of a trace holds, in the words of people who train models."""

from __future__ import annotations

from collections.abc import Sequence

from anybatch.estimate.family import Traced
from anybatch.estimate.sharding import GATHERED
from anybatch.estimate.trace import CASTS, SCRATCH, Block, Operation
from anybatch.estimate.workspaces import WORKSPACES

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
