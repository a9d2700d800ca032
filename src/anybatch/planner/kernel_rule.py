"""Kernel rule: which kernels suit a model on a device, and why. See `plans.KernelChoices`.

The selected kernels need no significant memory and do not change the result. On CUDA, the kernels
for convolutions that use tensor cores operate on channels-last tensors, and torch would otherwise
convert the layout of every image around them. Where launches take longer than kernels, that layout
is slower (resnet18 with 64 images of 64 x 64 in float32 on an H200: 17 ms instead of 11), so a
rehearsal times both. On a CPU, oneDNN has an internal layout that is unknown to callers, so nothing
is selected there. Traces for other devices run in the selected layout (`estimate.layout`).
"""

from __future__ import annotations

from collections.abc import Iterator

from anybatch.estimate import Convolutions, Subject, convolutions_of
from anybatch.plans import KernelChoices, Plan
from anybatch.units import format_seconds


def with_kernels(plan: Plan, subject: Subject, compiled: bool, shapes_vary: bool) -> Plan:
    """`plan` with the kernels that suit it, and with notices on them.

    Args:
        plan: the plan without kernels.
        subject: task of the plan.
        compiled: whether blocks are to be compiled.
        shapes_vary: whether samples may differ in shape.
    """
    kernels = KernelChoices(compile=compiled)
    notices = [_COMPILED] if compiled else []
    if plan.device != "cpu" and (found := convolutions_of(subject)).number:
        varying, free = next(_variation(plan, shapes_vary), ""), plan.task.grain is None
        kernels = kernels.model_copy(
            update={"channels_last": found.can_turn, "autotune": free and not varying}
        )
        notices += [_layout_notice(found), _tuning_notice(varying) if free else _NOT_TUNED]
    return plan.model_copy(update={"kernels": kernels, "notices": (*plan.notices, *notices)})


def in_default_layout(plan: Plan, seconds: float) -> Plan:
    """`plan` without channels-last images; with them, a sample took `seconds` in a pass."""
    prediction = plan.prediction
    assert prediction is not None
    passes = sum(prediction.step_parts.values()) - prediction.step_parts.get("update", 0.0)
    before = seconds * plan.largest_amount
    sentence = (
        "Convolutions run in torch's default layout: as measured on this device, the passes of a step"
        f" take {format_seconds(passes)} in it and {format_seconds(before)} on channels-last images."
    )
    notices = (sentence if one == _CHANNELS_LAST else one for one in plan.notices)
    kernels = plan.kernels.model_copy(update={"channels_last": False})
    return plan.model_copy(update={"kernels": kernels, "notices": tuple(notices)})


def _variation(plan: Plan, shapes_vary: bool) -> Iterator[str]:
    """The reasons why micro-batches have different shapes."""
    size, share = plan.choice.micro_batch, plan.largest_share
    if shapes_vary:
        yield "samples may differ in shape"
    if plan.num_ranks > 1 and plan.balance == "measured":
        yield "the shares of the ranks follow their speed"
    if len(set(plan.shares)) > 1:
        yield "the ranks have unequal shares"
    if share % size:
        yield f"a share of {share} is not a multiple of the micro-batch of {size}"


def _layout_notice(found: Convolutions) -> str:
    if found.refused:
        return (
            "Convolutions stay in torch's default layout, since the model cannot be run with"
            f" channels-last images ({found.refused}); on this device they would be faster:"
            " `reshape` in place of `view`, say."
        )
    return _CHANNELS_LAST


def _tuning_notice(varying: str) -> str:
    if varying:
        return (
            f"cuDNN chooses its algorithms without trying them, since {varying}, and each new shape"
            " would be tried."
        )
    return (
        "cuDNN tries its algorithms in the first steps, since all full micro-batches have one shape."
        " The trials take what memory is free, which is neither predicted nor part of the peak."
    )


_CHANNELS_LAST = (
    "Convolutions run on channels-last images: CUDA's kernels for them that use tensor cores work in"
    " this layout."
)
_NOT_TUNED = (
    "cuDNN chooses its algorithms without trying them: in a reproducible run no measured time may"
    " decide what computes."
)
_COMPILED = (
    "The blocks of the model are compiled, as asked for: the first pass of each size takes longer."
    " Without a rehearsal, bytes and seconds are predicted for the uncompiled model."
)
