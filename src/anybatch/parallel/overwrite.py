"""Overwrite: the values of one rank, in the tensors of all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def overwrite(
    tensor: Tensor,
    rank: int,
    device: torch.device | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """`tensor` becomes that of `rank`, where it has the same shape and dtype; all ranks of the group
    call it. It crosses as bytes in a row: NCCL takes neither every dtype nor every layout.

    Args:
        tensor: of any strides.
        rank: whose values are taken, by number in `group`.
        device: of the tensors that the group carries; None: that of `tensor`.
        group: None: the default group.
    """
    own = tensor.detach()
    for dim in reversed(range(own.dim())):
        if own.stride(dim) == 0 and own.shape[dim]:  # expanded: one value stands for all
            own = own.select(dim, 0)
    wire = own.to(device or own.device).contiguous()
    if wire.numel():
        dist.broadcast(wire.view(-1).view(torch.uint8), group_src=rank, group=group)
    if wire.data_ptr() != own.data_ptr():
        own.copy_(wire)
