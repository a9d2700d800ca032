"""A gradient that an autograd function attaches was divided with the sum of the loss, and not told.

Symptom (0.1): an auxiliary loss attached in backward, as mixtures of experts do, weighed too little by
a factor of the weight of the global batch.
Mechanism: gradients are those of a sum, divided in the end; what is attached does not scale with it.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import anybatch as ab


class Attached(torch.autograd.Function):
    """Passes `x` on, and gives `auxiliary` a gradient of one."""

    @staticmethod
    def forward(ctx, x, auxiliary):
        ctx.kind = auxiliary.dtype
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones(1, dtype=ctx.kind).squeeze()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, auxiliary):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


@pytest.mark.parametrize(("function", "warns"), [(Attached, True), (Doubled, False)])
def test_it_is_warned_of(function, warns):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, batch):
        result = model(batch)
        result = function.apply(result, result.square().mean())
        return ab.Loss(result.sum(), len(batch))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ab.Step(model, optimizer, loss, micro_batch=4) as step:
            step(torch.ones(8, 4))
    told = [str(one.message) for one in caught if "a part of the whole" in str(one.message)]
    assert bool(told) == warns
    if warns:
        assert "'Attached'" in told[0]
