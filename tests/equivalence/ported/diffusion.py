"""A denoising diffusion model, with an average of its weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import anybatch as ab

STEPS = 50


class Denoiser(nn.Module):
    """Noisy images (B, 1, 8, 8) and times (B,) to the noise in them."""

    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Embedding(STEPS, 8)
        self.first, self.last = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.last(F.silu(self.norm(self.first(x) + self.times(t)[:, :, None, None])))


def make(cuttable: bool) -> Any:
    """Model, its average, optimizer and batches."""
    del cuttable  # the loop draws, not the model
    model = Denoiser()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return SimpleNamespace(
        model=model,
        averaged=averaged,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        kept=torch.linspace(0.99, 0.2, STEPS),
        batches=[torch.randn(16, 1, 8, 8) for _ in range(10)],
        trained=[model, averaged],
    )


def by_hand(work: Any) -> None:
    model, optimizer = work.model, work.optimizer
    for x in work.batches:
        t = torch.randint(STEPS, (len(x),))
        noise = torch.randn_like(x)
        kept = work.kept[t][:, None, None, None]
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        optimizer.zero_grad()
        loss = F.mse_loss(model(noisy, t), noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        work.averaged.update_parameters(model)


def by_step(work: Any, **options: Any) -> None:
    model, optimizer = work.model, work.optimizer
    step = ab.Step(
        model,
        optimizer,
        lambda model, b: F.mse_loss(model(b[0], b[1]), b[2]),
        clip_norm=1.0,
        **options,
    )
    for x in work.batches:
        t = torch.randint(STEPS, (len(x),))
        noise = torch.randn_like(x)
        kept = work.kept[t][:, None, None, None]
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        step((noisy, t, noise))
        work.averaged.update_parameters(model)
    step.close()
