"""DistributedGroup: what the groups over torch.distributed's default process group have in common."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from anybatch.compute import Replica
from anybatch.parallel.buffers import Buffers, Held
from anybatch.parallel.group import Group
from anybatch.parallel.vote import Vote, calling, exchange, same_weights

T = TypeVar("T")


class DistributedGroup(Group, ABC):
    """The ranks of torch.distributed's default group.

    Args:
        shares: by rank.
        device: of this rank.
    """

    def __init__(self, shares: Sequence[float], device: torch.device) -> None:
        self.rank: int = dist.get_rank()
        self.shares: Sequence[float] = tuple(shares)
        self._device = device
        self._vote = Vote(device)
        self._buffers: Buffers | None = None

    def prepare(self, model: nn.Module) -> None:
        """See `Group`: those of rank 0."""
        same_weights(model)

    def staged(self, held: Held) -> None:
        if self._buffers is not None:
            self._buffers.staged(self.rank, held)

    def committed(self, replica: Replica) -> None:
        """See `Group`: the buffers."""
        if self._buffers is not None:
            with calling("while buffers were put together"):
                self._buffers.settle()

    def exchange(self, value: T) -> list[T]:
        return exchange(value)
