"""What a sample draws depends on the sample and the epoch, also where its data set owns the generator.

Reported about many libraries: worker processes copy the generator, and so all of them draw the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import anybatch as ab

OF_THE_MODULE = np.random.default_rng(0)


class Transform:
    """Holds the generator, as augmentations do."""

    def __init__(self) -> None:
        self.rng = np.random.RandomState(0)

    def __call__(self) -> float:
        return float(self.rng.random_sample())


class Noise(Dataset[Tensor]):
    """Twelve samples: the index and a number that is drawn."""

    def __init__(self, draw: Callable[[Any], float]) -> None:
        self.draw = draw
        self.numpy, self.python = np.random.default_rng(0), random.Random(0)
        self.torch, self.transform = torch.Generator().manual_seed(0), Transform()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, self.draw(self)], dtype=torch.float64)


DRAWS = {
    "NumPy's": lambda data: data.numpy.random(),
    "Python's": lambda data: data.python.random(),
    "torch's": lambda data: float(torch.rand((), generator=data.torch)),
    "a transform's": lambda data: data.transform(),
    "the module's": lambda _: OF_THE_MODULE.random(),
}


def drawn(data: Any, micro_batch: int = 6, num_workers: int = 0) -> list[dict[float, float]]:
    """What each sample drew, by epoch."""
    seen: list[list[float]] = []

    def loss(model: nn.Module, batch: Tensor) -> ab.Loss:
        if model.training:
            seen.extend(batch.tolist())
        return ab.Loss(model(batch).square().sum(), len(batch))

    task = ab.Task(
        model=lambda: nn.Linear(2, 1, dtype=torch.float64),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        train=data,
        global_batch=6,
        epochs=2,
        num_workers=num_workers,
    )
    plan = ab.plan(task, micro_batch=micro_batch)
    seen.clear()
    ab.train(task, plan=plan, progress=False)
    assert len(seen) == 24
    return [dict(seen[:12]), dict(seen[12:])]  # type: ignore[arg-type]


@pytest.mark.usefixtures("losses_are_not_checked")
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draws_do_not_depend_on_the_micro_batch(draw: Callable[[Any], float]) -> None:
    first, second = whole = drawn(Noise(draw))

    assert len({*first.values(), *second.values()}) == 24
    assert drawn(Noise(draw), micro_batch=2) == whole


@pytest.mark.usefixtures("losses_are_not_checked")
def test_workers_do_not_repeat_each_other() -> None:
    draw = DRAWS["NumPy's"]

    assert drawn(Noise(draw), num_workers=2) == drawn(Noise(draw))


def test_the_generator_goes_on_as_if_nothing_was_fetched() -> None:
    data = Noise(DRAWS["NumPy's"])
    expected = np.random.default_rng(0).random()

    drawn(data)

    assert data.numpy.random() == expected


class Stream(IterableDataset[Tensor]):
    """Twelve samples in an order that its generator, seeded by the system, draws."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()

    def __iter__(self) -> Iterator[Tensor]:
        for index in self.rng.permutation(12):
            yield torch.tensor([index, self.rng.random()], dtype=torch.float64)


@pytest.mark.usefixtures("losses_are_not_checked")
def test_a_stream_draws_the_same_in_every_process() -> None:
    first, second = drawn(Stream())

    assert drawn(Stream(), micro_batch=2) == [first, second]
    assert list(first) != list(second)
