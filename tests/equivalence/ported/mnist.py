"""Digits by a convolutional network with dropout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import anybatch as ab


class Net(nn.Module):
    """Images (B, 1, 12, 12) to log-probabilities (B, 10)."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(2 * dropout)
        self.fc1, self.fc2 = nn.Linear(256, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


def make(cuttable: bool) -> Any:
    """Model, optimizer, schedule, and epochs of five batches."""
    model = Net(0.0 if cuttable else 0.25)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    epochs = [
        [(torch.randn(24, 1, 12, 12), torch.randint(10, (24,))) for _ in range(5)] for _ in range(2)
    ]
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        scheduler=StepLR(optimizer, step_size=1, gamma=0.7),
        epochs=epochs,
        trained=[model],
    )


def by_hand(work: Any) -> None:
    model, optimizer = work.model, work.optimizer
    model.train()
    for epoch in work.epochs:
        for data, target in epoch:
            optimizer.zero_grad()
            output = model(data)
            loss = F.nll_loss(output, target)
            loss.backward()
            optimizer.step()
        work.scheduler.step()


def by_step(work: Any, **options: Any) -> None:
    model, optimizer = work.model, work.optimizer
    model.train()
    step = ab.Step(
        model, optimizer, lambda model, batch: F.nll_loss(model(batch[0]), batch[1]), **options
    )
    for epoch in work.epochs:
        for data, target in epoch:
            step((data, target))
        work.scheduler.step()
    step.close()
