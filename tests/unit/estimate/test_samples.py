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
from anybatch.data import AT_ONCE
from anybatch.estimate import footprint, subject_of
from anybatch.estimate.samples import samples_of
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
    return samples_of(task, ROWS[:2].clone()).left_bytes


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


def test_a_stream_holds_a_global_batch_of_samples_and_none_is_spent():
    taken: list[int] = []

    class Once(IterableDataset):
        def __iter__(self) -> Any:
            for row in ROWS:
                taken.append(1)
                yield row

    found = samples_of(task(Once()), ROWS[:2].clone())
    assert 32 * 4 * WIDTH < found.held_bytes < 32 * (4 * WIDTH + OBJECTS)
    assert found.left_bytes == 0
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


@pytest.mark.parametrize(("collate", "counted"), [(torch.stack, 3 * AT_ONCE), (None, AT_ONCE)])
def test_the_samples_that_are_there_at_a_time_count(collate: Any, counted: int):
    choice = Choice(micro_batch=3 * AT_ONCE, evaluation_batch=1)
    device = ab.Machine.here("256MiB").device
    made, there = (
        footprint(subject_of(task(train, collate=collate)), choice, device).peak.num_bytes
        for train in (Made(lambda i: ROWS[i % NUM].clone()), list(ROWS))
    )
    assert 0.8 * counted * 4 * WIDTH < made - there < 1.3 * counted * 4 * WIDTH
