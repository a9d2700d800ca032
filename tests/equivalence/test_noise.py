"""The two gradients of a step whose squares tell how noisy they are: as by hand, and for nothing."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import pytest
import torch
from tests.equivalence.noise import by_hand, same, standing
from tests.equivalence.reference import plan_for, samples_of, train
from tests.equivalence.worlds import World, task_of
from torch import nn
from torch.utils.data import TensorDataset, default_collate

import anybatch as ab
from anybatch.data import schedule
from anybatch.data import steps_of as steps_of_task
from anybatch.insight.noise import scale_of
from anybatch.insight.noise_series import Series
from anybatch.parallel import SingleDevice


def steps_of(task, micro_batch, count=4, **knobs):
    with ab.Session(task, plan_for(task, micro_batch, **knobs)) as session:
        steps = session.steps()
        return [next(steps) for _ in range(count)]


@pytest.mark.parametrize("micro_batch", [1, 5, 15])
@pytest.mark.parametrize("loss", ["mean", "counted", "counted on device", "weighted"])
def test_the_first_micro_batch_and_the_whole_step_are_measured(loss, micro_batch):
    task = standing(
        task_of(World(loss=loss, sometimes=True, tied=True, clip_norm=0.01, last="wrap"))
    )
    for number, done in enumerate(steps_of(task, micro_batch)):
        assert same(done, by_hand(task, number, micro_batch), rel=1e-9)


@pytest.mark.parametrize(
    ("precision", "rel"),
    [("fp16", 2e-2), ("bf16", 5e-2), ("bf16-weights", 5e-2), ("fp16-weights", 2e-2)],
)
def test_in_half_precision_no_scale_is_left_in_it(precision, rel):
    task = standing(task_of(World(loss="weighted", dtype=torch.float32)))
    for number, done in enumerate(steps_of(task, 4, precision=precision)):
        assert same(done, by_hand(task, number, 4), rel=rel)


def test_a_reproducible_run_measures_its_first_grain():
    grains = ab.Grains(samples=4, parts=2)
    task = standing(dataclasses.replace(task_of(World(loss="weighted")), reproducible=grains))
    for number, done in enumerate(steps_of(task, 4)):
        assert same(done, by_hand(task, number, 4), rel=1e-9)


def test_later_on_one_step_in_four_is_measured(monkeypatch):
    monkeypatch.setattr(schedule, "ALL_MEASURED", 2)
    task = standing(task_of(World(loss="weighted", last="wrap")))
    done = steps_of(task, 4, count=10)
    assert [one.step for one in done if one.part_weight is not None] == [1, 2, 5, 9]
    assert same(done[8], by_hand(task, 8, 4), rel=1e-9)


def test_a_script_of_ones_own_is_told_too():
    task = task_of(World(loss="weighted"))
    model = task.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ab.Step(model, optimizer, task.loss, micro_batch=4) as step:
        indices = samples_of(task, steps_of_task(task), 0)
        outcome = step(default_collate([task.train[i] for i in indices]))
    assert same(outcome, by_hand(task, 0, 4), rel=1e-9)


def test_a_step_of_one_micro_batch_has_no_part():
    task = task_of(World())
    for done in steps_of(task, 16):
        assert done.part_weight is None
        assert done.part_grad_norm is None


RAGGED = World(data="ragged", lengths=True, loss="counted", num_samples=90, global_batch=40)


@pytest.mark.parametrize("micro_batch", [1, 2, 16])
def test_of_samples_in_order_of_length_a_few_are_measured_as_they_were_drawn(micro_batch):
    task = standing(task_of(RAGGED))
    wanted = [by_hand(task, number, 3) for number in (0, 1)]  # one of 16 of 40
    for done, found in zip(steps_of(task, micro_batch, count=2), wanted, strict=True):
        assert same(done, found, rel=1e-9)


def test_with_lengths_a_batch_in_tokens_is_measured_too():
    task = standing(dataclasses.replace(task_of(RAGGED), global_batch=ab.Tokens(120)))
    steps = steps_of_task(task)
    for number, done in enumerate(steps_of(task, 2, count=2)):
        few = -(-steps.num_samples_of(number) // 16)
        assert same(done, by_hand(task, number, few), rel=1e-9)


@pytest.mark.slow
def test_the_noise_scale_of_unequal_samples_is_that_of_their_gradients_one_by_one():
    task = standing(task_of(dataclasses.replace(RAGGED, loss="pair", steps=200)))
    with ab.Session(task, plan_for(task, 2)) as session:
        series = Series()
        for done in session.steps():
            series(done)
    found = scale_of(series.blocks)
    model = task.build_model()
    each = []
    for sample in task.train:
        model.zero_grad()
        total, weight = task.loss(model, task.collate([sample]))
        total.backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        each.append((float(weight), torch.cat(gradients)))
    weights = torch.tensor([weight for weight, _ in each], dtype=torch.float64)
    sums = torch.stack([gradient for _, gradient in each])
    mean = sums.sum(0) / weights.sum()
    # Of means by weight (Cochran 1977, "Sampling Techniques", 6.3), drawn without putting back.
    noise = (sums - weights[:, None] * mean).square().sum() / (len(each) - 1) / weights.mean() ** 2
    wanted = float(noise / (mean.square().sum() - noise / len(each)))
    assert found.low < wanted < (found.high or math.inf)
    assert found.samples == pytest.approx(wanted, rel=0.3)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).double()

    def forward(self, x):
        return self.layers(x)[:, 0]


def test_of_whole_ghost_batches_of_unequal_samples_the_first_is_measured():
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(90, 3, generator=draw, dtype=torch.float64)
    task = ab.Task(
        model=Normed,
        loss=lambda model, batch: ((model(batch[0]) - batch[1]).square().sum(), len(batch[0])),
        optimizer=partial(torch.optim.SGD, lr=0.0),
        train=TensorDataset(inputs, inputs.sum(1).sin()),
        lengths=[1 + 7 * i % 10 for i in range(90)],
        global_batch=40,
        ghost_batch=4,
        steps=2,
    )
    for number, done in enumerate(steps_of(task, 8, count=2)):
        *_, weight, norm = by_hand(task, number, 4)  # one in 16 is three, which are no ghost batch
        assert (done.part_weight, done.part_grad_norm) == pytest.approx((weight, norm), rel=1e-9)


def test_a_step_of_unequal_samples_in_one_micro_batch_has_no_part():
    assert all(done.part_weight is None for done in steps_of(task_of(RAGGED), 40, count=2))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16-weights"])
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_training_is_the_same_to_the_bit_without_it(monkeypatch, precision, clip_norm):
    world = World(loss="weighted", optimizer="adamw", dtype=torch.float32, clip_norm=clip_norm)
    task = task_of(world)
    measured = train(task, 4, precision=precision)
    monkeypatch.setattr(SingleDevice, "sum_norm", lambda *_: None)
    plain = train(task, 4, precision=precision)
    assert measured.losses == plain.losses
    assert measured.norms == plain.norms
    for name, value in measured.model.state_dict().items():
        assert torch.equal(value, plain.model.state_dict()[name])
