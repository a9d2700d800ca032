"""Several optimizers for one loss: the result of the plain loop that steps them all."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
import torch.nn.functional as F
from tests.equivalence.reference import deviation, plan_for
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.compute.multi_optimizer import Several, as_one

KIND = {"dtype": torch.float64}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, **KIND), nn.Tanh(), nn.Linear(8, 3, **KIND))


def both(params):
    """Muon for matrices, AdamW for the rest."""
    params = list(params)
    return [
        torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.02),
        torch.optim.AdamW([p for p in params if p.dim() != 2], lr=0.01),
    ]


def loss(model, batch):
    inputs, labels = batch
    return ab.Loss(F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels))


def data():
    draw = torch.Generator().manual_seed(1)
    return torch.randn(64, 6, generator=draw, **KIND), torch.randint(0, 3, (64,), generator=draw)


def make_task(**changes):
    given = {
        "model": build,
        "loss": loss,
        "optimizer": both,
        "train": TensorDataset(*data()),
        "global_batch": 16,
        "shuffle": False,
        "epochs": 2,
        **changes,
    }
    return ab.Task(**given)


def plainly(schedulers=()):
    model = build()
    optimizers = both(model.parameters())
    schedulers = [make(optimizer) for make, optimizer in zip(schedulers, optimizers, strict=False)]
    inputs, labels = data()
    for start in list(range(0, 64, 16)) * 2:
        batch = slice(start, start + 16)
        model.zero_grad()
        F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
        for one in (*optimizers, *schedulers):
            one.step()
    return model


def trained(task, folder=None, steps=None, **knobs):
    with ab.Session(task, plan_for(task, 4, **knobs), checkpoints=folder) as session:
        for done in session.steps():
            if done.step + 1 == steps:
                session.save()
                break
        return session.model


def test_a_task_may_return_a_list():
    assert deviation(trained(make_task()), plainly()) < 1e-12


def test_what_was_saved_goes_on_as_if_it_had_not_been_interrupted(tmp_path):
    task = make_task()
    trained(task, tmp_path, steps=3)
    assert deviation(trained(task, tmp_path), plainly()) < 1e-12


def test_step_takes_a_list_and_plans_for_it():
    model = build()
    inputs, labels = data()
    with ab.Step(model, both(model.parameters()), loss, memory="64MiB", micro_batch=4) as step:
        for start in list(range(0, 64, 16)) * 2:
            step((inputs[start : start + 16], labels[start : start + 16]))
    assert deviation(model, plainly()) < 1e-12


def test_schedulers_go_on_working_on_the_optimizers_themselves():
    def half(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    model = build()
    inputs, labels = data()
    optimizers = both(model.parameters())
    schedulers = [half(optimizers[0])]
    with ab.Step(model, optimizers, loss, micro_batch=4) as step:
        schedulers.append(half(optimizers[1]))
        for start in list(range(0, 64, 16)) * 2:
            step((inputs[start : start + 16], labels[start : start + 16]))
            for scheduler in schedulers:
                scheduler.step()
    assert deviation(model, plainly([half, half])) < 1e-12


def test_copies_and_saved_states_are_of_all_parts():
    model = build()
    optimizer = Several(both(model.parameters()))
    loss(model, data()).sum.backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    assert len(state["state"]) == 4
    other = build()
    fresh = Several(both(other.parameters()))
    fresh.load_state_dict(state)
    assert [len(part.state) for part in fresh.parts] == [2, 2]
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        for name, value in optimizer.state[mine].items():
            assert torch.equal(torch.as_tensor(fresh.state[theirs][name]), torch.as_tensor(value))
    assert [type(part) for part in pickle.loads(pickle.dumps(optimizer)).parts] == [
        torch.optim.Muon,
        torch.optim.AdamW,
    ]
    assert [type(part) for part in copy.deepcopy(optimizer).parts] == [
        torch.optim.Muon,
        torch.optim.AdamW,
    ]


def test_one_of_one_is_itself_and_a_parameter_belongs_to_one():
    model = build()
    (one, _) = both(model.parameters())
    assert as_one([one]) is one
    with pytest.raises(ab.InputError, match=r"\(8, 6\) is in two optimizers, Muon and SGD"):
        as_one([one, torch.optim.SGD(model.parameters(), lr=0.1)])
    with pytest.raises(ab.InputError, match="for Muon or AdamW: add it to that optimizer itself"):
        Several(both(model.parameters())).add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    lbfgs = torch.optim.LBFGS(model[0].parameters())
    with pytest.raises(ab.InputError, match="LBFGS, which computes the loss itself"):
        ab.Step(model, [lbfgs, torch.optim.SGD(model[2].parameters(), lr=0.1)], loss)


def test_a_plan_is_made_for_the_parts():
    plan = ab.plan(dataclasses.replace(make_task(), valid=None), memory="64MiB")
    assert plan.prediction is not None
