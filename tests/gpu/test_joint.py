"""A loss over the whole global batch, where samples wait on the host and the GPU draws at random."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.equivalence.joint import compare, encode, task_of
from tests.equivalence.reference import deviation, own_model, plan_for

import anybatch as ab

pytestmark = pytest.mark.gpu


def trained(task, micro_batch, precision="fp32"):
    plan = plan_for(task, micro_batch, precision=precision)
    plan = plan.model_copy(update={"device": "cuda:0"})
    with ab.Session(own_model(task), plan) as session:
        losses = [done.loss for done in session.steps()]
        return losses, session.model.cpu()


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 2e-2), ("fp16", 5e-3)]
)
@pytest.mark.parametrize("micro_batch", [5, 10])
def test_any_cut_is_the_whole_batch(micro_batch, precision, tolerance):
    task = task_of(
        dtype=torch.float32, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), steps=3
    )
    losses, whole = trained(task, 35, precision)
    told, cut = trained(task, micro_batch, precision)
    assert told == pytest.approx(losses, rel=tolerance)
    assert deviation(cut, whole) < tolerance


def test_what_is_dropped_is_dropped_both_times():
    seen: list[torch.Tensor] = []

    def watched(model, batch):
        encoded = encode(model, batch)
        seen.append(encoded["left"].detach().clone())
        return encoded

    task = task_of(dtype=torch.float32, norm=False, dropout=0.5, steps=1)
    trained(dataclasses.replace(task, loss=ab.JointLoss(watched, compare)), 10)
    first, again = seen[:4], seen[4:]
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
