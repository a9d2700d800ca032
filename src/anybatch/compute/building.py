"""Moves models and optimizers built by user functions to a device, and checks them before use."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.compute.multi_optimizer import as_one, parts_of
from anybatch.errors import InputError
from anybatch.task import Task, parameters_in


def place(model: nn.Module, device: torch.device) -> nn.Module:
    """Move `model` to `device`. Raises `InputError` if its parameters are on several devices."""
    homes = {str(p.device): name for name, p in model.named_parameters()}
    if len(homes) > 1:
        listing = ", ".join(f"{name!r} on {home}" for home, name in homes.items())
        raise InputError(
            f"the model has parameters on several devices ({listing}): leave it on one; anybatch moves"
            " it to where the plan says."
        )
    if "meta" in homes:
        raise InputError(
            f"the parameters of the model ({homes['meta']!r}, for one) are on the device 'meta', where"
            " they have no values: build the model on the CPU, or give a function that does."
        )
    return model.to(device)


def copy_of(model: nn.Module) -> nn.Module:
    """Return a deep copy of `model`. Tensors that its modules compute from parameters and keep as
    attributes until the next computation (the old `weight_norm`, pruning) are copied without their
    graph, since `copy.deepcopy` does not support tensors with a graph.

    Raises `InputError` for modules compiled by torch.jit, whose copied parameters are not leaves.
    """
    memo: dict[int, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{name or 'the model'!r} is compiled by torch.jit, and such a module cannot be copied:"
                " build the model without torch.jit.script for this."
            )
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(model, memo)


def carry_hooks(model: nn.Module, copied: nn.Module) -> nn.Module:
    """Register the gradient hooks of the parameters of `model` on `copied`, a copy of it. Copying does
    not preserve them."""
    for param, other in zip(model.parameters(), copied.parameters(), strict=True):
        for hook in (param._backward_hooks or {}).values():
            other.register_hook(hook)
    return copied


def optimizer_for(task: Task, model: nn.Module) -> Any:
    """Return the optimizer that the optimizer function of `task` makes for `model`. Several optimizers
    are combined into one. Raises `InputError` if a parameter is in two of them."""
    params = task.parameters_of(model)
    try:
        made = task.optimizer(params)
    except (AttributeError, TypeError, ValueError) as error:
        given = "a list of parameters" if task.parameters is None else "what `parameters` returned"
        error.add_note(
            f"It was raised by the optimizer function of the task, which is called with {given}. To"
            " choose options by the names of parameters, give parameters=lambda model:"
            ' [{"params": [...], "weight_decay": 0.0}, ...], made from model.named_parameters().'
        )
        raise
    return as_one(made)


def unhooked(optimizer: Any) -> Any:
    """Remove the user's step hooks from `optimizer`, which was made for a trace: there they would run
    on parameters without values."""
    for part in parts_of(optimizer):
        if isinstance(part, Optimizer):
            part._optimizer_step_pre_hooks.clear()
            part._optimizer_step_post_hooks.clear()
    return optimizer


def checked_optimizer(optimizer: object, model: nn.Module) -> Optimizer:
    """Return `optimizer` if it is one over parameters of `model`. Raises `InputError` otherwise."""
    if not isinstance(optimizer, Optimizer):
        raise InputError(
            f"the optimizer function returned a value of type {type(optimizer).__name__}: return a"
            " torch.optim.Optimizer made from the parameters it was given, or a list of such."
        )
    own = {id(p) for p in model.parameters()}
    foreign = [p for p in parameters_in(optimizer.param_groups) if id(p) not in own]
    if foreign:
        raise InputError(
            f"the optimizer has {len(foreign)} parameter{'s' if len(foreign) > 1 else ''} that the"
            f" model does not have (the first of shape {tuple(foreign[0].shape)}): make it from the"
            " parameters that the optimizer function is given, and whatever is trained a part of the"
            " model."
        )
    check_needs_no_closure(optimizer)
    return optimizer


def check_needs_no_closure(optimizer: Optimizer) -> None:
    """Raises `InputError` if `optimizer.step` requires a closure that computes the loss: a step of
    several passes cannot provide one."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for part in parts_of(optimizer):
        # Inspect the class, since a scheduler replaces the method on the instance.
        _own, *wanted = inspect.signature(type(part).step).parameters.values()
        if any(one.default is one.empty and one.kind not in kinds for one in wanted):
            raise InputError(
                f"the optimizer is {type(part).__name__}, which computes the loss itself through a"
                " closure, several times per step perhaps: give one that takes a gradient, such as SGD"
                " or AdamW."
            )
