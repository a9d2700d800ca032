"""Pairs of two kinds of samples, told from each other over the whole global batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab


class Towers(nn.Module):
    """Two encoders and a temperature that the comparison alone uses."""

    def __init__(self, norm: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        middle = nn.BatchNorm1d(16) if norm else nn.LayerNorm(16)
        self.left = nn.Sequential(
            nn.Linear(6, 16, bias=False), middle, nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 5)
        )
        self.right = nn.Sequential(
            nn.Linear(4, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 5)
        )
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Both, of length one, and the temperature for each sample."""
        left, right = F.normalize(self.left(left), dim=-1), F.normalize(self.right(right), dim=-1)
        return left, right, self.scale.expand(len(left))


def encode(model: Any, batch: Any) -> Any:
    """One row for each sample of a pair, and what weighs it."""
    left, right, _ = model(*batch[:2])
    return {"left": left, "right": right, "weight": batch[2]}


def encode_all(model: Any, batch: Any) -> Any:
    """The same, with the temperature in the rows: the comparison uses no parameter itself."""
    left, right, scale = model(*batch[:2])
    return {"left": left, "right": right, "weight": batch[2], "scale": scale}


def compare(model: Any, encoded: Any) -> ab.Loss:
    """The loss of CLIP (Radford et al. 2021), with weights."""
    left, right, weight = encoded["left"], encoded["right"], encoded["weight"]
    scale = encoded["scale"].mean() if "scale" in encoded else model.scale
    logits = scale.exp() * left @ right.T
    targets = torch.arange(len(left), device=left.device)
    losses = F.cross_entropy(logits, targets, reduction="none")
    losses = losses + F.cross_entropy(logits.T, targets, reduction="none")
    hits = (logits.argmax(1) == targets).to(losses.dtype)
    return ab.Loss(
        (losses * weight).sum() / 2,
        weight.sum(),
        metrics={"hits": (hits.sum(), float(len(left))), "weighed": (hits * weight).sum()},
    )


def task_of(
    num_samples: int = 90,
    dtype: torch.dtype = torch.float64,
    norm: bool = True,
    dropout: float = 0.0,
    **changes: Any,
) -> ab.Task:
    """A task with a joint loss."""
    draw = torch.Generator().manual_seed(3)
    sizes = (num_samples, 6), (num_samples, 4), (num_samples,)
    left, right, weight = (torch.rand(size, generator=draw, dtype=dtype) for size in sizes)

    def build() -> nn.Module:
        return Towers(norm, dropout).to(dtype)

    options: dict[str, Any] = {
        "model": build,
        "loss": ab.JointLoss(encode, compare),
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.02),
        "train": TensorDataset(left, right, weight + 0.1),
        "global_batch": 35,
        "steps": 6,
        "ghost_batch": 5,
        "clip_norm": 0.5,
        "name": "pairs",
    }
    return ab.Task(**{**options, **changes})
