"""Samples of unequal size are planned by the largest that were looked at, and this is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import anybatch as ab
from anybatch.errors import DataError
from anybatch.estimate.samples import template_of

NUM = 640


def padded(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True)


def in_pairs(rows: list[Tensor]) -> Tensor:
    if len(rows) < 2:
        raise ValueError("a pair is two")
    return padded(rows)


def task(
    rows: Any, collate: Callable[[list[Tensor]], Tensor] | None = padded, **more: Any
) -> ab.Task:
    return ab.Task(
        model=lambda: nn.Linear(1, 4),
        loss=lambda model, batch: model(batch[..., None]).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=rows,
        collate=collate,
        global_batch=32,
        epochs=1,
        **more,
    )


def rows(length_of: Callable[[int], int]) -> list[Tensor]:
    return [torch.ones(length_of(i)) for i in range(NUM)]


def test_the_largest_of_those_looked_at_are_taken():
    batch, looked_at = template_of(task(rows(lambda i: 3 + i % 7)))
    assert looked_at == 64
    assert batch.shape == (2, 9)


def test_samples_that_are_alike_are_the_first():
    batch, looked_at = template_of(task([torch.full((5,), float(i)) for i in range(NUM)]))
    assert looked_at == 0
    assert batch[:, 0].tolist() == [0, 1]


def test_given_lengths_are_believed():
    uneven = rows(lambda i: 200 if i == 17 else 5)
    batch, looked_at = template_of(task(uneven, lengths=[len(row) for row in uneven]))
    assert (looked_at, batch.size(1)) == (0, 200)


def test_what_cannot_be_looked_at_one_by_one_is_taken_from_the_front():
    batch, looked_at = template_of(task(rows(lambda i: 3 + i % 50), in_pairs))
    assert (looked_at, batch.shape) == (0, (2, 4))


def test_a_sample_that_cannot_be_read_ends_nothing_before_its_turn():
    class Torn(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return NUM

        def __getitem__(self, index: int) -> Tensor:
            if index == NUM - 1:
                raise OSError("torn")
            return torch.ones(5)

    assert template_of(task(Torn()))[1] == 0
    with pytest.raises(DataError, match="sample 0 of"):
        template_of(task(torch.utils.data.Subset(Torn(), [NUM - 1])))


def test_a_plan_says_what_it_took():
    plan = ab.plan(task(rows(lambda i: 3 + i % 50)), memory="64MiB")
    (told,) = (notice for notice in plan.notices if "differ in size" in notice)
    assert "the largest of 64 that were looked at" in told
    alike = ab.plan(task(rows(lambda i: 5)), memory="64MiB")
    assert not any("differ in size" in notice for notice in alike.notices)
