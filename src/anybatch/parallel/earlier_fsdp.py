"""Earlier FSDP: features of FSDP2 that sharding needs, which torch has since 2.13, for 2.11 and 2.12.

- Zero gradients for parameters that a pass did not use on this rank. Without them FSDP reduces only the
  gradients that exist: the sizes then differ between ranks, which terminates the process or gives wrong
  gradients.
- A reset after an interrupted pass. Without it FSDP continues in the middle of that pass, and waits for
  ranks that never arrive.

Both versions are final, so it is safe to access their private attributes by name.
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
"""Attributes that a parameter group holds until a pass has finished with it."""


def add_zeros_for_unused(model: nn.Module) -> None:
    """Make every following pass over `model`, which `fully_shard` has sharded, reduce a gradient for
    each trainable parameter that was gathered: zeros for unused ones."""
    known = getattr(model, "set_reduce_scatter_unused_params", None)
    if known is not None:
        known(True)
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in _groups(module._get_fsdp_state()):
                group.post_backward = _Filling(group, group.post_backward)


def forget_pass(model: nn.Module) -> None:
    """Discard the pass over `model` that an error has interrupted, with its gradients, and reshard the
    weights. `model` is the root module, and has begun a pass before."""
    known = getattr(model, "reset_iter_state", None)
    if known is not None:
        known()
        return
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()  # no pending work may use the tensors dropped below
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
    """The parameter groups that FSDP gathers: at most one per state in 2.11, any number in 2.12."""
    several = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if several is None else several
    return (group for group in groups if group is not None)


class _Filling:
    """Replaces missing gradients of a parameter group by zeros, then runs FSDP's post-backward hook."""

    def __init__(self, group: Any, run: Callable[..., None]) -> None:
        self._group = group
        self._run = run

    def __call__(self, *unused: Any) -> None:
        if self._group.reduce_grads:
            for param in self._group.fsdp_params:
                _fill(param)
        self._run(*unused)


def _fill(param: Any) -> None:
    whole = getattr(param, "_unsharded_param", None)  # missing before the first all-gather
    if whole is None or not whole.requires_grad:
        return
    if whole.grad is None and param.unsharded_accumulated_grad is None:
        whole.grad = torch.zeros_like(whole)
