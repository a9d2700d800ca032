"""Unused: zeros for what a pass did not use on this rank, so that all ranks add up the same gradients.

torch's FSDP does so on request from 2.13 on. In 2.11 and 2.12 it adds up what has a gradient: sums of
other sizes on other ranks, which end in an abort of the process or in wrong gradients. There the same
is done here, right before FSDP looks for the gradients of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def add_zeros_for_unused(model: nn.Module) -> None:
    """From now on every pass over `model`, which `fully_shard` has divided, adds up a gradient of each
    parameter that trains in what was gathered."""
    known = getattr(model, "set_reduce_scatter_unused_params", None)
    if known is not None:
        known(True)
        return
    for group in _groups(model):
        group.post_backward = _Filling(group, group.post_backward)


def _groups(model: nn.Module) -> Iterator[Any]:
    """What FSDP gathers at a time (its own objects, under the names that those two versions have)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            several = getattr(state, "_fsdp_param_groups", None)
            groups = [state._fsdp_param_group] if several is None else several
            yield from (group for group in groups if group is not None)


class _Filling:
    """Zeros for what has no gradient, and then what FSDP does when backward has passed a group."""

    def __init__(self, group: Any, run: Callable[..., None]) -> None:
        self._group = group
        self._run = run

    def __call__(self, *unused: Any) -> None:
        """See the class."""
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
