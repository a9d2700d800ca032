"""Optimizers with modes of their own train other weights than those that are evaluated and returned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab

KIND = {"dtype": torch.float64}
DRAW = torch.Generator().manual_seed(2)
X, Y = torch.randn(24, 6, generator=DRAW, **KIND), torch.randn(24, 2, generator=DRAW, **KIND)
MOMENTUM = 0.9


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al. 2024): gradients are taken at y, an average of z, which is
    trained, and x, which is evaluated."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "k": 0, "train_mode": False})

    @torch.no_grad()
    def _swap(self, training: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] != training:
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.lerp_(self.state[param]["z"], weight)
                group["train_mode"] = training

    def train(self):
        self._swap(True, 1 - MOMENTUM)

    def eval(self):
        self._swap(False, 1 - 1 / MOMENTUM)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("not in training mode")
            average = 1 / (group["k"] + 1)
            for param in group["params"]:
                if "z" not in self.state[param]:
                    self.state[param]["z"] = param.clone()
                z = self.state[param]["z"]
                param.lerp_(z, average)
                param.add_(param.grad, alpha=group["lr"] * (MOMENTUM * (1 - average) - 1))
                z.sub_(param.grad, alpha=group["lr"])
            group["k"] += 1


def _build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, **KIND), nn.Tanh(), nn.Linear(8, 2, **KIND))


def _loss(model, batch):
    return ab.Loss(F.mse_loss(model(batch[0]), batch[1], reduction="sum"), len(batch[0]))


def _plainly(steps):
    model = _build()
    optimizer = ScheduleFree(model.parameters())
    optimizer.train()
    for _ in range(steps):
        optimizer.zero_grad()
        (_loss(model, (X, Y)).sum / 24).backward()
        optimizer.step()
    optimizer.eval()
    return model, float(_loss(model, (X, Y)).sum.detach() / 24)


def _task(steps, make=ScheduleFree):
    return ab.Task(
        model=_build,
        loss=_loss,
        optimizer=make,
        train=TensorDataset(X, Y),
        valid=TensorDataset(X, Y),
        global_batch=24,
        shuffle=False,
        steps=steps,
        evaluate_every=2,
    )


def _assert_equal(found, want, atol=1e-12):
    for a, b in zip(found.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def _several(params):
    first, *others = params
    return [ScheduleFree([first]), ScheduleFree(others)]


@pytest.mark.parametrize("make", [ScheduleFree, _several])
def test_what_is_evaluated_and_returned_is_of_evaluation_mode(make):
    events: list[object] = []
    result = ab.train(_task(5, make), micro_batch=7, progress=False, sinks=[events.append])
    want, loss = _plainly(5)
    _assert_equal(result.model, want)
    losses = {e.step: e.loss for e in events if isinstance(e, ab.events.Evaluated)}
    assert losses == {step: pytest.approx(_plainly(step)[1], rel=1e-9) for step in (2, 4, 5)}
    assert losses[5] == pytest.approx(loss, rel=1e-9)


def test_files_hold_the_evaluated_weights_and_a_run_goes_on_from_them(tmp_path: Path):
    ab.train(_task(3), micro_batch=7, progress=False, out=tmp_path)
    found = _build()
    ab.load_weights(found, tmp_path / "model.safetensors")
    _assert_equal(found, _plainly(3)[0])
    result = ab.train(_task(6), micro_batch=7, progress=False, out=tmp_path, resume=True)
    _assert_equal(result.model, _plainly(6)[0])


def test_the_masters_of_half_precision_weights_too():
    task = _task(5)
    halves = ab.train(
        ab.Task(
            model=lambda: _build().float(),
            loss=lambda m, b: ab.Loss(
                F.mse_loss(m(b[0].to(torch.bfloat16)).float(), b[1].float(), reduction="sum"),
                len(b[0]),
            ),
            optimizer=ScheduleFree,
            train=task.train,
            global_batch=24,
            shuffle=False,
            steps=5,
        ),
        micro_batch=24,
        precision="bf16-weights",
        progress=False,
    )
    _assert_equal(halves.model.double(), _plainly(5)[0], atol=5e-3)
