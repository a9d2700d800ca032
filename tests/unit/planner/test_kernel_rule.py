"""The kernels that a plan chooses, and the reasons that it tells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.planner.tasks import deep_task
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.plans import KernelChoices, Plan
from anybatch.runs.planning import PlanOptions, serves_again

GPU = ab.Machine.describe("24GiB")


class Convolutional(nn.Module):
    """(B, 3, 8, 8) to (B, 1); joins channels and pixels by `view` if wished."""

    def __init__(self, view: bool = False) -> None:
        super().__init__()
        self.view = view
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4 * 36, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.conv(x))
        return self.head(y.view(len(y), -1) if self.view else y.flatten(1))


def task_of(model: Any = Convolutional, **changes: Any) -> ab.Task:
    images = TensorDataset(torch.zeros(64, 3, 8, 8), torch.zeros(64, 1))
    return deep_task(model=model, train=images, **{"global_batch": 64, **changes})


def told(plan: Plan) -> str:
    return " ".join(plan.notices)


def test_on_cuda_convolutions_are_channels_last_and_tuned_for_their_one_shape():
    plan = ab.plan(task_of(), GPU)
    assert plan.kernels == KernelChoices(channels_last=True, autotune=True)
    assert ("kernels", "channels-last convolutions, autotuned by cuDNN") in plan.explain()
    assert "tensor cores" in told(plan)
    assert "all full micro-batches have one shape" in told(plan)


@pytest.mark.parametrize(
    ("options", "changes", "why"),
    [
        ({"micro_batch": 24}, {}, "a share of 64 is not a multiple of the micro-batch of 24"),
        ({}, {"collate": torch.utils.data.default_collate}, "samples may differ in shape"),
        ({"ranks": 2}, {}, "the shares of the ranks follow their speed"),
    ],
)
def test_where_shapes_vary_nothing_is_tuned(
    options: dict[str, Any], changes: dict[str, Any], why: str
):
    plan = ab.plan(task_of(**changes), GPU, **options)
    assert plan.kernels == KernelChoices(channels_last=True)
    assert why in told(plan)


def test_a_model_that_needs_the_default_layout_keeps_it():
    plan = ab.plan(task_of(lambda: Convolutional(view=True)), GPU)
    assert plan.kernels == KernelChoices(autotune=True)
    assert "`reshape` in place of `view`" in told(plan)
    assert "Cannot view a tensor" in told(plan)


@pytest.mark.parametrize("machine", [None, GPU])
def test_without_convolutions_nothing_is_chosen_or_told(machine: ab.Machine | None):
    plan = ab.plan(deep_task(global_batch=64), machine)
    assert plan.kernels == KernelChoices()
    assert "kernels" not in dict(plan.explain())


def test_on_a_cpu_nothing_is_chosen():
    assert ab.plan(task_of()).kernels == KernelChoices()


def test_compiling_is_done_on_request_and_told():
    plan = ab.plan(task_of(), memory="1GiB", compile=True, rehearsal=False)
    assert plan.kernels == KernelChoices(compile=True)
    assert plan.enforced
    assert "predicted for the uncompiled model" in told(plan)
    assert Plan.from_json(plan.to_json()) == plan
    cuda = ab.plan(task_of(), GPU, compile=True)
    assert cuda.kernels.compile
    assert cuda.kernels.channels_last


def test_a_run_does_not_try_whether_compiling_is_faster():
    plan = ab.plan(task_of(), compile=True)
    assert serves_again(plan, task_of(), None, PlanOptions(compile=True))
    assert not serves_again(plan, task_of(), None, PlanOptions())
    budget = ab.plan(task_of(), memory="1GiB", compile=True, rehearsal=False)
    assert serves_again(budget, task_of(), None, PlanOptions(memory="1GiB", compile=True))
    with pytest.raises(ab.InputError, match="Runs no longer try whether compiling is faster"):
        ab.plan(task_of(), compile="if-faster")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ab.InputError, match="compile is 'always': give True or False"):
        ab.plan(task_of(), compile="always")  # pyright: ignore[reportArgumentType]
