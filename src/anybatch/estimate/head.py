"""Head: the layer that makes the logits of a task, if its loss can be computed in chunks.

Cross-entropy over a vocabulary holds three tensors of the size of the logits in backward. In chunks
(`compute.chunked_loss`) it holds none. What that frees shows in a trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from anybatch.compute import chunked_loss
from anybatch.compute.blocks import modules_of
from anybatch.compute.chunked_loss import noting
from anybatch.compute.lm_loss import PLAIN_LOGITS
from anybatch.estimate.family import Traced
from anybatch.estimate.footprint import traced_step
from anybatch.estimate.stage import num_traced
from anybatch.estimate.subject import Subject
from anybatch.estimate.trace import Block, Operation
from anybatch.estimate.workspaces import PRODUCTS
from anybatch.machine import Device
from anybatch.plans import Choice

_SOFTMAX = "aten._log_softmax.default"
_CONVOLUTION = "aten.convolution."


@dataclass(frozen=True, slots=True)
class Head:
    """A layer whose product becomes the logits of a cross-entropy.

    Attributes:
        name: of the module.
        words, width: of its weight, `[words, width]`.
        tokens: of a sample.
        dtype: of the product.
        num_computed: how often the logits are computed whole all the same in a pass in chunks, for
            something else than the cross-entropy.
    """

    name: str
    words: int
    width: int
    tokens: float
    dtype: torch.dtype
    num_computed: int = 0

    def num_logits(self, num_samples: int) -> float:
        """Of so many samples."""
        return self.tokens * num_samples * self.words

    def is_left_out(self, num_samples: int) -> bool:
        """Whether the logits of so many samples are enough to be left out."""
        return self.num_logits(num_samples) > PLAIN_LOGITS


def head_of(subject: Subject, choice: Choice, device: Device) -> Head | None:
    """The layer that makes the logits, if the loss is a cross-entropy over those of an `nn.Linear`, can
    be taken in chunks, and has logits enough in a whole batch for that to pay. By a trace of `choice`,
    whose loss is as it is written, and one of a whole batch in chunks.

    Raises whatever the model or loss raises on fake tensors.
    """
    key = choice.precision, device
    if key not in subject.heads:
        head = _found(subject, choice, device)
        subject.heads[key] = head and _tried(head, subject, choice, device)
    return subject.heads[key]


def _tried(head: Head, subject: Subject, choice: Choice, device: Device) -> Head | None:
    """`head`, with what its logits are computed for all the same; None if the loss is none that can be
    taken in chunks: one that is differentiated twice, say, or made by hand."""
    changes = {"chunked_head": head.name, "micro_batch": subject.whole}
    tried = choice.model_copy(update=changes)
    try:
        with noting() as noted:
            traced = traced_step(subject, tried, device)
    except Exception:  # whatever the user's code raises
        return None
    left = logits_of(traced)
    if left is not None and left[1] >= head.num_logits(subject.whole):
        return None  # the softmax of all of them is there as before
    return replace(head, num_computed=len(noted) // num_traced(subject, tried))


def _found(subject: Subject, choice: Choice, device: Device) -> Head | None:
    """As `head_of`, without a trace in chunks."""
    traced = traced_step(subject, choice, device)
    found = logits_of(traced)
    if found is None:
        return None
    made_in, numbers = found
    model: nn.Module = next(iter(subject.stages.values())).model
    layer = modules_of(model).get(made_in)
    if not isinstance(layer, nn.Linear) or not chunked_loss.can_be_chunked(layer):
        return None
    words, width = layer.weight.shape
    dtype = layer.weight.dtype
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(choice.precision.partition("-")[0])
    head = Head(
        name=made_in,
        words=words,
        width=width,
        tokens=numbers / words / choice.micro_batch,
        dtype=dtype if half is None or dtype == torch.float64 else half,
    )
    return head if head.is_left_out(subject.whole) else None


def logits_of(traced: Traced) -> tuple[str, int] | None:
    """The module whose product makes the logits of the largest cross-entropy of a step, and how many
    they are."""
    operations = traced.timeline.operations
    sizes = {
        block.born: block.num_bytes // block.item_bytes
        for block in traced.timeline.blocks
        if _is_softmax(block, operations)
    }
    if not sizes:
        return None
    moment = max(sizes, key=sizes.__getitem__)
    for operation in reversed(operations[: moment - 1]):
        if operation.name.startswith(_CONVOLUTION):
            return None
        if operation.name.startswith(PRODUCTS):
            return operation.module, sizes[moment]
    return None


def _is_softmax(block: Block, operations: Sequence[Operation]) -> bool:
    return 0 < block.born <= len(operations) and operations[block.born - 1].name == _SOFTMAX
