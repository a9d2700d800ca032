"""A task with whatever makes bits differ between runs: dropout, BatchNorm, another module that writes
buffers, weights that are no whole numbers, a parameter that few samples use, clipping, samples that
draw."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import anybatch as ab

NUM_SAMPLES, LENGTH = 90, 12


class Seen(nn.Module):
    """Keeps a mean of what it saw in a buffer that it replaces, and takes it away."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=(0, 2))
        return x - x.detach().mean()


class Model(nn.Module):
    """(B, 3, LENGTH) signals to 5 classes."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, 16, 3, padding=1)
        self.body = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv1d(16, 16, 3, padding=1),
                    nn.BatchNorm1d(16) if norm else nn.GroupNorm(4, 16),
                    nn.ReLU(inplace=True),
                    nn.Dropout(0.3),
                )
                for _ in range(4)
            )
        )
        self.seen = Seen()
        self.rare = nn.Linear(16, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        x = self.seen(self.body(self.first(x))).mean(dim=2)
        if bool(flags.any()):
            x = x + self.rare(x) * flags[:, None]
        return self.head(x)


class Signals(Dataset[Any]):
    """Signals with noise that is drawn anew whenever one is read."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        if index >= NUM_SAMPLES:
            raise IndexError
        draw = torch.Generator().manual_seed(index)
        signal = torch.randn(3, LENGTH, generator=draw) + 0.1 * torch.randn(3, LENGTH)
        weight = float(torch.rand((), generator=draw)) + 0.1
        return signal, index % 5, weight, index % 41 == 0


class Stream(IterableDataset[Any]):
    """The same, one after the other."""

    def __iter__(self) -> Any:
        yield from Signals()


def loss(model: nn.Module, batch: Any) -> ab.Loss:
    """Weighed by numbers that no float holds exactly; with a metric."""
    signals, classes, weights, flags = batch
    losses = F.cross_entropy(model(signals, flags), classes, reduction="none")
    weights = weights.float()
    return ab.Loss((losses * weights).sum(), weights.sum(), metrics={"classes": classes.sum()})


def task_of(norm: bool = True, stream: bool = False, **changes: Any) -> ab.Task:
    """16 steps, the last of each epoch smaller, in 6 parts of two grains of 4."""
    length = {"steps": 16} if "epochs" not in changes else {}
    return ab.Task(
        **{
            "model": partial(Model, norm),
            "loss": loss,
            "optimizer": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
            "train": Stream() if stream else Signals(),
            "global_batch": 41,
            "ghost_batch": 2 if norm else None,
            "clip_norm": 0.5,
            "reproducible": ab.Grains(samples=4, parts=6),
            "name": "signals",
            **length,
            **changes,
        }
    )


def digest(model: nn.Module) -> str:
    """SHA-256 of every parameter and buffer."""
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(name.encode())
        found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
