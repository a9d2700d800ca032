"""Small tasks to plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import anybatch as ab


class Block(nn.Module):
    """(B, 64) to (B, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def deep(norm: bool = False) -> nn.Module:
    """Two blocks in a row, and BatchNorm before them if wished."""
    first = nn.BatchNorm1d(64) if norm else nn.Identity()
    return nn.Sequential(first, *[Block() for _ in range(2)], nn.Linear(64, 1))


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def deep_task(**changes: Any) -> ab.Task:
    fields: dict[str, Any] = {
        "model": deep,
        "loss": mean_square,
        "optimizer": lambda params: torch.optim.Adam(params, lr=1e-3),
        "train": TensorDataset(torch.zeros(4096, 64), torch.zeros(4096, 1)),
        "global_batch": 4096,
        "steps": 1,
    }
    return ab.Task(**{**fields, **changes})
