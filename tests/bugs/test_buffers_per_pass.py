"""Buffers that every pass advances were cut without a word.

Symptom (0.1): a queue of keys, a codebook or a teacher's centre that forward keeps in a buffer ended
far from where a plain loop leaves it, and neither the plan nor `Step` mentioned it.
Mechanism: with the whole batch such a buffer advances once per step, else once per micro-batch.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(3))


class Centred(nn.Module):
    """Subtracts a running mean."""

    def __init__(self, writes: str = "replaced"):
        super().__init__()
        self.lin = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.writes = writes
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("still", torch.ones(4))

    def forward(self, x):
        y = self.norm(self.lin(x)) * self.still
        result = y - self.centre
        if self.training and self.writes == "replaced":
            self.centre = self.centre * 0.9 + y.detach().mean(0) * 0.1
        elif self.training and self.writes == "in place":
            self.centre.mul_(0.9)
        return result


def _loss(model, batch):
    return ab.Loss(model(batch[0]).square().sum(), len(batch[0]))


def _told(sentences):
    return [one for one in sentences if "Every pass writes to" in one]


@pytest.mark.parametrize("writes", ["replaced", "in place"])
def test_a_plan_names_them(writes):
    task = ab.Task(
        model=lambda: Centred(writes),
        loss=_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=TensorDataset(X),
        global_batch=24,
        ghost_batch=8,
        steps=2,
    )
    (sentence,) = _told(ab.plan(task, micro_batch=8).notices)
    assert "writes to 'centre':" in sentence


@pytest.mark.parametrize(
    ("writes", "micro_batch", "warns"),
    [("replaced", 8, True), ("replaced", 24, False), ("nothing", 8, False)],
)
def test_step_warns_where_it_cuts(writes, micro_batch, warns):
    model = Centred(writes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, batch):  # a warning is given once for each function
        return _loss(model, batch)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ab.Step(model, optimizer, loss, micro_batch=micro_batch, ghost_batch=8) as step:
            step((X,))
    assert bool(_told(str(one.message) for one in caught)) == warns
