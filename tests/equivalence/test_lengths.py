"""Samples of unequal length: the plain loop's result, and no pass that is too large."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from tests.equivalence.reference import (
    assert_equal,
    plan_for,
    samples_of,
    train,
    train_plainly,
)
from tests.equivalence.worlds import World, loss_of, task_of
from torch import nn

import anybatch as ab
from anybatch.data import steps_of
from anybatch.events import StepDone

RAGGED = World(data="ragged", lengths=True, loss="pair", optimizer="adamw", clip_norm=0.1)


def long_and_short(world: World = RAGGED, **changes) -> ab.Task:
    """`world` with one sample 20 times longer than most."""
    task = task_of(world)
    (tokens, targets, weight, flag), rest = task.train[0], task.train[1:]
    first = (tokens.repeat(60)[:60], targets.repeat(60)[:60], weight, flag)
    samples = [first, *rest]
    lengths = [len(sample[0]) for sample in samples]
    return dataclasses.replace(task, train=samples, lengths=lengths, **changes)


class Watched:
    """A loss that notes the shapes it was given."""

    def __init__(self, kind: str = "pair") -> None:
        self.shapes: list[tuple[int, int]] = []
        self.kind = kind

    def __call__(self, model, batch):
        self.shapes.append(tuple(batch[0].shape))
        return loss_of(self.kind, model, batch)


@pytest.mark.parametrize("last", ["keep", "wrap"])
@pytest.mark.parametrize("micro_batch", [1, 2, 16])
def test_one_long_sample_among_many_short_ones(micro_batch, last):
    watched = Watched()
    task = long_and_short(dataclasses.replace(RAGGED, last=last), loss=watched)
    ours = train(task, micro_batch)
    shapes = watched.shapes.copy()
    assert_equal(ours, train_plainly(task), tolerance=1e-6)
    assert max(rows * width for rows, width in shapes) <= 60 * micro_batch
    if micro_batch == 1 and last == "keep":
        assert (1, 60) in shapes  # alone, and the others together
        assert len(shapes) < 60  # of 247 samples, which one by one would be as many passes


def test_bad_samples_are_left_out_of_an_ordered_batch():
    task = long_and_short()
    broken = {3, 11, 30}

    class Broken(list):
        def __getitem__(self, index):
            if index in broken:
                raise OSError("no such file")
            return super().__getitem__(index)

    data = Broken(task.train)
    ours = train(dataclasses.replace(task, train=data, bad_data="skip"), 1)
    weightless = list(task.train)
    for index in broken:
        tokens, targets, weight, flag = weightless[index]
        weightless[index] = (tokens, torch.full_like(targets, -100), weight, flag)
    plain = train_plainly(dataclasses.replace(task, train=weightless))
    assert_equal(ours, plain, tolerance=1e-6)


def test_workers_load_the_same_passes():
    task = long_and_short()
    alone = train(task, 1)
    loaded = train(dataclasses.replace(task, num_workers=2), 1)
    for one, other in zip(alone.model.parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_evaluation_is_cut_by_padded_size_too():
    watched = Watched("counted")
    task = long_and_short(loss=watched)
    task = dataclasses.replace(
        task, valid=task.train, lengths=lambda data: [len(sample[0]) for sample in data]
    )
    results = []
    for size in (1, 3):
        events = []
        plan = plan_for(task, 2, evaluation_batch=size)
        with ab.Session(task, plan, [events.append]) as session:
            watched.shapes.clear()
            results.append(session.evaluate())
        assert max(rows * width for rows, width in watched.shapes) <= 60 * size
        assert len(watched.shapes) < 20
    assert results[0].samples == results[1].samples == len(task.valid)
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-12)


class Speech(nn.Module):
    """BatchNorm over all positions of a ghost batch, each padded to its own longest."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 1)

    def forward(self, x):
        hidden = self.first(x)
        hidden = self.norm(hidden.flatten(0, 1)).view_as(hidden)
        return self.last(F.relu(hidden)).mean(dim=(1, 2))


def pad_to_ten(samples):
    inputs, targets = zip(*samples, strict=True)
    padded = [F.pad(x, (0, 0, 0, 10 - len(x))) for x in inputs]
    return torch.stack(padded), torch.stack(targets)


def test_ghost_batches_are_those_of_the_epoch_and_are_never_cut():
    draw = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(1 + 7 * i % 10, 3, generator=draw).double(), torch.tensor(float(i)).double())
        for i in range(50)
    ]
    task = ab.Task(
        model=lambda: Speech().double(),
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
        train=data,
        collate=pad_to_ten,
        global_batch=17,
        ghost_batch=4,
        epochs=2,
    )
    lengths = [len(x) for x, _ in data]
    plain = train_plainly(task)
    for size in (4, 8):
        ours = train(dataclasses.replace(task, lengths=lengths), size)
        assert_equal(ours, plain, tolerance=1e-6)


def test_steps_are_told_with_all_their_samples():
    events = []
    task = long_and_short()
    with ab.Session(task, plan_for(task, 1), [events.append]) as session:
        list(session.steps())
    done = [event for event in events if isinstance(event, StepDone)]
    assert [event.samples for event in done[:3]] == [16, 16, 5]


def sharded(rank, size):
    task = long_and_short(dataclasses.replace(RAGGED, steps=8))
    plan = plan_for(task, 1, parallel="shard", shares=(1.0,) * size)
    with ab.Session(task, plan) as session:
        return [step.loss for step in session.steps()]


def test_ranks_that_meet_in_every_pass_run_as_many(crew):
    plain = train_plainly(long_and_short(dataclasses.replace(RAGGED, steps=8)))
    for losses in crew(2, sharded):
        assert losses == pytest.approx(plain.losses, rel=1e-6)


def test_a_rehearsal_begins_with_the_longest_samples(capsys):
    """Not with those by which the noise of gradients is measured, which stand before them."""

    def loss(model, batch):
        print(tuple(batch[0].shape))  # what a loss keeps is put back after a rehearsal
        return loss_of("counted", model, batch)

    task = long_and_short(dataclasses.replace(RAGGED, global_batch=36), loss=loss)
    first = samples_of(task, steps_of(task), 0)
    assert 0 in first[3:]  # the long one, and not among the first of 16 each
    with ab.Session(task, plan_for(task, 1)) as session:
        capsys.readouterr()
        session.rehearsed(is_fixed=True)
        assert capsys.readouterr().out.startswith("(1, 60)\n")
