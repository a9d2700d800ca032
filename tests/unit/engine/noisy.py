"""A task for trials: its passes change and draw whatever passes can, and none may leave a trace."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.plans import Prediction

SAMPLES, BATCH, STEPS = 24, 12, 1200


class Noisy(nn.Module):
    """Whatever a pass changes or draws: BatchNorm, dropout, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.drop, self.second = nn.Dropout(0.5), nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += len(x)
        return self.second(self.drop(self.norm(self.first(x))))


def loss(model, batch):
    return ab.Loss((model(batch[0]) - batch[1]).square().sum(), len(batch[0]))


def noisy_task(**changes):
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(SAMPLES, 4, generator=draw), torch.randn(SAMPLES, 3, generator=draw)
    )
    fields = {
        "model": Noisy,
        "loss": loss,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.01),
        "train": data,
        "global_batch": BATCH,
        "ghost_batch": 2,
        "steps": STEPS,
    }
    return ab.Task(**{**fields, **changes})


def told(seconds: float = 1.0) -> Prediction:
    return Prediction(
        peak_bytes=1000,
        evaluation_peak_bytes=500,
        step_seconds=seconds,
        step_parts={"forward": 0.3 * seconds, "backward": 0.6 * seconds, "update": 0.1 * seconds},
    )


def keep_time_by(patch, clock, idle=0.0):
    """`clock` tells the time in trials, and that other processes have the core for `idle` seconds of
    each pass: what the machine does besides is no part of a test."""
    patch.setattr("anybatch.engine.rehearsal.time", SimpleNamespace(perf_counter=clock))
    patch.setattr(
        "anybatch.engine.rehearsal.Stopwatch", lambda: SimpleNamespace(idle_seconds=lambda: idle)
    )
