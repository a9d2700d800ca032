"""A loss that works in place on its batch had it applied twice.

Symptom (0.1): `x.div_(255)` in a loss divided twice where memory ran out and `Step` did the step again,
and in the second pass of a `JointLoss` that was cut; `verify` blamed state that is kept.
Mechanism: pieces are views of one batch, which was as the first attempt had left it.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.errors import LossError

DRAW = torch.Generator().manual_seed(1)
X = torch.randn(24, 6, generator=DRAW, dtype=torch.float64) * 255
Y = torch.randint(0, 3, (24,), generator=DRAW)


def _build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16, dtype=torch.float64), nn.Tanh(), nn.Linear(16, 3, dtype=torch.float64)
    )


def _loss(model, batch):
    x, y = batch
    if isinstance(x, np.ndarray):
        x /= 255
        x = torch.as_tensor(x)
    else:
        x.div_(255)
    y.add_(1).remainder_(3)
    return ab.Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))


def _fresh(kind=torch.as_tensor):
    return kind(X.clone()), Y.clone()


def _plainly(loss, num_steps):
    model = _build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(num_steps):
        optimizer.zero_grad()
        returned = loss(model, _fresh())
        (returned.sum / returned.weight).backward()
        optimizer.step()
    return model


def _assert_equal(found, want):
    for a, b in zip(found.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("fails_in", [1, 2, 4])
@pytest.mark.parametrize("kind", [torch.as_tensor, lambda x: x.numpy()])
def test_a_step_that_is_done_again_applies_it_once(fails_in, kind):
    model = _build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    calls = 0

    def loss(model, batch):
        nonlocal calls
        returned = _loss(model, batch)
        if type(returned.sum) is torch.Tensor:
            calls += 1
            if calls == fails_in:
                raise torch.OutOfMemoryError("made up")
        return returned

    with ab.Step(model, optimizer, loss, micro_batch=12) as step:
        step(_fresh(kind))
        step(_fresh(kind))
    assert calls > 4
    _assert_equal(model, _plainly(_loss, 2))


def test_a_batch_is_written_to_as_in_a_plain_loop_and_not_at_all_by_a_step_that_fails():
    model = _build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    fails = False

    def loss(model, batch):
        returned = _loss(model, batch)
        return None if fails else returned

    with ab.Step(model, optimizer, loss, micro_batch=7) as step:
        batch = _fresh()
        step(batch)
        torch.testing.assert_close(batch[0], X / 255)
        batch, fails = _fresh(), True
        with pytest.raises(LossError):
            step(batch)
    torch.testing.assert_close(batch, (X, Y), rtol=0, atol=0)


def _encode(model, batch):
    x, y = batch
    x.div_(255)
    return model(x), y


def _compare(model, encoded):
    z, y = encoded
    likeness = z @ z.T + y
    targets = torch.arange(len(z))
    return ab.Loss(F.cross_entropy(likeness, targets, reduction="sum"), len(z))


@pytest.mark.parametrize("by_task", [False, True])
def test_the_second_pass_of_a_joint_loss_finds_the_batch_as_it_was(by_task):
    joint = ab.JointLoss(_encode, _compare)
    want = _plainly(lambda model, batch: _compare(model, _encode(model, batch)), 3)
    model = _build()
    if by_task:
        task = ab.Task(
            model=model,
            loss=joint,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.3),
            train=TensorDataset(*_fresh()),
            global_batch=24,
            shuffle=False,
            steps=3,
        )
        model = ab.train(task, micro_batch=7, progress=False).model
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        with ab.Step(model, optimizer, joint, micro_batch=7) as step:
            for _ in range(3):
                step(_fresh())
    _assert_equal(model, want)


def test_verify_finds_it_exact():
    task = ab.Task(
        model=copy.deepcopy(_build()),
        loss=_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.3),
        train=TensorDataset(*_fresh()),
        global_batch=24,
        steps=3,
    )
    verdict = ab.verify(task, ab.plan(task, micro_batch=8))
    assert verdict.exact, verdict.causes


@pytest.mark.parametrize("kind", [torch.as_tensor, np.asarray])
def test_a_batch_of_one_sample_is_not_the_data_set_itself(kind):
    """A collate function that stacks several samples, and gives views of a single one."""
    x, y = kind(X.clone()), Y.clone()

    def collate(samples):
        if len(samples) == 1:
            return samples[0][0][None], samples[0][1][None]
        stack = torch.stack if kind is torch.as_tensor else np.stack
        return stack([one for one, _ in samples]), torch.stack([one for _, one in samples])

    task = ab.Task(
        model=_build,
        loss=_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.3),
        train=[(x[i], y[i]) for i in range(24)],
        collate=collate,
        global_batch=24,
        shuffle=False,
        steps=3,
    )
    result = ab.train(task, micro_batch=1, progress=False)
    np.testing.assert_array_equal(x, X)
    _assert_equal(result.model, _plainly(_loss, 3))


@pytest.mark.parametrize("micro_batch", [None, 5])
def test_an_expanded_tensor_of_a_batch_is_copied_and_put_back(micro_batch):
    """torch cannot copy into the whole of one, since its elements share memory."""

    def loss(model, batch):
        x, y, scale, none = batch
        assert none.numel() == 0
        return _loss(model, (x * scale, y))

    found = _build()
    optimizer = torch.optim.SGD(found.parameters(), lr=0.3)
    with ab.Step(found, optimizer, loss, micro_batch=micro_batch, verbose=False) as step:
        for _ in range(2):
            scale = torch.tensor([[1 / 255]], dtype=torch.float64).expand(24, 6)
            step((X * 255, Y.clone(), scale, torch.ones(1, 0).expand(24, 0)))
    _assert_equal(found, _plainly(_loss, 2))
