"""Bytes of samples that a step holds in addition to its batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import anybatch as ab
from anybatch.estimate.samples import Samples, samples_of

NUM, WIDTH = 64, 1000
ROWS = torch.arange(float(NUM * WIDTH)).view(NUM, WIDTH)


def task(train: Any) -> ab.Task:
    return ab.Task(
        model=lambda: nn.Linear(WIDTH, 4),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=train,
        global_batch=32,
        steps=2,
    )


def test_samples_that_can_be_read_again_are_not_held():
    assert samples_of(task(TensorDataset(ROWS)), ROWS[:2].clone()) == Samples()


def test_a_stream_holds_a_global_batch_of_samples_and_none_is_spent():
    taken: list[int] = []

    class Once(IterableDataset):
        def __iter__(self) -> Any:
            for row in ROWS:
                taken.append(1)
                yield row

    batch = {"rows": ROWS[:2].clone(), "kinds": np.zeros((2, 3))}
    assert samples_of(task(Once()), batch).held_bytes == 32 * (4 * WIDTH + 8 * 3)
    assert not taken
