"""Modes: what of a model is in training mode, and what in evaluation mode, as its user left it.

A part that was put into evaluation mode (a frozen backbone) stays in it while the rest is trained: its
dropout draws nothing, and its BatchNorm keeps to its running statistics.
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
    """`model`, in training mode as a whole if it is in evaluation mode as a whole; else each part stays
    in the mode that it is in."""
    return model if model.training else model.train()


def trains(model: nn.Module, part: nn.Module) -> bool:
    """Whether `part` of `model` is in training mode after `into_training`."""
    return part.training or not model.training


def with_modes(optimizer: Optimizer) -> list[Any]:
    """Those of the optimizers that have modes of their own: schedule-free ones train other weights than
    are to be evaluated."""
    return [
        part
        for part in parts_of(optimizer)
        if callable(getattr(part, "train", None)) and callable(getattr(part, "eval", None))
    ]


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Afterwards each module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and each module in its own mode afterwards."""
    with preserved(model):
        model.eval()
        yield
