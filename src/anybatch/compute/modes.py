"""Training and evaluation modes of the parts of a model, as set by the user.

A part that was put in evaluation mode (a frozen backbone) stays in it while the rest is trained: its
dropout is disabled, and its BatchNorm uses its running statistics.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from anybatch.compute.multi_optimizer import parts_of

Model = TypeVar("Model", bound=nn.Module)


def into_training(model: Model) -> Model:
    """Put `model` in training mode with `model.train()`, which the user may have overridden to keep a
    part in evaluation mode. In a model that is in training mode already, parts in evaluation mode stay
    in it. Returns `model`."""
    kept = [part for part in model.modules() if not part.training] if model.training else []
    model.train()
    for part in kept:
        part.training = False
    return model


def trained_parts(model: nn.Module) -> set[nn.Module]:
    """The parts of `model` that are in training mode after `into_training`."""
    with preserved(model):
        return {part for part in into_training(model).modules() if part.training}


def with_modes(optimizer: Optimizer) -> list[Any]:
    """The optimizers that have training and evaluation modes: schedule-free optimizers train different
    weights from those that are evaluated."""
    return [
        part
        for part in parts_of(optimizer)
        if callable(getattr(part, "train", None)) and callable(getattr(part, "eval", None))
    ]


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Context manager that restores the mode of each module on exit."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context manager for evaluation mode that restores the mode of each module on exit."""
    with preserved(model):
        model.eval()
        yield
