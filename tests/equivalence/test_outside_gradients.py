"""Gradients of what a loss uses beside the model and the optimizer are those of a plain loop."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.compute import outside_gradients
from anybatch.errors import LossError

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


class Rig:
    """A generator, its optimizer, and a loss with a discriminator, a temperature and failures."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3).to(dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.judge = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)
        self.temperature = nn.Parameter(torch.tensor(0.5, dtype=dtype))
        self.unused = nn.Parameter(torch.ones(2, dtype=dtype))
        self.batch = X.to(dtype)
        self.failing: list[Exception] = []
        self.factor = 1.0
        self.weighs = False  # whether `unused` takes part

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        if self.failing and len(self.failing) == 1:
            raise self.failing.pop()
        if self.failing:
            self.failing.pop()
        values = self.judge(model(batch)) * self.temperature.exp()
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        return self.factor * F.softplus(values).sum(), len(batch)

    def leaves(self) -> list[nn.Parameter]:
        return [*self.judge.parameters(), self.temperature, self.unused]

    def gradients(self) -> list[Tensor | None]:
        return [None if p.grad is None else p.grad.clone() for p in self.leaves()]

    def plainly(self) -> None:
        self.optimizer.zero_grad()
        total, weight = self.loss(self.model, self.batch)
        (total / weight).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def assert_alike(rig: Rig, plain: Rig, rtol: float = 1e-12) -> None:
    for mine, other in zip(rig.gradients(), plain.gradients(), strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, rtol=rtol, atol=0.0)


@pytest.mark.parametrize("micro_batch", [1, 5, 12])
def test_they_add_up_over_steps_as_in_a_plain_loop(micro_batch: int):
    rig, plain = Rig(), Rig()
    there = rig.judge[0].weight.grad = torch.ones_like(rig.judge[0].weight)
    plain.judge[0].weight.grad = torch.ones_like(there)
    with ab.Step(rig.model, rig.optimizer, rig.loss, micro_batch=micro_batch) as step:
        for number in range(4):
            if number == 2:  # the script uses them up
                rig.judge.zero_grad()
                plain.judge.zero_grad()
            step(rig.batch)
            plain.plainly()
            assert_alike(rig, plain)
            if number == 0:
                assert rig.judge[0].weight.grad is there  # written to in place, as torch does
    assert_alike(rig, plain)
    assert all(p.grad is None for p in rig.model.parameters())


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp16-weights"])
def test_no_scale_of_the_loss_is_in_them(precision: str):
    rig, plain = Rig(torch.float32), Rig(torch.float32)
    with ab.Step(rig.model, rig.optimizer, rig.loss, micro_batch=5, precision=precision) as step:
        step(rig.batch)
        plain.plainly()
        assert_alike(rig, plain, rtol=0.05)


def test_a_step_that_is_done_again_counts_once():
    rig, plain = Rig(), Rig()
    with ab.Step(rig.model, rig.optimizer, rig.loss, micro_batch=4) as step:
        step(rig.batch)
        plain.plainly()
        rig.failing = [torch.OutOfMemoryError("planted")] * 3  # in the third pass
        assert step(rig.batch).num_micro_batches > 3
        plain.plainly()
        assert_alike(rig, plain)


def test_a_step_that_fails_leaves_them_as_they_were():
    rig = Rig()
    with ab.Step(rig.model, rig.optimizer, rig.loss, micro_batch=4) as step:
        step(rig.batch)
        before = rig.gradients()
        rig.factor = float("nan")
        with pytest.raises(LossError):
            step(rig.batch)
        rig.factor, rig.failing = 1.0, [ZeroDivisionError("planted")] * 2
        with pytest.raises(ZeroDivisionError):
            step(rig.batch)
        for mine, was in zip(rig.gradients(), before, strict=True):
            assert (mine is None and was is None) or torch.equal(mine, was)


@pytest.mark.nightly
def test_inputs_have_theirs_too_and_what_the_loss_makes_is_let_go_of():
    model = nn.Linear(4, 1).double()
    twin = copy.deepcopy(model)
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def penalised(model: nn.Module, batch: Tensor) -> Tensor:
        gc.collect()
        alive.append(sum(ref() is not None for ref in made))
        mixed = (batch.detach() + 1).requires_grad_()
        made.append(weakref.ref(mixed))
        (slope,) = torch.autograd.grad(model(mixed).square().sum(), mixed, create_graph=True)
        return model(batch).square().mean() + slope.square().sum(dim=1).mean()

    images, others = X.double().requires_grad_(), X.double().requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ab.Step(model, optimizer, penalised, micro_batch=3) as step:
        made.clear()
        alive.clear()
        step(images)
    # Of the passes before, only that of the last one may be there yet.
    assert len(alive) >= 4
    assert max(alive) <= 1
    penalised(twin, others).backward()
    torch.testing.assert_close(images.grad, others.grad, rtol=1e-12, atol=1e-15)


def test_a_run_keeps_to_it_too():
    rig, plain = Rig(), Rig()
    task = ab.Task(
        model=rig.model,
        loss=rig.loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=list(rig.batch),
        global_batch=12,
        epochs=3,
    )
    with ab.Session(task, ab.plan(task, micro_batch=5)) as session:
        for _ in session.steps():
            plain.plainly()
            assert_alike(rig, plain)


def test_others_that_come_later_are_found():
    """Images that require a gradient, and a term of the loss, from the third and fourth step on."""
    rig, plain = Rig(), Rig()
    for each in (rig, plain):
        each.judge.requires_grad_(False)
        each.temperature.requires_grad_(False)

    def loss(each: Rig, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        total, weight = each.loss(model, batch)
        if each.weighs:
            total = total + weight * each.unused.square().sum()
        return total, weight

    with ab.Step(rig.model, rig.optimizer, partial(loss, rig), micro_batch=5) as step:
        for number in range(5):
            for each in (rig, plain):
                each.batch.requires_grad_(number >= 2)
                each.weighs = number >= 3
            step(rig.batch)
            total, weight = loss(plain, plain.model, plain.batch)
            (total / weight).backward()
            plain.optimizer.step()
            plain.optimizer.zero_grad()
            assert_alike(rig, plain)
            if number >= 2:
                torch.testing.assert_close(rig.batch.grad, plain.batch.grad, rtol=1e-12, atol=1e-15)


def test_graphs_of_one_length_are_walked_once(monkeypatch):
    walked: list[Tensor] = []

    def counted(loss: Tensor) -> Iterator[Tensor]:
        walked.append(loss.detach())
        return leaves_of(loss)

    leaves_of = outside_gradients._leaves_of
    monkeypatch.setattr(outside_gradients, "_leaves_of", counted)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ab.Step(model, optimizer, lambda m, x: m(x).square().mean(), micro_batch=4) as step:
        for _ in range(3):
            step(X)
    assert len(walked) == 1
