"""Small tasks in float64 that have in them what makes accumulation go wrong in practice.

A `World` says which of it is there; `task_of` makes the task.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import anybatch as ab

WIDTH, CLASSES, IGNORED = 5, 4, -100


@dataclass(frozen=True)
class World:
    """One combination of data, model, loss and optimizer."""

    data: str = "tensors"
    lengths: bool = False
    loss: str = "mean"
    optimizer: str = "sgd"
    num_samples: int = 37
    global_batch: int = 16
    last: str = "keep"
    clip_norm: float | None = None
    schedule: str | None = None
    tied: bool = False
    sometimes: bool = False
    frozen: bool = False
    groups: bool = False
    ghost_batch: int | None = None
    steps: int = 12
    seed: int = 0
    dtype: torch.dtype = torch.float64


DATA = ("tensors", "tuples", "dicts", "dataclass", "ragged", "lists")
LOSSES = ("mean", "pair", "counted", "counted on device", "weighted")
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
}


def task_of(world: World) -> ab.Task:
    """The task of `world`."""
    samples = samples_of(world)
    return ab.Task(
        model=partial(Model, world),
        loss=partial(loss_of, world.loss),
        optimizer=OPTIMIZERS[world.optimizer],
        parameters=in_groups if world.groups else None,
        train=samples,
        collate={"ragged": pad, "dataclass": stack, "lists": list}.get(world.data),
        lengths=lengths_of(world, samples) if world.lengths else None,
        global_batch=world.global_batch,
        steps=world.steps,
        last=world.last,
        clip_norm=world.clip_norm,
        schedule=(lambda p: 1.0 / (1.0 + p.samples / 50)) if world.schedule == "samples" else None,
        scheduler=(lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9))
        if world.schedule == "torch"
        else None,
        scheduler_interval="step" if world.schedule == "torch" else None,
        ghost_batch=world.ghost_batch,
        seed=world.seed,
    )


def lengths_of(world: World, samples: Any) -> list[int]:
    """Of sequences their number of tokens; of what is alike some that say nothing."""
    unequal = world.data in ("ragged", "lists")
    return [len(s[0]) if unequal else 1 + 5 * i % 7 for i, s in enumerate(samples)]


# ------------------------------------------------------------------------------------------ samples


@dataclass
class Sample:
    """A sample, and a batch of them: what `default_collate` does not know."""

    tokens: Any
    more: tuple[Tensor, dict[str, Tensor]]


def samples_of(world: World) -> Any:
    """Sequences of tokens, some ignored, with a weight and a flag for each."""
    draw = torch.Generator().manual_seed(world.seed + 1)
    count, length = world.num_samples, 6
    tokens = torch.randint(0, 9, (count, length), generator=draw)
    targets = torch.randint(0, CLASSES, (count, length), generator=draw)
    targets[torch.rand(count, length, generator=draw) < 0.3] = IGNORED
    targets[::4] = IGNORED  # whole samples without a counted token
    weights = torch.rand(count, generator=draw).to(world.dtype) + 0.1
    flags = torch.rand(count, generator=draw) < 0.08
    lengths = torch.randint(1, length + 1, (count,), generator=draw).tolist()
    if world.data == "tensors":
        return TensorDataset(tokens, targets, weights, flags)
    rows = list(zip(tokens, targets, weights, flags, strict=True))
    if world.data == "tuples":
        return [((t, y), (w, f)) for t, y, w, f in rows]
    if world.data == "dicts":
        return [{"in": {"tokens": t}, "out": [y, w], "flag": f, "name": "x"} for t, y, w, f in rows]
    if world.data == "dataclass":
        return [Sample(t, (y, {"weight": w, "flag": f})) for t, y, w, f in rows]
    return [(t[:n], y[:n], w, f) for (t, y, w, f), n in zip(rows, lengths, strict=True)]


def stack(samples: list[Sample]) -> Sample:
    """Collate for the data class."""
    more = {
        key: torch.stack([sample.more[1][key] for sample in samples]) for key in ("weight", "flag")
    }
    tokens = torch.stack([sample.tokens for sample in samples])
    return Sample(tokens, (torch.stack([sample.more[0] for sample in samples]), more))


def pad(samples: list[Any]) -> tuple[Tensor, ...]:
    """Collate for sequences of unequal length: padded to the longest of the micro-batch."""
    tokens, targets, weights, flags = zip(*samples, strict=True)
    return (
        nn.utils.rnn.pad_sequence(tokens, batch_first=True),
        nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=IGNORED),
        torch.stack(weights),
        torch.stack(flags),
    )


def parts_of(batch: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, targets, weights and flags, whatever the batch looks like."""
    if isinstance(batch, Sample):
        return batch.tokens, batch.more[0], batch.more[1]["weight"], batch.more[1]["flag"]
    if isinstance(batch, dict):
        assert set(batch) == {"in", "out", "flag", "name"}
        return batch["in"]["tokens"], batch["out"][0], batch["out"][1], batch["flag"]
    if isinstance(batch[0], tuple):  # a list of unequal samples
        return pad(batch)
    if isinstance(batch[0], list):
        (tokens, targets), (weights, flags) = batch
        return tokens, targets, weights, flags
    return tuple(batch)


# ------------------------------------------------------------------------------- the model, the loss


class Model(nn.Module):
    """Token by token, so that padding does not matter."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH, dtype=world.dtype)
        self.body = nn.Sequential(
            nn.Linear(WIDTH, 8, dtype=world.dtype),
            nn.ReLU(inplace=True),
            nn.Linear(8, WIDTH, dtype=world.dtype),
            nn.LayerNorm(WIDTH, dtype=world.dtype),
        )
        self.head = nn.Linear(WIDTH, 9, bias=False, dtype=world.dtype)
        if world.tied:
            self.head.weight = self.embed.weight
        self.rare = nn.Linear(WIDTH, WIDTH, dtype=world.dtype) if world.sometimes else None
        self.never = nn.Linear(2, 2, dtype=world.dtype)
        if world.frozen:
            self.body[0].requires_grad_(False)

    def forward(self, tokens: Tensor, flags: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.body(x)
        if self.rare is not None and bool(flags.any()):
            x = x + self.rare(x) * flags[:, None, None]
        return self.head(x)[..., :CLASSES]


def loss_of(kind: str, model: nn.Module, batch: Any) -> Any:
    """The loss in each form that a loss function may return."""
    tokens, targets, weights, flags = parts_of(batch)
    logits = model(tokens, flags)
    losses = F.cross_entropy(
        logits.transpose(1, 2), targets, reduction="none", ignore_index=IGNORED
    )
    counted = (targets != IGNORED).sum()
    if kind == "mean":
        return losses.sum(dim=1).mean()
    if kind == "pair":
        return losses.sum(), int(counted)
    if kind == "counted":
        return ab.Loss(losses.sum(), int(counted))
    if kind == "counted on device":
        return ab.Loss(losses.sum(), counted, metrics={"tokens": (counted, len(tokens))})
    return ab.Loss((losses.sum(dim=1) * weights).sum(), weights.sum())


def in_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups with options of their own."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() == 1], "lr": 0.03},
    ]


def variant(world: World, **changes: Any) -> World:
    """`world` with some of it changed."""
    return dataclasses.replace(world, **changes)
