"""A residual network with BatchNorm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import anybatch as ab


class Residual(nn.Module):
    """(B, C, H, W) to the same."""

    def __init__(self, channels: int, norm: Any) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1, self.bn2 = norm(channels), norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def make(cuttable: bool) -> Any:
    """Model, optimizer, schedule, and epochs of five batches."""
    norm = (lambda channels: nn.GroupNorm(2, channels)) if cuttable else nn.BatchNorm2d
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        *(Residual(8, norm) for _ in range(3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    epochs = [
        [(torch.randn(24, 3, 10, 10), torch.randint(10, (24,))) for _ in range(5)] for _ in range(2)
    ]
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        scheduler=StepLR(optimizer, step_size=1, gamma=0.1),
        epochs=epochs,
        trained=[model],
    )


def by_hand(work: Any) -> None:
    model, optimizer, criterion = work.model, work.optimizer, work.criterion
    for epoch in work.epochs:
        for images, target in epoch:
            output = model(images)
            loss = criterion(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        work.scheduler.step()


def by_step(work: Any, **options: Any) -> None:
    model, optimizer, criterion = work.model, work.optimizer, work.criterion
    step = ab.Step(
        model, optimizer, lambda model, batch: criterion(model(batch[0]), batch[1]), **options
    )
    for epoch in work.epochs:
        for images, target in epoch:
            step((images, target))
        work.scheduler.step()
    step.close()
