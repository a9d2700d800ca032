"""What the benchmark trains: a perceptron whose computing grows with the batch, and whose exchange does
not."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import anybatch as ab

WIDTH, DEPTH = 1024, 4
STEPS = 24


def task(steps: int = STEPS) -> ab.Task:
    """784-1024-1024-1024-1024-10: four million parameters, 15.9 MB of float32 gradients."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(4096, 784, generator=draw)
    labels = torch.randint(10, (4096,), generator=draw)

    def model() -> nn.Module:
        widths = [784, *[WIDTH] * DEPTH]
        layers = [
            layer for into, out in pairwise(widths) for layer in (nn.Linear(into, out), nn.ReLU())
        ]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 10))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ab.Loss:
        x, y = batch
        return ab.Loss(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))

    return ab.Task(
        model=model,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
        train=TensorDataset(inputs, labels),
        global_batch=64,
        steps=steps,
    )
