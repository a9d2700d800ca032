"""Where no bytes are known, a few passes find a micro-batch that fits and is fast."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from tests.equivalence.reference import plan_for
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.compute import Replica
from anybatch.engine import Rehearsed
from anybatch.planner.reserve import reserve_of
from anybatch.rank.measuring import _LATER_BYTES, Measuring

WIDTH = 64
PARAMETERS = 4 * WIDTH * WIDTH
FIXED, BESIDE = 5 << 20, _LATER_BYTES


def task_of(global_batch: int, ghost: int | None) -> ab.Task:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    if ghost:
        model.append(nn.BatchNorm1d(WIDTH, affine=False))
    return ab.Task(
        model=model,
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda params: torch.optim.AdamW(params),
        train=TensorDataset(torch.zeros(global_batch, WIDTH)),
        global_batch=global_batch,
        ghost_batch=ghost,
        steps=1,
    )


def measured(task, budget, per_sample, bend=0, seconds=lambda size: 1.0):
    """What is planned where passes take so many bytes, and which ones were run."""
    unit = task.ghost_batch or 1
    plan = plan_for(task, min(unit, task.global_batch)).model_copy(update={"budget_bytes": budget})
    model = task.build_model()
    replica = Replica(
        model,
        lambda: task.optimizer(task.parameters_of(model)),
        task.loss,
        plan.choice,
        torch.device("cpu"),
        task.global_batch,
    )
    tried = []

    def rehearse(choice):
        size = choice.micro_batch
        tried.append(size)
        used = FIXED + per_sample * size + bend * size * size
        return Rehearsed(seconds(size), used) if used <= budget else None

    found = Measuring(plan, replica, rehearse, PARAMETERS).plan()
    replica.close()
    return found, tried


@given(
    st.integers(1, 4096),
    st.sampled_from([None, 4, 7]),
    st.integers(1 << 10, 4 << 20),
    st.integers(0, 2000),
    st.integers(4, 512),
)
def test_what_is_planned_was_run_and_leaves_little_room(batch, ghost, per_sample, bend, mebibytes):
    budget = mebibytes << 20
    task = task_of(batch, ghost)
    found, tried = measured(task, budget, per_sample, bend)
    unit = min(ghost or 1, batch)
    room = budget - reserve_of(budget, "cpu")

    def peak(size):
        return FIXED + per_sample * size + bend * size * size + 2 * PARAMETERS + BESIDE

    assert len(tried) <= 8
    if found is None:
        assert peak(unit) > room
        return
    size = found.choice.micro_batch
    assert size in tried
    assert size % unit == 0 or size == batch
    assert found.prediction is not None
    assert found.prediction.peak_bytes == peak(size) <= room
    assert sum(found.prediction.by_kind.values()) == peak(size)
    if not bend:  # all are equally fast: the leanest is as good
        assert size == min(one for one in tried if peak(one) <= room)


def test_the_largest_that_fits_is_found_where_it_is_the_fastest():
    budget = 64 << 20
    found, tried = measured(task_of(4096, None), budget, 100 << 10, seconds=lambda size: 1 / size)
    assert found is not None
    most = (budget - reserve_of(budget, "cpu") - FIXED - 2 * PARAMETERS - BESIDE) // (100 << 10)
    assert 0.85 * most <= found.choice.micro_batch <= most
    assert len(tried) <= 5


def test_a_budget_that_is_not_there_is_no_limit():
    task = task_of(96, None)
    plan = plan_for(task, 32)
    assert plan.budget_bytes is None
    found, _ = measured(task, 1 << 40, 1 << 20, seconds=lambda size: 1 / size)
    assert found is not None
    assert found.choice.micro_batch == 96


class Branching(nn.Module):
    """What a trace on fake tensors cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 256), nn.Linear(256, 1)

    def forward(self, x):
        hidden = self.first(x).relu()
        return self.second(hidden if hidden.detach().numpy().any() else -hidden)


@pytest.fixture
def branching():
    data = TensorDataset(torch.randn(256, WIDTH), torch.randn(256, 1))
    return ab.Task(
        model=Branching,
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params),
        train=data,
        global_batch=128,
        steps=2,
    )


def test_a_model_that_no_trace_can_follow_is_measured(branching):
    before = torch.get_rng_state()
    plan = ab.plan(branching)
    assert torch.equal(torch.get_rng_state(), before)
    assert plan.prediction is not None
    assert "measured" in plan.prediction.method
    assert plan.prediction.step_seconds > 0
    assert any("measured instead" in notice for notice in plan.notices)
    assert ab.Plan.from_json(plan.to_json()) == plan


def test_the_samples_of_a_stream_are_not_spent_on_measuring(branching):
    rows = [(torch.randn(WIDTH), torch.randn(1)) for _ in range(256)]

    class Once(torch.utils.data.IterableDataset):
        def __iter__(self):
            while rows:
                yield rows.pop()

    plan = ab.plan(dataclasses.replace(branching, train=Once()))
    assert len(rows) >= 254  # two were looked at for their shapes
    assert plan.prediction is None
    assert any("Nothing is predicted" in notice for notice in plan.notices)
