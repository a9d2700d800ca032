"""Metrics of several ranks are added up by name, whatever order each rank gives them in."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests.equivalence.reference import plan_for
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.errors import LossError
from anybatch.parallel import vote


def loss(names, model, batch):
    """With metrics of these names in this order; each has its own value in every sample."""
    x, y = batch
    metrics = {name: float(ord(name)) * len(y) for name in names}
    return ab.Loss(F.mse_loss(model(x), y, reduction="sum"), len(y), metrics)


def task_of(names, **changes):
    """Three steps of 8 samples."""
    draw = torch.Generator().manual_seed(0)
    samples = torch.randn(24, 3, generator=draw), torch.randn(24, 1, generator=draw)
    task = ab.Task(
        model=partial(nn.Linear, 3, 1),
        loss=partial(loss, names),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        train=TensorDataset(*samples),
        global_batch=8,
        steps=3,
    )
    return dataclasses.replace(task, **changes)


def trained(rank, size, names_of_ranks, shares=(1.0, 1.0), changes=None):
    """The metrics of each step, as this rank reads them, and how often ranks spoke of rare things."""
    num_spoken, speak = [0], vote.gather_objects

    def counted(*args, **options):
        num_spoken[0] += 1
        return speak(*args, **options)

    task = task_of(names_of_ranks[rank], **(changes or {}))
    found = []
    with ab.Session(task, plan_for(task, 2, parallel="replicate", shares=shares)) as session:
        steps = session.steps()
        vote.gather_objects = counted
        try:
            found.extend(list(step.metrics.items()) for step in steps)
        finally:
            vote.gather_objects = speak
    return found, num_spoken[0]


A, B, C = (("a", 97.0), ("b", 98.0), ("c", 99.0))


@pytest.mark.parametrize("changes", [{}, {"reproducible": ab.Grains(samples=2, parts=2)}])
def test_every_rank_may_have_an_order_of_its_own(crew, changes):
    ranks = crew(2, trained, ("abc", "cab"), (1.0, 1.0), changes)
    assert [found for found, _ in ranks] == [[[A, B, C]] * 3, [[C, A, B]] * 3]


def test_ranks_that_have_the_same_metrics_do_not_speak_of_them(crew):
    silent = crew(2, trained, ("", ""))
    telling = crew(2, trained, ("ab", "ba"))
    assert [num for _, num in telling] == [num for _, num in silent]


def test_a_rank_without_samples_hears_of_them_once(crew):
    silent = crew(3, trained, ("", "", ""), (0.0, 1.0, 1.0))
    ranks = crew(3, trained, ("cb", "cb", "bc"), (0.0, 1.0, 1.0))
    assert [found for found, _ in ranks] == [[[C, B]] * 3] * 3
    assert [num for _, num in ranks] == [num + 1 for _, num in silent]


def changing(rank, size):
    """As `trained`; each step has another metric, and rank 0 no samples."""
    step = 0

    def by_step(model, batch):
        return loss("abc"[step], model, batch)

    task, found = task_of("", loss=by_step), []
    with ab.Session(task, plan_for(task, 8, parallel="replicate", shares=(0.0, 1.0))) as session:
        for done in session.steps():
            found.append(list(done.metrics.items()))
            step += 1
    return found


def test_it_hears_of_others_when_they_change(crew):
    assert crew(2, changing) == [[[A], [B], [C]]] * 2


def error_of(rank, size, names_of_ranks, shares):
    """What ends the run."""
    with pytest.raises(LossError) as caught:
        trained(rank, size, names_of_ranks, shares)
    return str(caught.value)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (
            ("ab", "ca"),
            "the metrics ['a', 'b'] of rank 0 are not the metrics ['a', 'c'] of rank 1:",
        ),
        (("ba", "a"), "the metrics ['a', 'b'] of rank 0 are not the metrics ['a'] of rank 1:"),
        (("", "a", "b"), "the metrics ['a'] of rank 1 are not the metrics ['b'] of rank 2:"),
    ],
)
def test_ranks_with_other_metrics_are_told_apart(crew, names, told):
    shares = tuple(float(bool(one)) for one in names)
    for error in crew(len(names), error_of, names, shares):
        assert error.startswith(told)
        assert "same names on every rank, with (0, 0) for what has nothing to count there" in error


def evaluated(rank, size, names_of_ranks):
    """The metrics of an evaluation."""

    def sums(model, batch):
        return {name: float(ord(name)) * len(batch[1]) for name in names_of_ranks[rank]}

    task = task_of("")
    task = dataclasses.replace(task, valid=task.train, metrics=sums)
    plan = plan_for(task, 4, parallel="replicate", shares=(1.0,) * size)
    with ab.Session(task, plan) as session:
        try:
            return list(session.evaluate().metrics.items())
        except LossError as error:
            return str(error)


def test_so_are_those_of_evaluations(crew):
    assert crew(2, evaluated, ("ab", "ba")) == [[A, B], [B, A]]
    for told in crew(2, evaluated, ("ab", "bc")):
        assert "the metrics ['a', 'b'] of rank 0 are not the metrics ['b', 'c'] of rank 1" in told
