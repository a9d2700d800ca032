"""Head: the layer that computes the logits of a task, if its loss can be computed in chunks.

Cross-entropy over a vocabulary holds three tensors of the size of the logits in backward. In chunks
(`compute.chunked_loss`) it holds none. A trace shows how much memory this saves.
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
        name: name of the module.
        words, width: shape of its weight, `[words, width]`.
        tokens: number of tokens per sample.
        dtype: dtype of the product.
        num_computed: number of times that a pass in chunks still computes all logits at once, for
            other uses than the cross-entropy.
    """

    name: str
    words: int
    width: int
    tokens: float
    dtype: torch.dtype
    num_computed: int = 0

    def num_logits(self, num_samples: int) -> float:
        """Return the number of logits of `num_samples` samples."""
        return self.tokens * num_samples * self.words

    def is_left_out(self, num_samples: int) -> bool:
        """Return whether `num_samples` samples have enough logits for these not to be materialized."""
        return self.num_logits(num_samples) > PLAIN_LOGITS


def head_of(subject: Subject, choice: Choice, device: Device) -> Head | None:
    """Return the layer that computes the logits, or None. The loss must be a cross-entropy over the
    output of an `nn.Linear` that can be computed in chunks, and a whole batch must have enough
    logits for chunks to pay off. This is determined from a trace of `choice` with the loss as
    written, and from one of a whole batch in chunks.

    Raises whatever the model or loss raises on fake tensors.
    """
    key = choice.precision, device
    if key not in subject.heads:
        head = _found(subject, choice, device)
        subject.heads[key] = head and _tried(head, subject, choice, device)
    return subject.heads[key]


def _tried(head: Head, subject: Subject, choice: Choice, device: Device) -> Head | None:
    """Return `head` with the number of times that all logits are still computed, or None if the
    loss cannot be computed in chunks, for example because it is differentiated twice or implemented
    by hand."""
    changes = {"chunked_head": head.name, "micro_batch": subject.whole}
    tried = choice.model_copy(update=changes)
    try:
        with noting() as noted:
            traced = traced_step(subject, tried, device)
    except Exception:  # whatever the user's code raises
        return None
    left = logits_of(traced)
    if left is not None and left[1] >= head.num_logits(subject.whole):
        return None  # the softmax of all logits is still computed
    return replace(head, num_computed=len(noted) // num_traced(subject, tried))


def _found(subject: Subject, choice: Choice, device: Device) -> Head | None:
    """Like `head_of`, without the trace in chunks."""
    traced = traced_step(subject, choice, device)
    found = logits_of(traced)
    if found is None:
        return None
    made_in, numbers = found
    model: nn.Module = next(iter(subject.stages.values())).replica.model
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
    """Return the module that computes the logits of the largest cross-entropy of a step, and the
    number of logits, or None."""
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
