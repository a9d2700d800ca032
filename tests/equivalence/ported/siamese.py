"""A siamese network: whether two images show the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab


class Siamese(nn.Module):
    """Two images (B, 1, 8, 8) to a probability (B, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 24)
        )
        self.head = nn.Sequential(nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 1), nn.Sigmoid())

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.head(torch.cat([self.features(first), self.features(second)], 1))


def make(cuttable: bool) -> Any:
    """Model, optimizer and batches of pairs."""
    del cuttable  # it draws nothing, and looks at no other sample
    model = Siamese()
    pairs = [(torch.randn(24, 1, 8, 8), torch.randn(24, 1, 8, 8)) for _ in range(10)]
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.Adadelta(model.parameters(), lr=1.0),
        batches=[(*pair, torch.randint(2, (24,)).to(pair[0].dtype)) for pair in pairs],
        trained=[model],
    )


def by_hand(work: Any) -> None:
    model, optimizer = work.model, work.optimizer
    for images_1, images_2, targets in work.batches:
        optimizer.zero_grad()
        outputs = model(images_1, images_2).squeeze()
        loss = F.binary_cross_entropy(outputs, targets)
        loss.backward()
        optimizer.step()


def by_step(work: Any, **options: Any) -> None:
    model, optimizer = work.model, work.optimizer

    def loss(model: Any, batch: Any) -> Tensor:
        images_1, images_2, targets = batch
        return F.binary_cross_entropy(model(images_1, images_2).squeeze(1), targets)

    step = ab.Step(model, optimizer, loss, **options)
    for images_1, images_2, targets in work.batches:
        step((images_1, images_2, targets))
    step.close()
