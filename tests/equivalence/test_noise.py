"""The two gradients of a step whose squares tell how noisy they are: as by hand, and for nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.equivalence.noise import by_hand, same, standing
from tests.equivalence.reference import plan_for, samples_of, train
from tests.equivalence.worlds import World, task_of
from torch.utils.data import default_collate

import anybatch as ab
from anybatch.data import steps_of as steps_of_task
from anybatch.engine import passes
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
    monkeypatch.setattr(passes, "ALL_MEASURED", 2)
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


def test_the_longest_samples_of_a_step_are_no_part_like_the_others():
    task = task_of(World(data="ragged", lengths=True, loss="counted"))
    assert all(done.part_weight is None for done in steps_of(task, 2))


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
