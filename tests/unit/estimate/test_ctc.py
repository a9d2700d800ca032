"""CTC is traced, though its shapes depend on numbers: on those of padded labels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch as ab
from anybatch.estimate.fake_op_cache import CachedOps, FakeOpCache, fake_mode

STEPS, NUM, CLASSES, LONGEST = 12, 3, 7, 4


def losses_and_gradient(scores: torch.Tensor, labels: torch.Tensor):
    lengths = torch.full((NUM,), STEPS), torch.full((NUM,), LONGEST)
    losses = F.ctc_loss(scores, labels, *lengths, reduction="none")
    kept = losses.grad_fn._saved_result1  # pyright: ignore[reportOptionalMemberAccess]
    losses.sum().backward()
    assert scores.grad is not None
    return losses, kept, scores.grad


def made() -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.zeros(STEPS, NUM, CLASSES, requires_grad=True)
    return scores, torch.ones(NUM, LONGEST, dtype=torch.int64)


def test_what_it_returns_and_keeps_has_the_shapes_of_the_real_ones():
    real = losses_and_gradient(*made())
    fake = fake_mode()
    with fake, CachedOps(fake, FakeOpCache()):
        told = losses_and_gradient(*made())
    for one, other in zip(told, real, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@pytest.mark.parametrize("device", [None, "rtx-3080-10gb"])
def test_a_task_with_it_is_planned_from_a_trace(device: str | None):
    def loss(model: nn.Module, batch: list[torch.Tensor]) -> ab.Loss:
        scores = model(batch[0]).log_softmax(-1).transpose(0, 1)
        counts = (torch.full((len(batch[1]),), n) for n in (len(scores), batch[1].size(1)))
        return ab.Loss(F.ctc_loss(scores, batch[1], *counts, reduction="sum"), len(batch[1]))

    data = torch.utils.data.TensorDataset(
        torch.randn(64, STEPS, 5), torch.ones(64, LONGEST, dtype=torch.int64)
    )
    task = ab.Task(
        model=lambda: nn.Linear(5, CLASSES),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=data,
        global_batch=16,
        epochs=1,
    )
    plan = ab.plan(task, ab.Machine.describe(device) if device else None)
    assert plan.prediction is not None
    assert not any("could not be traced" in notice for notice in plan.notices)
