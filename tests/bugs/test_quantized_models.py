"""Models whose frozen weights a library has quantized: tensors that consist of several (torchao), or
parameters with their scales as an attribute (bitsandbytes). They are traced, and counted in bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.alone import alone
from torch import Tensor, nn

import anybatch as ab

SIZE = 256


class Adapted(nn.Module):
    """A frozen layer and an adapter."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(SIZE, 4, bias=False), nn.Linear(4, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.base(x) + self.up(self.down(x)))


class Codes(nn.Parameter):
    """Codes of a weight, with their scales as an attribute, as in bitsandbytes."""

    scales: Tensor | None = None


class Coded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(SIZE, SIZE) / 16
        scales = weight.abs().amax(dim=1, keepdim=True) / 127
        codes = (weight / scales).round().to(torch.int8)
        self.weight = Codes(codes, requires_grad=False)
        self.weight.scales = scales.expand(SIZE, SIZE).contiguous()
        self.order = [torch.arange(SIZE)]  # a plain tensor in a list

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.scales is not None
        return F.linear(x[:, self.order[0]], self.weight * self.weight.scales)


def by_torchao() -> nn.Module:
    quantization: Any = pytest.importorskip("torchao.quantization")
    layer = nn.Sequential(nn.Linear(SIZE, SIZE)).requires_grad_(False)
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    return layer


def with_attributes() -> nn.Module:
    return Coded()


def made(layer: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Adapted(layer()) for _ in range(3)])


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def check(layer: Callable[[], nn.Module], num_bytes: int) -> None:
    model, plain = made(layer), made(layer)
    batch = torch.randn(2048, SIZE)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(trained_of(model), lr=0.1)

    with ab.Step(model, sgd(model), loss, memory="20MiB") as step:
        step(batch)
        plan = step.plan
    assert plan.accumulation_steps > 1  # which was found by a trace
    assert not [notice for notice in plan.notices if "could not be traced" in notice]
    task = ab.Task(
        name="adapters",
        model=plain,
        train=list(batch),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        global_batch=2048,
        steps=1,
    )
    prediction = ab.plan(task, memory="20MiB", micro_batch=683, rehearsal=False).prediction
    assert prediction is not None
    held = prediction.by_kind["parameters"]
    trained = sum(param.nbytes for param in trained_of(model))
    assert 3 * num_bytes + trained <= held < 1.1 * (3 * num_bytes + trained)
    optimizer = sgd(plain)
    loss(plain, batch).backward()
    optimizer.step()
    found, wanted = (nn.utils.parameters_to_vector(trained_of(one)) for one in (model, plain))
    assert (found - wanted).norm() < 1e-6 * wanted.norm()


@pytest.mark.nightly
@alone
def test_a_weight_that_consists_of_several_tensors():
    check(by_torchao, SIZE * SIZE)


@pytest.mark.slow
@alone
def test_a_weight_with_its_scales_as_an_attribute():
    check(with_attributes, SIZE * SIZE)
