"""Subjects: a task made ready to be traced, whatever its model function does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.estimate import subject_of
from anybatch.machine import Device, Machine


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean()


def test_a_model_function_that_reads_weights_from_a_file_is_traced_without_them(tmp_path: Path):
    path = tmp_path / "weights.pt"
    torch.save(nn.Linear(3, 1).state_dict(), path)

    def build() -> nn.Module:
        model = nn.Linear(3, 1)
        with _disable_current_modes():  # as libraries do that map a file
            model.load_state_dict(torch.load(path), assign=True)
        return model

    task = task_of(build)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert not any(isinstance(p, FakeTensor) for p in build().parameters())
        made = subject_of(task).build_model()
        assert all(isinstance(p, FakeTensor) for p in made.parameters())
    kinds = ab.plan(task).prediction.by_kind
    assert kinds["parameters"] == 4 * 4  # bytes, of four numbers


def with_float(weight: torch.Tensor) -> None:
    weight.data.mul_(2.0 if float(weight.detach().sum()) > 0 else 1.0)


def with_item(weight: torch.Tensor) -> None:
    weight.data.div_(weight.norm().item())


def with_numpy(weight: torch.Tensor) -> None:
    weight.data.copy_(torch.from_numpy(weight.detach().numpy()[::-1].copy()))


class LooksAtItsWeights(nn.Module):
    """What cannot be built on fake tensors, and can be run on them."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(3, 4), nn.Linear(3, 4, bias=False)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 1).double()
        look(self.first.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x) + self.tied(x)).double())


def task_of(model: Any) -> ab.Task:
    return ab.Task(
        model=model,
        loss=squares,
        optimizer=lambda params: torch.optim.Adam(params, lr=0.1),
        train=TensorDataset(torch.randn(8, 3)),
        global_batch=8,
        steps=1,
    )


@pytest.mark.parametrize("look", [with_float, with_item, with_numpy])
def test_a_model_that_cannot_be_built_on_fake_tensors_is_planned_as_one_that_is_given(look: Any):
    planned = ab.plan(task_of(lambda: LooksAtItsWeights(look)))
    given = ab.plan(task_of(LooksAtItsWeights(look)))
    assert planned.prediction is not None
    assert planned.prediction.by_kind == given.prediction.by_kind
    assert planned.task == given.task
    with ab.Session(task_of(lambda: LooksAtItsWeights(look)), planned) as session:
        assert [event.step for event in session.steps()] == [1]


def test_what_was_built_for_real_is_not_kept():
    made = []

    def build() -> nn.Module:
        made.append(LooksAtItsWeights(with_item))
        return made[-1]

    subject = subject_of(task_of(build))
    assert len(made) == 1  # the other ones raised
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = subject.build_model()
        tensors = [*found.parameters(), *found.buffers()]
    assert len(made) == 1
    assert all(isinstance(one, FakeTensor) and one.device.type == "cpu" for one in tensors)
    wanted = [(n, p.shape, p.dtype, p.requires_grad) for n, p in made[0].named_parameters()]
    assert [(n, p.shape, p.dtype, p.requires_grad) for n, p in found.named_parameters()] == wanted


def test_a_model_function_that_fails_is_told_by_its_own_error():
    def build() -> nn.Module:
        raise KeyError("no such layer")

    with pytest.raises(KeyError, match="no such layer"):
        ab.plan(task_of(build))
    with pytest.raises(ab.InputError, match="returned a value of type int"):
        ab.plan(task_of(lambda: 3))


def test_what_fake_tensors_of_cuda_cannot_do_those_of_a_cpu_do():
    device = replace(Machine.describe("24GiB").device, present=True)
    subject = subject_of(task_of(nn.Linear(3, 1)))
    asked: list[Device] = []

    def trace(on: Device) -> str:
        asked.append(on)
        if on.present:
            raise RuntimeError("Cannot access data pointer of Tensor")
        return "traced"

    assert subject.following(device, trace) == "traced"
    assert [on.present for on in asked] == [True, False]
    assert subject.as_traced(device) == replace(device, present=False)
    assert subject.following(device, trace) == "traced"  # and is not asked again
    assert [on.present for on in asked] == [True, False, False]


def test_what_fails_on_both_is_told():
    device = replace(Machine.describe("24GiB").device, present=True)
    subject = subject_of(task_of(nn.Linear(3, 1)))

    def trace(on: Device) -> str:
        raise RuntimeError(f"shapes do not agree, {on.present}")

    with pytest.raises(RuntimeError, match="shapes do not agree, False"):
        subject.following(device, trace)
    assert subject.as_traced(device) == device


@pytest.mark.parametrize("precision", ["bf16-weights", "bf16-pure"])
def test_a_parameter_that_is_made_of_a_number_is_halved_in_a_trace(precision: str):
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 1)
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    task = task_of(Scaled)
    plan = ab.plan(task, Machine.describe("24GiB"), precision=precision)
    assert plan.prediction is not None
