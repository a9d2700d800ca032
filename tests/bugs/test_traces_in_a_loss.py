"""torch 2.13, anybatch 0.1: planning and `verify` ran the user's loss as it stands, and what it keeps
between its calls stayed as they left it. Gradients of a discriminator were fake tensors, which
`zero_grad(set_to_none=False)` kept for ever, so that it never trained; a running mean was one, and the
first real call raised DataDependentOutputException; histories, metrics, counters and the statistics of
BatchNorm began with what no batch had given."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric

import anybatch as ab
from anybatch.plans import Choice

# A metric that asks whether any value is not a number is told so in a trace.
pytestmark = pytest.mark.filterwarnings("ignore:Encountered `nan` values")

DRAW = torch.Generator().manual_seed(0)
X = torch.randn(16, 4, generator=DRAW, dtype=torch.float64)
LARGER = torch.randn(40, 4, generator=DRAW, dtype=torch.float64)
"""Planned for anew, in the middle of a run."""

BATCHES = (X, LARGER, X)


def net(*widths: int, middle: Callable[[int], nn.Module] = lambda width: nn.Tanh()) -> nn.Module:
    torch.manual_seed(len(widths))
    first, inner, last = widths
    layers = nn.Sequential(nn.Linear(first, inner), middle(inner), nn.Linear(inner, last))
    return layers.double()


def trained(
    loss: Any,
    batches: Any = BATCHES,
    own: Callable[[Tensor], Any] = lambda _: None,
    plain: bool = False,
) -> list[Tensor]:
    """The parameters of a model after steps of `loss`, each of one pass, followed by `own`."""
    model = net(4, 8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if plain:
        for batch in batches:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
            own(batch)
    else:
        with ab.Step(model, optimizer, loss, micro_batch=len(LARGER)) as step:
            for batch in batches:
                step(batch)
                own(batch)
    return [p.detach().clone() for p in model.parameters()]


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def is_real(label: Any, out: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out, torch.full_like(out, label))


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_discriminator_in_the_loss_trains_as_in_a_plain_loop(
    set_to_none: bool, batch_norm: bool
) -> None:
    ends = []
    for plain in (True, False):
        middle = nn.BatchNorm1d if batch_norm else lambda width: nn.Tanh()
        other = net(4, 6, 1, middle=middle)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

        def train_other(batch: Tensor, other=other, optimizer=optimizer) -> None:
            optimizer.zero_grad(set_to_none=set_to_none)
            is_real(1.0, other(batch)).backward()
            optimizer.step()

        end = trained(
            lambda m, b, other=other: is_real(1.0, other(m(b))), BATCHES, train_other, plain
        )
        ends.append((end, dict(other.state_dict()), gradients_of(other)))
    same(*ends)


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    return [param.grad for param in model.parameters()]


class Centred:
    """A loss with a running mean, as DINO's."""

    def __init__(self) -> None:
        self.center = torch.zeros(4, dtype=torch.float64)

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        loss = (out - self.center).square().mean()
        self.center = self.center * 0.9 + out.detach().mean(0) * 0.1
        return loss


def centred() -> tuple[Any, Callable[[], Any]]:
    loss = Centred()
    return loss, lambda: loss.center


def centred_by_a_variable() -> tuple[Any, Callable[[], Any]]:
    center = torch.zeros(4, dtype=torch.float64)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        nonlocal center
        out = model(batch)
        found = (out - center).square().mean()
        center = center * 0.9 + out.detach().mean(0) * 0.1
        return found

    return loss, lambda: center


def with_histories() -> tuple[Any, Callable[[], Any]]:
    losses: list[Tensor] = []
    numbers: dict[str, list[float]] = {}
    metric = MeanMetric().double()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        found = model(batch).square().mean()
        losses.append(found.detach())
        numbers.setdefault("loss", []).append(found.item())
        metric.update(found.detach())
        return found

    return loss, lambda: (losses, numbers, metric.compute(), metric.update_count)


def annealed() -> tuple[Any, Callable[[], Any]]:
    count = {"step": 0}

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        count["step"] += 1
        return model(batch).square().mean() * min(1.0, count["step"] / 10)

    return loss, lambda: dict(count)


def taught() -> tuple[Any, Callable[[], Any]]:
    teacher = net(4, 6, 4, middle=nn.BatchNorm1d)
    for param in teacher.parameters():
        param.grad = torch.ones_like(param)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return F.mse_loss(model(batch), teacher(batch))

    return loss, lambda: {**teacher.state_dict(), "gradients": gradients_of(teacher)}


def joint() -> tuple[Any, Callable[[], Any]]:
    kept: list[Tensor] = []
    head = net(4, 6, 1)

    def compare(model: nn.Module, encoded: Tensor) -> Tensor:
        kept.append(encoded.detach().mean())
        return head(encoded).square().mean()

    loss = ab.JointLoss(encode=lambda model, batch: model(batch), compare=compare)
    return loss, lambda: {"kept": kept, "gradients": gradients_of(head)}


LOSSES = [centred, centred_by_a_variable, with_histories, annealed, taught, joint]


@pytest.mark.parametrize("make", LOSSES, ids=lambda make: make.__name__)
def test_a_loss_that_keeps_something_trains_as_in_a_plain_loop(make: Any) -> None:
    ends = []
    for plain in (True, False):
        loss, told = make()
        ends.append((trained(loss, plain=plain), told()))
    same(*ends)


def task_of(loss: Any) -> ab.Task:
    return ab.Task(
        model=lambda: net(4, 8, 4),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=LARGER,
        collate=torch.stack,
        global_batch=32,
        steps=2,
    )


@pytest.mark.parametrize("make", LOSSES, ids=lambda make: make.__name__)
def test_planning_and_verify_leave_it_as_it_was(make: Any) -> None:
    loss, told = make()
    loss(net(4, 8, 4), X).backward()  # so that there is something to be left
    before = copy.deepcopy(told())
    task = task_of(loss)
    plan = ab.plan(task)
    assert plan.is_predicted
    same(told(), before)
    choice = Choice(micro_batch=8, evaluation_batch=8)
    ab.verify(task, plan.model_copy(update={"choice": choice}), samples=24)
    same(told(), before)


def test_what_a_trace_raised_in_has_kept_nothing() -> None:
    kept: list[Tensor] = []
    center = torch.zeros((), dtype=torch.float64)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        nonlocal center
        found = model(batch).square().mean()
        kept.append(found.detach())
        center = center + found.detach()
        if type(found) is not Tensor:
            raise ValueError("what is this?")
        return found

    plan = ab.plan(task_of(loss))  # measured instead, in passes that are undone as well
    assert plan.prediction is not None
    assert not kept
    assert type(center) is Tensor
    assert center == 0


def test_a_mask_that_was_cached_in_the_trace_is_made_again() -> None:
    @functools.lru_cache
    def mask(size: int) -> Tensor:
        return torch.ones(size, dtype=torch.float64)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) * mask(4)).square().mean()

    trained(loss)
    assert type(mask(4)) is Tensor


def test_verify_does_not_take_a_running_mean_for_chance() -> None:
    """Each of its runs begins with what the loss kept before: two with other draws differ by these."""
    task = task_of(Centred())
    task.loss.center += 1
    plan = ab.plan(task)
    choice = Choice(micro_batch=8, evaluation_batch=8)
    found = ab.verify(task, plan.model_copy(update={"choice": choice}), samples=24)
    assert not found.exact
    assert not found.draws
    assert any("from one pass to the next" in cause for cause in found.causes)
