"""Variants of torch's collectives: signed objects, and a broadcast of any tensor as bytes.

Objects are pickled, and anyone who can reach a rank's port can write to it, so objects are signed.
Without a secret, as under torchrun, anyone can sign."""

from __future__ import annotations

import os
import pickle
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from anybatch.errors import LaunchError
from anybatch.process.signing import SECRET, signed, verified

T = TypeVar("T")


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The `value` of every rank, in rank order. Raises `LaunchError` if a rank has another secret."""
    device, own = _device(group), _packed(value)
    size = torch.tensor([len(own)], device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(one) for one in sizes]
    row = torch.zeros(max(lengths), dtype=torch.uint8)
    row[: len(own)] = torch.frombuffer(own, dtype=torch.uint8)
    rows = [torch.empty(max(lengths), dtype=torch.uint8, device=device) for _ in lengths]
    dist.all_gather(rows, row.to(device), group=group)
    return [
        _unpacked(one[:length], rank)
        for rank, (one, length) in enumerate(zip(rows, lengths, strict=True))
    ]


def broadcast_object(value: T, rank: int, group: dist.ProcessGroup | None = None) -> T:
    """The `value` of `rank`, numbered within the group. Raises `LaunchError` if its secret differs."""
    device, own = _device(group), _packed(value)
    size = torch.tensor([len(own)], device=device)
    dist.broadcast(size, group_src=rank, group=group)
    if dist.get_rank(group) == rank:
        row = torch.frombuffer(own, dtype=torch.uint8).to(device)
    else:
        row = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(row, group_src=rank, group=group)
    return _unpacked(row, rank)


def overwrite(
    tensor: Tensor,
    rank: int,
    device: torch.device | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Overwrite `tensor` with that of `rank`, which has the same shape and dtype. All ranks of the
    group call it. The values are sent as contiguous bytes, since NCCL supports neither every dtype nor
    every layout.

    Args:
        tensor: tensor to overwrite, with any strides.
        rank: rank that provides the values, numbered within `group`.
        device: device of the tensors that the group communicates; None: that of `tensor`.
        group: process group; None: the default group.
    """
    own = tensor.detach()
    for dim in reversed(range(own.dim())):
        if own.stride(dim) == 0 and own.shape[dim]:  # expanded: all entries share one value
            own = own.select(dim, 0)
    wire = own.to(device or own.device).contiguous()
    if wire.numel():
        dist.broadcast(wire.view(-1).view(torch.uint8), group_src=rank, group=group)
    if wire.data_ptr() != own.data_ptr():
        own.copy_(wire)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """The device of the tensors that the group communicates."""
    nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def _packed(value: Any) -> bytearray:
    try:
        data = pickle.dumps(value)
    except Exception:  # a class of the user's script, which is known here by value only
        import cloudpickle

        data = cloudpickle.dumps(value)
    return bytearray(signed(data, os.environ.get(SECRET, ""), "objects"))


def _unpacked(row: Tensor, rank: int) -> Any:
    data = verified(row.cpu().numpy().tobytes(), os.environ.get(SECRET, ""), "objects")
    if data is None:
        raise LaunchError(
            f"what rank {rank} sent is not signed with this rank's secret, and was not read: set the"
            f" environment variable {SECRET} alike for all ranks, or see who else reaches their ports."
        )
    return pickle.loads(data)
