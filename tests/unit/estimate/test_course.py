"""Which sizes of batches a run meets, and how long it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import anybatch as ab
from anybatch.data import Steps
from anybatch.estimate.course import Course, course_of


def task(length: int = 100, **options: Any) -> ab.Task:
    return ab.Task(
        model=lambda: nn.Linear(1, 1),
        loss=lambda model, batch: model(batch[0]).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        **{"train": TensorDataset(torch.zeros(length, 1)), **options},
    )


def test_steps_below_the_global_batch_are_those_that_the_run_takes():
    for length, options in (
        (100, {"global_batch": 32, "epochs": 2}),
        (100, {"global_batch": 32, "epochs": 2, "last": "drop"}),
        (100, {"global_batch": 32, "epochs": 2, "last": "wrap"}),
        (100, {"global_batch": 32, "steps": 3}),
        (100, {"global_batch": 32, "steps": 4}),
        (100, {"global_batch": 32, "samples": 150}),
        (20, {"global_batch": 32, "steps": 2}),
    ):
        steps = Steps(length, **{"last": "keep", **options})
        sizes = {steps.num_samples_of(number) for number in range(steps.total_steps or 0)}
        found = course_of(task(length, **options))
        assert set(found.smaller_steps) == sizes - {32}, options


def test_sizes_of_micro_batches_are_counted_once():
    # 512 is 16 x 32; 413 is 12 x 32 and 29.
    assert Course(smaller_steps=(413,)).num_sizes(32, 512) == 2
    assert Course().num_sizes(32, 512) == 1
    assert Course().num_sizes(100, 512) == 2
    assert Course(smaller_steps=(64,)).num_sizes(512, 512) == 2


def test_products_of_sizes_that_are_data_have_kernels_for_each_up_to_what_onednn_keeps():
    assert Course(total_steps=3).num_kernels_of_data(num_products=20, num_passes=2) == 120
    assert Course(total_steps=300).num_kernels_of_data(20, 2) == 1024
    assert Course().num_kernels_of_data(20, 2) == 1024
    assert course_of(task(100, global_batch=32, epochs=2)).total_steps == 8


def test_an_evaluation_meets_its_batch_and_the_rest():
    assert Course().num_evaluation_sizes(128, 360) == 2
    assert Course().num_evaluation_sizes(120, 360) == 1
    assert Course().num_evaluation_sizes(500, 360) == 1
    assert Course().num_evaluation_sizes(500, 0) == 0
    assert Course().num_evaluation_sizes(500, None) == 2
    seen = Course(smaller_steps=(413,)).sizes(96, 512)
    assert seen == {96, 32, 29}
    assert Course().num_evaluation_sizes(96, 360, seen) == 1
    assert Course().num_evaluation_sizes(96, None, seen) == 1


def test_evaluation_counts_for_later_steps_only():
    valid = TensorDataset(torch.zeros(10, 1))
    assert not course_of(task(global_batch=25, steps=4, valid=valid)).evaluates_between
    assert course_of(task(global_batch=25, steps=5, valid=valid)).evaluates_between
    assert course_of(
        task(global_batch=25, steps=4, valid=valid, evaluate_every=2)
    ).evaluates_between
    assert not course_of(task(global_batch=25, steps=5)).evaluates_between


class Numbers(Dataset):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        return index


def test_speaking_to_workers_takes_memory_where_there_are_any():
    def of(num_workers: int, **options: Any) -> int:
        how = {"global_batch": 25, "steps": 4, "num_workers": num_workers, **options}
        return course_of(task(**how)).worker_bytes

    assert of(2) == 0  # tensors in memory are not loaded
    data = Numbers()
    assert of(0, train=data) == 0
    assert of(2, train=data) == (160 + 2 * 36) << 10
    assert of(2, train=data, valid=data) == (160 + 4 * 36) << 10


def test_the_order_of_two_epochs_is_kept():
    assert course_of(task(global_batch=25, steps=4)).order_bytes == 8 * 100
    assert course_of(task(global_batch=25, epochs=9)).order_bytes == 2 * 8 * 100
