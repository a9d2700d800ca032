"""Evaluation: exact for any number of samples and any batch, and without a trace in the model."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from tests.equivalence.reference import plan_for
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import anybatch as ab
from anybatch.errors import InputError

KIND = {"dtype": torch.float64}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(4, 8, **KIND), nn.BatchNorm1d(8, **KIND), nn.Tanh(), nn.Dropout(0.5)
        )
        self.head = nn.Linear(8, 3, **KIND)
        self.body[1].running_mean.normal_(generator=torch.Generator().manual_seed(0))

    def forward(self, x):
        return self.head(self.body(x))


def samples(count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=draw, **KIND)
    y = torch.randint(0, 3, (count,), generator=draw)
    y[1::3] = -100
    return TensorDataset(x, y)


def loss(model, batch):
    x, y = batch
    logits = model(x)
    counted = (y != -100).sum()
    right = (logits.argmax(1) == y).sum()
    return ab.Loss(
        F.cross_entropy(logits, y, reduction="sum"),
        counted,
        metrics={"accuracy": right, "size": (x.abs().sum(), x.numel())},
    )


def largest(model, batch):
    return {"largest": (model(batch[0]).amax(1).sum(), len(batch[0])), "plain": 2.0 * len(batch[0])}


def task_of(valid, **more):
    return ab.Task(
        model=Net,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=samples(20),
        valid=valid,
        global_batch=8,
        ghost_batch=4,
        metrics=largest,
        **({"steps": 2} | more),
    )


@pytest.mark.parametrize("length", [1, 7, 1000])
@pytest.mark.parametrize("batch", [1, 3, 7, 64, 5000])
def test_means_are_exact_for_any_length_and_batch(length, batch):
    if length == 1000 and batch == 1:
        batch = 2
    valid = samples(length, seed=1)
    task = task_of(valid)
    with ab.Session(task, plan_for(task, 4, evaluation_batch=batch)) as session:
        list(session.steps())
        found = session.evaluate()
        model = session.model
    x, y = valid.tensors
    with torch.no_grad():
        logits = model.eval()(x)
    counted = int((y != -100).sum())
    assert found.samples == length
    assert found.loss == pytest.approx(
        float(F.cross_entropy(logits, y, reduction="sum")) / counted, rel=1e-12
    )
    assert found.metrics == pytest.approx(
        {
            "accuracy": int((logits.argmax(1) == y).sum()) / counted,
            "size": float(x.abs().mean()),
            "largest": float(logits.amax(1).mean()),
            "plain": 2.0 * length / counted,
        },
        rel=1e-12,
    )


def test_a_stream_is_evaluated_exactly_too():
    rows = list(samples(23, seed=1))

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(rows)

    results = []
    for valid in (Stream(), samples(23, seed=1)):
        task = task_of(valid)
        with ab.Session(task, plan_for(task, 4, evaluation_batch=5)) as session:
            results.append(session.evaluate())
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-12)
    assert results[0].metrics == pytest.approx(results[1].metrics, rel=1e-12)
    assert results[0].samples == results[1].samples == 23


def test_the_model_computes_as_in_evaluation_and_is_left_as_it_was():
    modes = []

    def watching(model, batch):
        if not torch.is_grad_enabled():
            modes.append({module.training for module in model.modules()})
        return loss(model, batch)

    task = dataclasses.replace(task_of(samples(7)), loss=watching)
    with ab.Session(task, plan_for(task, 4)) as session:
        session.model.body[1].eval()  # frozen by the user
        before = {n: v.clone() for n, v in session.model.state_dict().items()}
        session.evaluate()
        assert modes == [{False}, {False}]
        assert session.model.training
        assert session.model.body[3].training
        assert not session.model.body[1].training
        assert all(torch.equal(before[n], v) for n, v in session.model.state_dict().items())
        assert all(p.grad is None for p in session.model.parameters())


def test_a_part_that_the_task_freezes_stays_frozen():
    def frozen():
        model = Net()
        model.body[1].eval()
        return model

    task = dataclasses.replace(task_of(samples(7)), model=frozen)
    with ab.Session(task, plan_for(task, 4)) as session:
        before = session.model.body[1].running_mean.clone()
        list(session.steps())
        session.evaluate()
        assert session.model.training
        assert not session.model.body[1].training
        assert torch.equal(session.model.body[1].running_mean, before)


def test_a_model_given_in_evaluation_mode_is_trained_in_training_mode():
    task = dataclasses.replace(task_of(samples(7)), model=Net().eval())
    with ab.Session(task, plan_for(task, 4)) as session:
        assert all(module.training for module in session.model.modules())


def test_an_error_in_evaluation_says_that_the_model_is_in_that_mode():
    def fails(model, batch):
        return loss(model, batch) if model.training else loss(None, batch)

    task = dataclasses.replace(task_of(samples(7)), loss=fails)
    with ab.Session(task, plan_for(task, 4)) as session, pytest.raises(TypeError) as caught:
        session.evaluate()
    assert "the model is in evaluation mode" in caught.value.__notes__[0]


def test_evaluation_between_steps_changes_no_step():
    models = []
    for every in (1, 100):
        task = task_of(samples(7), steps=6, evaluate_every=every)
        with ab.Session(task, plan_for(task, 4)) as session:
            list(session.steps())
        models.append(session.model)
    a, b = (m.state_dict() for m in models)
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_a_task_without_held_out_data():
    task = dataclasses.replace(task_of(None), metrics=None)
    with (
        ab.Session(task, plan_for(task, 4)) as session,
        pytest.raises(InputError, match="has no held-out data"),
    ):
        session.evaluate()
