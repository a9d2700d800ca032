"""What a run had put on the model and the process stayed there if its set-up or its end was cut short.

Symptom: after an error in the set-up of a session or in the first call of a `Step` the model was in
half precision, its BatchNorm layers were patched and the generators seeded. After a second Ctrl-C,
while a session closed, the process was still held to the budget, and torch to one thread.

Mechanism: only a part of what had been set up was undone when the rest failed, and parts were closed
one after the other, so that what one raised kept the others open.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.equivalence.reference import plan_for
from torch import nn
from torch.nn.functional import cross_entropy

import anybatch as ab
from anybatch.compute import Replica, precision
from anybatch.data import Loader
from anybatch.engine.limit import CpuLimit
from anybatch.errors import InputError

X, Y = torch.ones(9, 4), torch.zeros(9, dtype=torch.long)


def model_of():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def task_of(model, **options):
    data = torch.utils.data.TensorDataset(X, Y)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    options |= {"optimizer": optimizer, "train": data, "global_batch": 4}
    return ab.Task(model=model, loss=loss, **options)


def assert_as_it_came(model):
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert "forward" not in vars(model[1])
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


def test_a_session_whose_set_up_fails():
    model = model_of()
    task = task_of(model, ghost_batch=4, epochs=1)
    before = torch.get_rng_state()
    session = ab.Session(task, plan_for(task, 4, precision="bf16-weights"))
    with pytest.raises(InputError, match="step 3 has 1 sample"):
        session.__enter__()
    assert_as_it_came(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_step_whose_set_up_fails_can_be_set_up_again(monkeypatch):
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    trained = list(optimizer.param_groups[0]["params"])

    def refuse(replica):
        raise InputError("not here")

    with ab.Step(model, optimizer, loss, precision="bf16-weights") as step:
        with monkeypatch.context() as patch:
            patch.setattr(Replica, "rehearse", refuse)
            with pytest.raises(InputError, match="not here"):
                step((X, Y))
        assert_as_it_came(model)
        assert [*map(id, optimizer.param_groups[0]["params"])] == [*map(id, trained)]
        step((X, Y))
        assert model[0].weight.dtype is torch.bfloat16
    assert_as_it_came(model)


def test_a_session_that_is_interrupted_while_it_closes(monkeypatch):
    model = model_of()
    task = task_of(model, epochs=1, reproducible=True, last="drop")
    plan = ab.plan(task, memory="1GiB")
    threads = torch.get_num_threads()
    close = Loader.close

    def interrupted(loader):
        close(loader)
        raise KeyboardInterrupt

    monkeypatch.setattr(Loader, "close", interrupted)
    torch.set_num_threads(2)
    try:
        session = ab.Session(task, plan)
        session.__enter__()
        next(session.steps())
        assert torch.get_num_threads() == 1
        with pytest.raises(KeyboardInterrupt):
            session.__exit__(None, None, None)
        assert torch.get_num_threads() == 2
        assert_as_it_came(model)
    finally:
        torch.set_num_threads(threads)


def test_a_step_that_is_interrupted_while_it_closes(monkeypatch):
    model = model_of()
    leave = CpuLimit.leave

    def interrupted(limit):
        leave(limit)
        raise KeyboardInterrupt

    monkeypatch.setattr(CpuLimit, "leave", interrupted)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ab.Step(model, optimizer, loss, memory="1GiB", precision="bf16-weights")
    step((X, Y))
    with pytest.raises(KeyboardInterrupt):
        step.close()
    assert_as_it_came(model)


def test_a_model_for_whose_masters_there_is_no_memory(monkeypatch):
    model = model_of()
    pour_into, calls = precision._pour_into, []

    def scarce(master):
        calls.append(master)
        if len(calls) == 3:
            raise MemoryError
        return pour_into(master)

    monkeypatch.setattr(precision, "_pour_into", scarce)
    with pytest.raises(MemoryError):
        precision.Numerics(model, "bf16-weights", torch.device("cpu"), 4)
    assert_as_it_came(model)
