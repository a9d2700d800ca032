"""Ranks that would be idle share ghost batches, by the planner's own choice: the result is the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.equivalence.reference import plan_for, train_plainly
from tests.multiprocess.relaxed import deviation
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.errors import LossError
from anybatch.estimate.calibration import nominal
from anybatch.parallel.whole import full_state_dict
from anybatch.planner import setting


def images() -> ab.Task:
    """One ghost batch per step, and one of 9 samples at the end of an epoch."""
    draw = torch.Generator().manual_seed(0)

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 24, 3, padding=1),
            nn.BatchNorm2d(24),
            nn.ReLU(inplace=True),
            nn.Conv2d(24, 24, 3, padding=1, bias=False),
            nn.BatchNorm2d(24),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(24, 5),
        ).double()

    return ab.Task(
        model=build,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        train=TensorDataset(
            torch.randn(33, 3, 16, 16, generator=draw, dtype=torch.float64) + 1,
            torch.randint(5, (33,), generator=draw),
        ),
        global_batch=24,
        ghost_batch=24,
        clip_norm=0.5,
        steps=6,
    )


def doubles(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach().double() for name, t in model.state_dict().items()}


def as_planned(rank, size, knobs):
    with pytest.MonkeyPatch.context() as patch:  # the same choice on every machine
        patch.setattr(setting, "speeds_of", nominal)
        patch.setattr("anybatch.runs.planning.measured_link", lambda device: None)
        plan = ab.plan(images(), **knobs)
    with ab.Session(images(), plan) as session:
        losses = [step.loss for step in session.steps()]
    return plan, doubles(session.model), losses


@pytest.mark.parametrize("size", [2, 3])
def test_idle_ranks_take_part_and_the_result_is_that_of_one_piece(crew, size):
    ranks = crew(size, as_planned, {})
    plain = train_plainly(images())
    for plan, state, losses in ranks:
        assert plan.norms == "synchronised"
        assert plan.notices[-1].startswith("A global batch of 24 is 1 ghost batch of BatchNorm")
        assert deviation(state, doubles(plain.model)) < 1e-6
        assert losses == pytest.approx(plain.losses, rel=1e-6)


def test_it_can_be_declined(crew):
    ranks = crew(2, as_planned, {"norms": "ghosts"})
    plain = train_plainly(images())
    for plan, state, _ in ranks:
        assert plan.norms == "ghosts"
        assert deviation(state, doubles(plain.model)) < 1e-6


def idle(rank, size):
    task = images()
    plan = plan_for(task, 24, parallel="shard", shares=(0.0, 1.0))
    with ab.Session(task, plan) as session:
        losses = [done.loss for done in session.steps()]
        return losses, full_state_dict(session.model)


def test_a_rank_without_samples_meets_the_others_in_the_passes_of_a_divided_model(crew):
    """It runs some for their sake, as many as a norm needs."""
    plain = train_plainly(images())
    (losses, state), (told, _) = crew(2, idle)
    assert losses == told == pytest.approx(plain.losses, rel=1e-9)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-7, atol=1e-9)


def with_a_sum(rank, size):
    mean = images().loss
    task = replace(images(), loss=lambda model, batch: mean(model, batch) * len(batch[0]))
    plan = ab.plan(task, norms="synchronised")
    with ab.Session(task, plan) as session, pytest.raises(LossError) as told:
        next(session.steps())
    return plan.norms, str(told.value)


def test_a_sum_that_is_returned_as_a_mean_is_refused_on_every_rank(crew):
    for norms, told in crew(2, with_a_sum):
        assert norms == "synchronised"
        assert "the loss is a sum over the samples" in told
