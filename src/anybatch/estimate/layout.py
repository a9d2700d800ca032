"""Layout: whether the convolutions of a task run on images whose channels lie last.

On CUDA they do wherever the model can be run so (`planner.kernel_rule`), and then each image that lies
otherwise is copied and the copy is saved for backward: a trace has to run as the run will.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from anybatch.compute import kernel_choices
from anybatch.compute.kernel_choices import CONVOLUTIONS
from anybatch.estimate.fake_op_cache import CachedOps, fake_mode
from anybatch.estimate.subject import Subject
from anybatch.machine import Device
from anybatch.plans import KernelChoices


class Convolutions(NamedTuple):
    """What a model has of them.

    Attributes:
        number: of layers with two-dimensional kernels.
        refused: why the model cannot be run in channels-last layout; empty if it can.
    """

    number: int
    refused: str

    @property
    def can_turn(self) -> bool:
        """Whether there are any, and the channels of their images can lie last."""
        return bool(self.number) and not self.refused


def layout_on(device: Device, subject: Subject) -> KernelChoices:
    """The layout in which the convolutions of `subject` run on `device`."""
    if device.kind == "cpu":
        return KernelChoices()
    return KernelChoices(channels_last=convolutions_of(subject).can_turn)


def convolutions_of(subject: Subject) -> Convolutions:
    """Those of its model. Whether it can be run in another layout is tried on fake tensors: a `view`
    that joins channels and pixels cannot."""
    if not subject.convolutions:
        subject.convolutions.append(_found(subject))
    found: Convolutions = subject.convolutions[0]
    return found


def _found(subject: Subject) -> Convolutions:
    fake = fake_mode()
    with fake, CachedOps(fake, subject.op_cache):
        try:
            model: nn.Module = subject.build_model()
        except Exception:  # then nothing can be traced either, and the plan says so
            return Convolutions(0, "")
    number = sum(isinstance(module, CONVOLUTIONS) for module in model.modules())
    if not number:
        return Convolutions(0, "")
    undo = kernel_choices.install(model, KernelChoices(channels_last=True))
    try:
        refused = _refusal(subject, model, fake)
    finally:
        undo()
    if refused and _refusal(subject, model, fake):
        refused = ""  # it is not the layout that it fails for
    return Convolutions(number, refused)


def _refusal(subject: Subject, model: nn.Module, fake: FakeTensorMode) -> str:
    """Why `model` cannot be run on tensors of `fake`; empty if it can."""

    def run() -> None:
        with fake, CachedOps(fake, subject.op_cache, may_read=True):
            subject.loss(model, subject.batch(2, torch.device("cpu")))

    try:
        subject.followed(run)
    except Exception as error:  # whatever the user's code raises
        reason = next(iter(str(error).splitlines()), "")
        return f"{type(error).__name__}: {reason}"
    return ""
