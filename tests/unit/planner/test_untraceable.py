"""What cannot be traced: one way of many, or the whole model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.planner.tasks import Block, deep_task
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.machine import Machine
from anybatch.plans import Plan, Recompute


class Caching(Block):
    """Keeps what it has seen, as models do that are to generate text."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor, seen: dict[int, Tensor]) -> Tensor:
        if self.config.use_cache:
            before = seen.get(id(self))
            seen[id(self)] = x if before is None else torch.cat([before, x])
            x = x + seen[id(self)].square().mean(dim=0)
        return super().forward(x)


class Reader(nn.Module):
    """Blocks that cannot be computed twice while `use_cache` is true."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Caching(config) for _ in range(4))
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen: dict[int, Tensor] = {}
        for layer in self.layers:
            x = layer(x, seen)
        return self.head(x)


class Picking(nn.Module):
    """The number of rows follows from the values, and what is done with them from their number."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.line = nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 0.5 and x.tolist():
            raise ValueError("no such value here")
        return self.line(x)


def planned(use_cache: Any, **wishes: Any) -> Plan:
    task = deep_task(model=lambda: Reader(SimpleNamespace(use_cache=use_cache)))
    return ab.plan(task, Machine.describe("24GiB"), **wishes)


def test_a_way_that_cannot_be_traced_is_a_candidate_that_is_not_possible():
    plan = planned("always", micro_batch=4096, memory="1GiB", frontier=True)
    assert plan.prediction is not None
    assert plan.choice.recompute == Recompute()
    impossible = [c for c in plan.rejected if not c.possible]
    assert {c.choice.recompute.keep for c in impossible} == {"nothing", "matmuls"}
    for candidate in impossible:
        assert candidate.peak_bytes is None
        assert "could not be traced (NotRepeated" in candidate.reason
    assert not any(rung.recompute.blocks for rung in plan.ladder)
    assert Plan.from_json(plan.to_json()) == plan


def test_what_was_asked_for_and_cannot_be_traced_is_not_predicted():
    plan = planned("always", recompute="all")
    assert plan.prediction is None
    assert any("did not compute" in notice for notice in plan.notices)


def test_while_a_model_trains_it_keeps_nothing_to_generate_with():
    assert all(c.possible for c in planned(True, frontier=True).rejected)
    config = SimpleNamespace(use_cache=True)
    model = Reader(config)
    seen: list[bool] = []

    def loss(model: Any, batch: Any) -> Tensor:
        seen.append(model.config.use_cache)
        return (model(batch[0]) - batch[1]).square().mean()

    data = TensorDataset(torch.zeros(8, 64), torch.zeros(8, 1))
    task = deep_task(model=model, loss=loss, train=data, global_batch=8)
    ab.train(task, plan=ab.plan(task, recompute="none", micro_batch=8))
    assert seen
    assert not any(seen)
    assert config.use_cache is True


def test_the_state_of_a_model_that_cannot_be_traced_is_known_all_the_same():
    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=0.1)

    def of(width: int) -> ab.Task:
        return deep_task(model=lambda: Picking(width), optimizer=optimizer)

    with pytest.raises(ab.NoPlanFits) as caught:
        ab.plan(of(1 << 20), Machine.describe("512MiB"))
    told = str(caught.value)
    assert caught.value.least_bytes is not None
    assert caught.value.least_bytes > 2 * 65 * 4 * (1 << 20)  # states may go to host memory
    assert "could not be traced" in told
    assert "in forward" in told
    plan = ab.plan(of(1), Machine.describe("512MiB"))
    assert plan.prediction is None
    assert any("test_untraceable.py" in notice for notice in plan.notices)
