"""A variational autoencoder, whose loss is a sum over the samples, and is meant to be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab

PIXELS = 64


class VAE(nn.Module):
    """Images (B, PIXELS) to reconstructions (B, PIXELS), and mean and log-variance (B, 8)."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.draws = draws
        self.fc1, self.fc21, self.fc22 = nn.Linear(PIXELS, 32), nn.Linear(32, 8), nn.Linear(32, 8)
        self.fc3, self.fc4 = nn.Linear(8, 32), nn.Linear(32, PIXELS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.fc1(x))
        mu, logvar = self.fc21(hidden), self.fc22(hidden)
        z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu) if self.draws else mu
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def loss_function(recon_x: Tensor, x: Tensor, mu: Tensor, logvar: Tensor) -> Tensor:
    """The sum over the samples of a batch."""
    entropy = F.binary_cross_entropy(recon_x, x, reduction="sum")
    return entropy - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def make(cuttable: bool) -> Any:
    """Model, optimizer and batches."""
    model = VAE(draws=not cuttable)
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        batches=[torch.rand(24, PIXELS) for _ in range(10)],
        trained=[model],
    )


def by_hand(work: Any) -> None:
    model, optimizer = work.model, work.optimizer
    for data in work.batches:
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()


def by_step(work: Any, **options: Any) -> None:
    model, optimizer = work.model, work.optimizer

    def loss(
        model: Any, data: Tensor
    ) -> ab.Loss:  # the gradient stays that of the sum over 24 samples
        recon_batch, mu, logvar = model(data)
        return ab.Loss(24 * loss_function(recon_batch, data, mu, logvar), weight=len(data))

    step = ab.Step(model, optimizer, loss, **options)
    for data in work.batches:
        step(data)
    step.close()
