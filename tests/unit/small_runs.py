"""Small runs to take up again, and what their folders hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.events import Evaluated, Event, StepDone
from anybatch.report import read
from anybatch.state.manifest import read_manifest

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([[1.0], [2.0], [-1.0]])

FILE_TASK = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab

X = torch.arange(120.0).reshape(40, 3) / 120
Y = X.sum(dim=1, keepdim=True)


def task(width: int = 4, held_out: int = 40):
    return ab.Task(
        model=lambda: nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 1)),
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.1),
        train=TensorDataset(X, Y), valid=TensorDataset(X[:held_out], Y[:held_out]),
        global_batch=20, epochs=3,
    )
"""


class Tied(nn.Module):
    """Weights with two names, a buffer that is saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.again = nn.Linear(3, 3, bias=False)
        self.again.weight = self.first.weight
        self.last = nn.Linear(3, 1)
        self.register_buffer("table", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.again(torch.relu(self.norm(self.first(x)))) * self.table)


def mse(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def off(model: nn.Module, batch: Any) -> Any:
    return {"off": ((model(batch[0]) - batch[1]).abs().sum(), len(batch[0]))}


def small_task(**changes: Any) -> ab.Task:
    """Two steps to each of three epochs, with an evaluation after each of these."""
    fields: dict[str, Any] = {
        "model": Tied,
        "loss": mse,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.05),
        "train": TensorDataset(X, Y),
        "valid": TensorDataset(X, Y),
        "metrics": off,
        "global_batch": 20,
        "ghost_batch": 10,
        "epochs": 3,
        "name": "small",
    }
    return ab.Task(**{**fields, **changes})


def interrupted(
    folder: Path, at: int, *, epochs: int = 6, resume: bool = False, **changes: Any
) -> Path:
    """A run in `folder` that is killed in the step after step `at`, the last one that was saved."""

    def kill(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == at + 1:
            raise KeyboardInterrupt

    task = small_task(epochs=epochs, **changes)
    try:
        ab.train(task, out=folder, resume=resume, checkpoint_every=2, progress=False, sinks=[kill])
    except KeyboardInterrupt:
        return folder
    raise AssertionError("it was not interrupted")


def evaluated(folder: Path) -> dict[int, Evaluated]:
    """What training told of its evaluations, by step."""
    events = read(folder / "events.jsonl")
    return {event.step: event for event in events if isinstance(event, Evaluated)}


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything in `folder`: the content of files, None for folders."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def flip(checkpoint: Path, name: str) -> None:
    """Change a bit of the tensor `name` in a checkpoint."""
    (part, *_) = read_manifest(checkpoint).tensors[name].slices
    path = checkpoint / f"rank-{part.file}.data"
    data = bytearray(path.read_bytes())
    data[part.start] ^= 1
    path.write_bytes(data)
