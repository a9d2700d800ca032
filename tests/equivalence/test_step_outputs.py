"""What a script does with a pass: outputs for each sample, and the gradient of the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.errors import InputError

X = torch.randn(23, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X[:, 0] > 0).long()


def build() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)).double()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ab.Loss:
    logits = model(batch[0])
    total = F.cross_entropy(logits, batch[1], reduction="sum")
    found = {"logits": logits, "names": [f"sample {label}" for label in batch[1].tolist()]}
    return ab.Loss(total, len(logits), outputs=found)


def step_of(model: nn.Module, micro_batch: int, **options: Any) -> ab.Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ab.Step(model, optimizer, loss, micro_batch=micro_batch, verbose=False, **options)


@pytest.mark.parametrize("micro_batch", [23, 5])
def test_outputs_come_back_whole_in_the_order_of_the_batch(micro_batch: int):
    model = build()
    wanted = model(X)
    with step_of(model, micro_batch) as step:
        outputs = step((X, Y)).outputs
        assert step((X[:4], Y[:4])).outputs["logits"].shape == (4, 2)
    torch.testing.assert_close(outputs["logits"], wanted)
    assert not outputs["logits"].requires_grad
    assert outputs["names"] == [f"sample {label}" for label in Y.tolist()]


def test_outputs_that_are_none_of_samples_leave_no_trace():
    def whole(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ab.Loss:
        logits = model(batch[0])
        return ab.Loss(logits.sum(), len(logits), outputs=logits.sum())

    model = build()
    before = [param.clone() for param in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        ab.Step(model, optimizer, whole, micro_batch=5, verbose=False) as step,
        pytest.raises(InputError, match=r"Loss\.outputs for 5 samples has the shape \(\)"),
    ):
        step((X, Y))
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_the_gradient_of_the_step_is_kept(clip_norm: float | None):
    model, by_hand = build(), build()
    F.cross_entropy(by_hand(X), Y).backward()
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(by_hand.parameters(), clip_norm)
    with step_of(model, 5, keep_grad=True, clip_norm=clip_norm) as step:
        step((X, Y))
        for mine, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
        first = model[0].weight.clone()
        step((X, Y))  # begins without it
        assert not torch.equal(model[0].weight, first)
    with step_of(model, 5) as step:
        step((X, Y))
        assert all(param.grad is None for param in model.parameters())


def test_a_second_step_with_a_kept_gradient_is_that_of_a_plain_loop():
    model, by_hand = build(), build()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    with step_of(model, 5, keep_grad=True) as step:
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(by_hand(X), Y).backward()
            optimizer.step()
            step((X, Y))
    for mine, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
