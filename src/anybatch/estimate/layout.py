"""Layout: whether the convolutions of a task run in channels-last layout.

On CUDA they do if the model supports it (`planner.kernel_rule`). Each image in another layout is
then copied, and the copy is saved for backward, so a trace must use the layout of the run.
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
    """Convolutions of a model.

    Attributes:
        number: number of layers with two-dimensional kernels.
        refused: why the model cannot run in channels-last layout; empty if it can.
    """

    number: int
    refused: str

    @property
    def can_turn(self) -> bool:
        """Whether the model has convolutions and can run them in channels-last layout."""
        return bool(self.number) and not self.refused


def layout_on(device: Device, subject: Subject) -> KernelChoices:
    """Return the layout in which the convolutions of `subject` run on `device`."""
    if device.kind == "cpu":
        return KernelChoices()
    return KernelChoices(channels_last=convolutions_of(subject).can_turn)


def convolutions_of(subject: Subject) -> Convolutions:
    """Return the convolutions of the model. Whether it can run in another layout is tested on fake
    tensors: a `view` that joins channels and pixels cannot."""
    if not subject.convolutions:
        subject.convolutions.append(_found(subject))
    found: Convolutions = subject.convolutions[0]
    return found


def _found(subject: Subject) -> Convolutions:
    fake = fake_mode()
    try:
        number = sum(isinstance(module, CONVOLUTIONS) for module in subject.inspect().modules())
        if not number:
            return Convolutions(0, "")
        with fake, CachedOps(fake, subject.op_cache):
            model: nn.Module = subject.build_model()
    except Exception:  # tracing fails as well, and the plan reports it
        return Convolutions(0, "")
    undo = kernel_choices.install(model, KernelChoices(channels_last=True))
    try:
        refused = _refusal(subject, model, fake)
    finally:
        undo()
    if refused and _refusal(subject, model, fake):
        refused = ""  # the layout is not the cause of the failure
    return Convolutions(number, refused)


def _refusal(subject: Subject, model: nn.Module, fake: FakeTensorMode) -> str:
    """Return why `model` cannot run on tensors of `fake`; empty if it can."""

    def run() -> None:
        with fake, CachedOps(fake, subject.op_cache, may_read=True):
            subject.loss(model, subject.batch(2, torch.device("cpu")))

    try:
        subject.followed(run)
    except Exception as error:  # whatever the user's code raises
        reason = next(iter(str(error).splitlines()), "")
        return f"{type(error).__name__}: {reason}"
    return ""
