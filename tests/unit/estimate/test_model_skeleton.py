"""A model and an optimizer that are there already, planned whatever the optimizer's class takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import anybatch as ab


class Lion(Optimizer):
    """Has no default of the learning rate, among its options, and of a bound, among its attributes."""

    def __init__(self, params: Any, lr: float, *, bound: float) -> None:
        self.bound = bound
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for param in group["params"]:
                mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                mean.lerp_(param.grad, 0.1)
                param.add_(mean.sign().clamp(-self.bound, self.bound), alpha=-group["lr"])


class Wrapper(Optimizer):
    """As those of libraries that step, or do not, by settings of their own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.num_steps = 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optimizer.defaults

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.num_steps += 1
        self.optimizer.step()


class Secretive(Lion):
    """Keeps nothing of what it is given."""

    def __init__(self, params: Any, how: str) -> None:
        super().__init__(params, lr=0.1, bound=1.0)


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def stepped(make: Callable[[Any], Optimizer]) -> tuple[ab.Plan, Optimizer]:
    model = nn.Linear(8, 2)
    optimizer = make(model.parameters())
    with ab.Step(model, optimizer, squares) as step:
        step(torch.randn(6, 8))
        assert step.plan is not None
        return step.plan, optimizer


def wrapped_adamw(params: Any) -> Optimizer:
    return Wrapper(Wrapper(torch.optim.AdamW(params)))


@pytest.mark.parametrize(
    ("make", "states"), [(partial(Lion, lr=0.1, bound=1.0), 1), (wrapped_adamw, 2)]
)
def test_an_optimizer_is_made_anew_whatever_its_class_takes(
    make: Callable[[Any], Optimizer], states: int
):
    plan, optimizer = stepped(make)
    assert plan.prediction is not None
    size = 4 * (8 * 2 + 2)
    # Nothing is traced: of a class that torch does not have two states are reckoned with.
    assert states * size - 16 <= plan.prediction.by_kind["optimizer state"] <= 2 * size + 16
    assert plan.choice.update == "as given"  # by the wrapper
    if isinstance(optimizer, Wrapper):
        assert optimizer.num_steps == 1


def test_for_one_that_cannot_be_made_anew_passes_are_measured():
    plan, _ = stepped(partial(Secretive, how="well"))
    assert plan.prediction is not None
    assert plan.prediction.method.startswith("measured")


def test_a_model_is_planned_while_torch_looks_for_nan():
    with torch.autograd.set_detect_anomaly(True):
        plan, _ = stepped(torch.optim.AdamW)
        assert torch.is_anomaly_enabled()
    assert plan.prediction is not None
