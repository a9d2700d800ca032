"""The padded size of a mean global batch."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import anybatch as ab
from anybatch.estimate.samples import padded_of


def task(lengths: list[int] | None, global_batch: int, train: object = None) -> ab.Task:
    return ab.Task(
        model=lambda: nn.Linear(1, 1),
        loss=lambda model, batch: model(batch[0]).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=train or TensorDataset(torch.zeros(len(lengths or range(8)), 1)),
        lengths=lengths,
        global_batch=global_batch,
        steps=1,
        shuffle=False,
    )


def test_samples_without_lengths_have_no_padded_size():
    assert padded_of(task(None, 8)) is None


def test_a_stream_has_no_padded_size():
    class Stream(IterableDataset):
        def __iter__(self) -> object:
            return iter(range(8))

    assert padded_of(task(None, 8, Stream())) is None


def test_samples_of_one_length_are_as_many_as_a_batch_has():
    assert padded_of(task([7] * 8, 4)) == 4


def test_short_samples_share_the_size_of_the_longest():
    # One pass of 8; and 8 of length 1, which are padded to no more than 8 together.
    assert padded_of(task([8] + [1] * 8, 9)) == 2


def test_the_size_is_rounded_up_to_whole_ghost_batches():
    # Ghost batches of 4 x 8 and of 4 x 1 numbers: more than the 32 of one ghost batch of the longest.
    assert padded_of(task([8] + [1] * 7, 8), ghost=4) == 8
