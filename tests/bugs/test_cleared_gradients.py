"""A loss function that clears the gradients was taken for one that does not.

Symptom (0.1): the body of a training loop, given as it was (`optimizer.zero_grad()`, then the loss),
ended with weights that were 2e-2 off and no word of it, wherever a step took more than one pass.
Mechanism: gradients are sums over micro-batches, and each pass cleared those of the passes before it.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.equivalence.reference import plan_for
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.errors import LossError

DRAW = torch.Generator().manual_seed(0)
X, Y = torch.randn(24, 6, generator=DRAW), torch.randn(24, 2, generator=DRAW)


def _of_the_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()


def _in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad(set_to_none=False)


def _of_the_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def _added_to(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    F.mse_loss(model(X[:1]), Y[:1]).backward()


@pytest.mark.parametrize("change", [_of_the_model, _in_place, _of_the_optimizer, _added_to])
def test_a_loss_that_changes_gradients_is_told_so_before_anything_is_committed(change):
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, batch):
        change(model, optimizer)
        return F.mse_loss(model(batch[0]), batch[1])

    before = [param.detach().clone() for param in model.parameters()]
    with (
        ab.Step(model, optimizer, loss, micro_batch=5) as step,
        pytest.raises(LossError, match="changes the gradients"),
    ):
        step((X, Y))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def _clearing(model, batch):
    model.zero_grad()
    return F.mse_loss(model(batch[0]), batch[1])


@pytest.mark.parametrize("micro_batch", [5, 24])
def test_so_it_is_in_a_task_however_it_is_cut(micro_batch):
    task = ab.Task(
        model=lambda: nn.Linear(6, 2),
        loss=_clearing,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=TensorDataset(X, Y),
        global_batch=24,
        steps=3,
    )
    if micro_batch == 24:  # nothing is lost where there is one pass
        assert ab.train(task, plan=plan_for(task, micro_batch), progress=False).ended.finished
        return
    with pytest.raises(LossError, match=r"it clears them \(zero_grad\(\)\)"):
        ab.train(task, plan=plan_for(task, micro_batch), progress=False)


def test_gradients_that_a_loss_asks_autograd_for_are_its_own():
    """A penalty on them is no change of the sums."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, batch):
        inputs = batch[0].clone().requires_grad_()
        outputs = model(inputs)
        (gradient,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return F.mse_loss(outputs, batch[1]) + gradient.square().mean()

    with ab.Step(model, optimizer, loss, micro_batch=5) as step:
        assert step((X, Y)).num_micro_batches == 5
