"""What samples leave in the heap is told from what they are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

import anybatch as ab
from anybatch.estimate import footprint, subject_of
from anybatch.estimate.samples import sample_bytes as bytes_of
from anybatch.machine import MMAP_THRESHOLD
from anybatch.plans import Choice

NUM, WIDTH = 64, 1000
ROWS = torch.arange(float(NUM * WIDTH)).view(NUM, WIDTH)
OBJECTS = 1000
"""More than an object without its numbers takes."""


class Made(Dataset):
    """Samples by a function."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def task(train: Any, **more: Any) -> ab.Task:
    return ab.Task(
        model=lambda: nn.Linear(WIDTH, 4),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=train,
        global_batch=32,
        steps=2,
        **more,
    )


def sample_bytes(task: ab.Task) -> int:
    return bytes_of(task, ROWS[:2].clone())


def test_tensors_in_memory_have_no_samples():
    assert sample_bytes(task(TensorDataset(ROWS))) == 0


@pytest.mark.parametrize(
    "train", [list(ROWS), list(ROWS.numpy()), Made(lambda i: ROWS[i]), Made(lambda i: float(i))]
)
def test_of_samples_that_are_there_already_only_objects_are_made(train: Any):
    assert sample_bytes(task(train)) < OBJECTS


@pytest.mark.parametrize(
    "train",
    [
        Made(lambda i: ROWS[i].clone()),
        Made(lambda i: ROWS[i].numpy().copy()),
        Made(lambda i: {"x": ROWS[i] + 1, "y": i}),
        Subset(Made(lambda i: ROWS[i] * torch.rand(())), range(NUM // 2)),
    ],
)
def test_samples_that_are_made_leave_their_numbers(train: Any):
    assert 4 * WIDTH < sample_bytes(task(train)) < 1.5 * 4 * WIDTH + OBJECTS


def test_of_a_stream_no_sample_is_spent():
    taken: list[int] = []

    class Once(IterableDataset):
        def __iter__(self) -> Any:
            for row in ROWS:
                taken.append(1)
                yield row

    assert 4 * WIDTH < sample_bytes(task(Once())) < 1.5 * 4 * WIDTH + OBJECTS
    assert not taken


def test_large_samples_go_back_to_the_kernel():
    large = Made(lambda i: torch.ones(MMAP_THRESHOLD // 4))
    assert sample_bytes(task(large)) < OBJECTS


def test_workers_have_the_samples_in_their_own_memory():
    assert sample_bytes(task(Made(lambda i: ROWS[i].clone()), num_workers=1)) == 0


def test_the_random_numbers_of_the_process_stay_as_they_were():
    torch.manual_seed(3)
    expected = torch.rand(4), np.random.default_rng(0).random()
    torch.manual_seed(3)
    sample_bytes(task(Made(lambda i: torch.rand(WIDTH))))
    assert torch.equal(torch.rand(4), expected[0])


def test_every_sample_of_a_micro_batch_counts():
    device, choice = ab.Machine.here("256MiB").device, Choice(micro_batch=32, evaluation_batch=1)
    made, there = (
        footprint(subject_of(task(train)), choice, device).peak.num_bytes
        for train in (Made(lambda i: ROWS[i].clone()), list(ROWS))
    )
    assert made - there > 0.8 * 32 * 4 * WIDTH
