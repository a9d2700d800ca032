"""Loss in pieces: the peak of a step whose loss never has all its logits at once.

Cross-entropy over a vocabulary holds three tensors of the size of the logits in backward. `lm_loss` and
`causal_lm_loss` hold a chunk of them. What that would leave is found without a second trace: the blocks
of that size make room for a chunk's in the trace that there is, which is replayed once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from anybatch.compute.lm_loss import PLAIN_LOGITS, tokens_per_chunk, words_per_chunk
from anybatch.estimate.family import Traced
from anybatch.estimate.footprint import beside_training, traced_step
from anybatch.estimate.kinds import LOSS, Kinds
from anybatch.estimate.peak import Peak, peak_of
from anybatch.estimate.subject import Subject
from anybatch.estimate.trace import Block, Operation
from anybatch.estimate.workspaces import PRODUCTS
from anybatch.machine import Device
from anybatch.plans import Choice

LEAST_SHARE = 0.1
"""Loss and logits that take less of the peak are not worth another loss."""

_ITEM_BYTES = 4  # losses are computed in float32
_SOFTMAX = "aten._log_softmax.default"
_CONVOLUTION = "aten.convolution."


def loss_in_pieces(subject: Subject, choice: Choice, device: Device) -> Peak | None:
    """The peak of training under `choice` if its loss were computed in pieces; None if it is no
    cross-entropy over logits from a product, or these are too small a part of the peak.

    Raises whatever the model or loss raises on fake tensors.
    """
    traced = traced_step(subject, choice, device)
    peak = peak_of(traced, beside_training(subject, choice, traced, device), device)
    return pieces_peak(subject, choice, device, traced, peak)


def pieces_peak(
    subject: Subject, choice: Choice, device: Device, traced: Traced, peak: Peak
) -> Peak | None:
    """The same, where the step is traced already and `peak` is its peak."""
    found = _logits(traced)
    if found is None or peak.by_kind.get(LOSS, 0) < LEAST_SHARE * peak.num_bytes:
        return None
    tokens, words = found
    if choice.precision in ("fp32", "tf32"):
        kept = tokens_per_chunk(words, _ITEM_BYTES, device.kind) / tokens
    else:
        kept = words_per_chunk(tokens) / words
    if tokens * words <= PLAIN_LOGITS or kept >= 1:
        return None
    kinds = Kinds(traced)
    least = tokens * words  # a byte for each logit: all that has their size is larger
    operations = traced.timeline.operations
    blocks = [
        # A chunk's memory is used for all that is made of its logits: the softmax stands for it.
        replace(
            block, num_bytes=round(block.num_bytes * kept) if _is_softmax(block, operations) else 0
        )
        if block.num_bytes >= least and kinds.of(block) == LOSS
        else block
        for block in traced.timeline.blocks
    ]
    cut = replace(traced, timeline=replace(traced.timeline, blocks=blocks))
    return peak_of(cut, beside_training(subject, choice, traced, device), device)


def _logits(traced: Traced) -> tuple[int, int] | None:
    """The tokens and words of the largest cross-entropy of the step, if a product makes its logits."""
    operations = traced.timeline.operations
    sizes = {
        block.born: block.num_bytes
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
            words = (traced.shapes.get(operation.module) or (0,))[-1]
            tokens = sizes[moment] // (_ITEM_BYTES * words) if words else 0
            return (tokens, words) if tokens else None
    return None


def _is_softmax(block: Block, operations: Sequence[Operation]) -> bool:
    return 0 < block.born <= len(operations) and operations[block.born - 1].name == _SOFTMAX
