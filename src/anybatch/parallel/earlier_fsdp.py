"""Earlier FSDP: what a divided model asks of FSDP2 that torch has from 2.13 on, in 2.11 and 2.12.

- Zeros for what a pass did not use on this rank. Without them FSDP adds up what has a gradient: sums of
  other sizes on other ranks, which end the process or give wrong gradients.
- A fresh start after a pass that was cut off. Without it FSDP goes on in the middle of that pass, and
  waits for ranks that do not come.

Both versions are what they are for good, so their own objects can be relied on here, by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

_LEFT_BY_A_PASS = (
    "_all_gather_result",
    "_reshard_after_forward_event",
    "_post_reduce_event",
    "_partial_reduce_output",
    "_all_reduce_state",
)
"""What a group of parameters holds until a pass is done with it."""


def add_zeros_for_unused(model: nn.Module) -> None:
    """From now on every pass over `model`, which `fully_shard` has divided, adds up a gradient of each
    parameter that trains in what was gathered."""
    known = getattr(model, "set_reduce_scatter_unused_params", None)
    if known is not None:
        known(True)
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in _groups(module._get_fsdp_state()):
                group.post_backward = _Filling(group, group.post_backward)


def forget_pass(model: nn.Module) -> None:
    """Forget the pass over `model` that an error has cut off, with its gradients; the weights are
    divided again. `model` is the root, and has begun a pass before."""
    known = getattr(model, "reset_iter_state", None)
    if known is not None:
        known()
        return
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()  # nothing is on its way into what is dropped now
    root: Any = cast(FSDPModule, model)._get_fsdp_state()
    network, steps = root._comm_ctx, root._state_ctx
    network.all_gather_state = None
    network.post_forward_order.clear()
    if hasattr(network, "reduce_scatter_states"):
        network.reduce_scatter_states.clear()
    else:
        network.reduce_scatter_state = None
    for state in steps.all_states:
        idle = type(state._training_state).IDLE
        state._modules_to_run_forward.clear()
        state._training_state = idle
        for group in _groups(state):
            for name in _LEFT_BY_A_PASS:
                setattr(group, name, None)
            group._post_forward_indices.clear()
            group._training_state = idle
            group._to_sharded()
    steps.iter_forward_root = None
    steps.post_backward_final_callback_queued = False


def _groups(state: Any) -> Iterator[Any]:
    """What FSDP gathers at a time: one group of parameters in 2.11, any number in 2.12."""
    several = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if several is None else several
    return (group for group in groups if group is not None)


class _Filling:
    """Zeros for what has no gradient, and then what FSDP does when backward has passed a group."""

    def __init__(self, group: Any, run: Callable[..., None]) -> None:
        self._group = group
        self._run = run

    def __call__(self, *unused: Any) -> None:
        if self._group.reduce_grads:
            for param in self._group.fsdp_params:
                _fill(param)
        self._run(*unused)


def _fill(param: Any) -> None:
    whole = getattr(param, "_unsharded_param", None)  # none before it was gathered once
    if whole is None or not whole.requires_grad:
        return
    if whole.grad is None and param.unsharded_accumulated_grad is None:
        whole.grad = torch.zeros_like(whole)
