"""Model skeleton: an existing model and optimizer, without their values.

Training modifies a model (hooks, other forwards, weights in half precision) and gives its optimizer
other parameters to work on. An outline is taken before that, so that a step can be planned later as
it was planned at first.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.compute.multi_optimizer import as_one, parts_of
from anybatch.estimate.data_dependent_shapes import UNKNOWN
from anybatch.estimate.subject import fake_copy
from anybatch.estimate.untraced import NoOptimizer


class Outline:
    """Outline of `model` and `optimizer`, which may have parameters in addition to those of the
    model.

    Attributes:
        model: the outline of the model, on the meta device.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        with torch.device("meta"):
            try:
                self.model: nn.Module = fake_copy(model)
            except Exception:  # copies in a trace fail as well, and report the reason
                self.model = model
            self._parts = [_OneOptimizer(part, model, self.model) for part in parts_of(optimizer)]

    def build(self) -> nn.Module:
        """Return the model on fake tensors; called inside a trace."""
        return fake_copy(self.model)

    def optimizer_on(self, fake: nn.Module) -> Optimizer:
        """Return an optimizer like the outlined one, on the parameters of `fake`; called inside a
        trace.

        Raises `NoOptimizer` if its class cannot be called.
        """
        return as_one([part.made_for(self.model, fake) for part in self._parts])


class _OneOptimizer:
    """Creates optimizers like `optimizer`, on parameters like those of `other`, a copy of `model`."""

    def __init__(self, optimizer: Optimizer, model: nn.Module, other: nn.Module) -> None:
        wrapped = _wrapped(optimizer)
        self._groups = _groups_on(wrapped.param_groups, model, other)
        self._arguments = _arguments(wrapped)
        self._kind: Any = type(wrapped)
        if wrapped is not optimizer:
            # Updated as the wrapper does, which may access all parameters.
            self._kind = type(self._kind.__name__, (self._kind,), {})

    def made_for(self, model: nn.Module, fake: nn.Module) -> Optimizer:
        """Return the optimizer on the parameters of `fake`, a copy of `model`."""
        groups = _groups_on(self._groups, model, fake)
        try:
            return self._kind(groups, **self._arguments)
        except UNKNOWN:  # values that can be tracked
            raise
        except Exception as error:
            raise NoOptimizer(self._kind.__name__) from error


def _wrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer to which `optimizer` delegates the update, if it is a wrapper such as
    accelerate's."""
    inner = vars(optimizer).get("optimizer")
    return _wrapped(inner) if isinstance(inner, Optimizer) else optimizer


def _arguments(optimizer: Optimizer) -> dict[str, Any]:
    """Return the arguments that the class of `optimizer` requires in addition to the parameter
    groups. PyTorch's optimizers require none, since the groups contain the options."""
    others = list(inspect.signature(type(optimizer)).parameters.values())[1:]
    known = {**vars(optimizer), **optimizer.defaults}
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return {
        one.name: known[one.name]
        for one in others
        if one.kind in named and one.default is one.empty and one.name in known
    }


def _groups_on(
    groups: Sequence[dict[str, Any]], model: nn.Module, other: nn.Module
) -> list[dict[str, Any]]:
    """Return `groups` with the parameters of `model` replaced by those of `other`. Parameters that
    do not belong to the model are replaced by empty ones on the default device."""
    others: dict[torch.Tensor, nn.Parameter] = dict(
        zip(model.parameters(), other.parameters(), strict=True)
    )

    def on_other(param: torch.Tensor) -> torch.Tensor:
        if param in others:
            return others[param]
        empty = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype)
        return nn.Parameter(empty, requires_grad=param.requires_grad)

    return [{**group, "params": [on_other(param) for param in group["params"]]} for group in groups]
