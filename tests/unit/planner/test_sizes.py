"""Micro-batches that leave no pass short come before those that do."""

from __future__ import annotations

import pytest
import torch
from tests.unit.planner.tasks import deep_task
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.machine import Machine
from anybatch.planner.costs import Sizes


@pytest.mark.parametrize(
    ("whole", "unit", "size", "part"),
    [
        (512, 1, 19, 16),  # 32 passes, and not 27 of which the last is short
        (512, 1, 512, 512),
        (512, 1, 300, 256),
        (1000, 1, 40, 40),
        (320, 32, 96, 64),  # whole ghost batches
        (509, 1, 100, 85),  # a prime: nothing but evened out
        (512, 1, 1, 1),
    ],
)
def test_the_part_that_leaves_no_pass_short(whole: int, unit: int, size: int, part: int):
    sizes = Sizes(whole, unit)
    assert sizes.whole_part(size) == part
    assert sizes.whole_part(size) <= size
    assert sizes.missing(part) == (0 if whole % part == 0 else part - whole % part)


def test_among_equals_full_passes_of_eights_are_taken():
    task = deep_task(
        model=lambda: nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(3)]),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        train=TensorDataset(torch.zeros(2, 2048, 4096)),
        global_batch=512,
        last="wrap",
    )
    machine = Machine.describe("h100-80gb").with_budget("26GiB")
    plan = ab.plan(task, machine, precision="bf16", recompute="none")
    assert 8 <= plan.choice.micro_batch < 512
    assert plan.choice.micro_batch % 8 == 0
    assert 512 % plan.choice.micro_batch == 0


def test_all_samples_at_once_are_weighed_though_the_last_ghost_batch_is_smaller():
    assert Sizes(whole=20, smallest=8).worth_weighing(20)[0] == 20


def test_three_quarters_of_the_largest_are_weighed_though_the_evened_may_not_fit():
    weighed = Sizes(whole=512, smallest=1).worth_weighing(53)
    assert weighed[0] == 52
    assert {37, 32} <= set(weighed)  # in 14 passes, and in 16 full ones
