"""Random pairs of a task and a budget, each a pure function of its number."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import anybatch as ab

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.memory import models

Samples = Callable[[int], Iterable[Tensor]]

_NORMED = ("convolutional", "residual")  # with BatchNorm
_STEPS = 3


@dataclass(frozen=True)
class Pair:
    """One task, and where its budget lies.

    Attributes:
        seed: which pair it is.
        family: of models, a key of `FAMILIES`.
        sizes: of the model, as its builder takes them.
        batch: global batch.
        optimizer: `"sgd"`, `"momentum"` or `"adamw"`.
        clip_norm, ghost_batch: see `Task`.
        held_out: samples to evaluate on; 0: none.
        precision: `"fp32"` or `"bf16"`.
        below: the budget is to be less than the least that the planner names, so that it refuses.
        place: where the budget lies, from 0 to 1: below, between two fifths and nine tenths of the
            least; else between the least and twice what the whole batch needs, or once if `large`.
        large: of `LARGE`, which need hundreds of MiB, not tens.
    """

    seed: int
    family: str
    sizes: tuple[int, ...]
    batch: int
    optimizer: str
    clip_norm: float | None
    ghost_batch: int | None
    held_out: int
    precision: str
    below: bool
    place: float
    large: bool = False

    def budget(self, least: int, whole: int) -> int:
        """The budget in bytes, where the planner says that the least is `least`, and that the whole
        batch in one piece needs `whole`."""
        if self.below:
            return int(least * (0.4 + 0.5 * self.place))
        most = max(whole if self.large else 2 * whole, least)
        return int(least + (most - least) * self.place)

    def task(self) -> ab.Task:
        """The task, with data of its own."""
        family = (LARGE if self.large else FAMILIES)[self.family]
        torch.manual_seed(self.seed)
        make, samples = family.build(*self.sizes)
        return ab.Task(
            model=make,
            loss=family.loss,
            optimizer=OPTIMIZERS[self.optimizer],
            train=TensorDataset(*samples(self.batch)),
            valid=TensorDataset(*samples(self.held_out)) if self.held_out else None,
            global_batch=self.batch,
            steps=_STEPS,
            clip_norm=self.clip_norm,
            ghost_batch=self.ghost_batch,
            name=f"pair {self.seed}",
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Family:
    """How models of one family are drawn and built.

    Attributes:
        sizes: what each size is drawn from.
        batches: what the global batch is drawn from: the least and the most.
        build: sizes to what builds the model and what makes samples.
        loss: of all of them.
    """

    sizes: tuple[tuple[int, ...], ...]
    batches: tuple[int, int]
    build: Callable[..., tuple[Callable[[], nn.Module], Samples]]
    loss: Callable[[nn.Module, Any], ab.Loss]


def _mlp(width: int, depth: int) -> tuple[Callable[[], nn.Module], Samples]:
    return partial(models.mlp, width, depth), partial(models.vectors, width)


def _convolutional(width: int, side: int) -> tuple[Callable[[], nn.Module], Samples]:
    return partial(models.convolutional, width), partial(models.images, side)


def _residual(width: int, side: int) -> tuple[Callable[[], nn.Module], Samples]:
    return partial(models.residual, width), partial(models.images, side)


def _vgg(hidden: int) -> tuple[Callable[[], nn.Module], Samples]:
    return partial(models.vgg16, 32, hidden), partial(models.images, 32)


def _unet(width: int, depth: int, side: int) -> tuple[Callable[[], nn.Module], Samples]:
    return partial(models.UNet, width, depth), partial(models.masks, side)


def _lstm(vocabulary: int, width: int, length: int) -> tuple[Callable[[], nn.Module], Samples]:
    return partial(models.Recurrent, vocabulary, width), partial(models.tokens, vocabulary, length)


def _language(
    tied: bool, experts: int, vocabulary: int, width: int, depth: int, length: int
) -> tuple[Callable[[], nn.Module], Samples]:
    make = partial(models.LanguageModel, vocabulary, width, depth, length, tied, experts)
    return make, partial(models.tokens, vocabulary, length + 1)


def _encoder(width: int, depth: int, side: int) -> tuple[Callable[[], nn.Module], Samples]:
    return partial(models.Encoder, width, depth, (side // 8) ** 2), partial(models.images, side)


_TEXT = ((500, 1000, 3000), (64, 128, 192), (2, 3, 4, 6), (32, 64, 100))

FAMILIES: dict[str, Family] = {
    "mlp": Family(((64, 200, 512, 1000), (2, 4, 8)), (64, 4000), _mlp, models.class_loss),
    "convolutional": Family(
        ((12, 16, 24, 32), (16, 32)), (32, 300), _convolutional, models.class_loss
    ),
    "residual": Family(((8, 16, 24, 32), (16, 32)), (16, 150), _residual, models.class_loss),
    "vgg16": Family(((128, 512, 1024),), (8, 70), _vgg, models.class_loss),
    "lstm": Family(
        ((500, 1000, 2000), (64, 128, 256), (16, 33, 64)), (16, 130), _lstm, models.token_loss
    ),
    "gpt, tied": Family(_TEXT, (8, 70), partial(_language, True, 0), models.token_loss),
    "gpt, untied": Family(_TEXT, (8, 70), partial(_language, False, 0), models.token_loss),
    "experts": Family(_TEXT, (8, 50), partial(_language, True, 4), models.token_loss),
    "encoder": Family(((64, 128, 192), (2, 3, 4), (32, 64)), (8, 100), _encoder, models.class_loss),
    "u-net": Family(((8, 16, 32), (2, 3), (32, 64)), (4, 40), _unet, models.class_loss),
}

_LARGE_TEXT = ((2000, 5000, 10000), (256, 384), (4, 6), (64, 128))

LARGE: dict[str, Family] = {
    "mlp": replace(FAMILIES["mlp"], sizes=((500, 1000), (8, 16)), batches=(200, 800)),
    "convolutional": replace(
        FAMILIES["convolutional"], sizes=((32, 48, 64), (32, 64)), batches=(100, 400)
    ),
    "residual": replace(FAMILIES["residual"], sizes=((32, 48), (32, 64)), batches=(50, 150)),
    "vgg16": replace(FAMILIES["vgg16"], sizes=((1024, 4096),), batches=(60, 250)),
    "lstm": replace(
        FAMILIES["lstm"], sizes=((2000, 8000), (256, 512), (33, 64, 100)), batches=(50, 150)
    ),
    "gpt, tied": replace(FAMILIES["gpt, tied"], sizes=_LARGE_TEXT, batches=(16, 70)),
    "gpt, untied": replace(FAMILIES["gpt, untied"], sizes=_LARGE_TEXT, batches=(16, 70)),
    "experts": replace(FAMILIES["experts"], sizes=_LARGE_TEXT, batches=(16, 50)),
    "encoder": replace(
        FAMILIES["encoder"], sizes=((192, 256), (4, 6), (64, 96)), batches=(30, 120)
    ),
    "u-net": replace(FAMILIES["u-net"], sizes=((16, 32), (3, 4), (64, 128)), batches=(20, 60)),
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "momentum": models.sgd,
    "adamw": models.adamw,
}


def draw(seed: int, large: bool = False) -> Pair:
    """The pair of that number."""
    families = LARGE if large else FAMILIES
    random_ = random.Random(f"{'large ' if large else ''}budgets {seed}")
    name = random_.choice(list(families))
    family = families[name]
    sizes = tuple(random_.choice(options) for options in family.sizes)
    low, high = family.batches
    batch = round(low * (high / low) ** random_.random())  # as many small ones as large ones
    ghost = random_.choice((4, 8, 16, 32)) if name in _NORMED else None
    return Pair(
        seed=seed,
        family=name,
        sizes=sizes,
        batch=batch,
        optimizer=random_.choice(list(OPTIMIZERS)),
        clip_norm=random_.choice((None, 1.0)),
        ghost_batch=None if ghost is None else min(ghost, batch),
        held_out=random_.choice((0, random_.randrange(1, batch + 1))),
        precision=random_.choice(("fp32", "fp32", "bf16")),
        below=random_.random() < 0.12,
        place=random_.random(),
        large=large,
    )
