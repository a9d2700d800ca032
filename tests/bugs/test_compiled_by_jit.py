"""A model that torch.jit has compiled could not be trained.

Symptom (0.1): `Step` and `train` ended with "TypeError: contains(): incompatible function arguments".
Mechanism: the buffers of such a module are no dict, and cannot be iterated over.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import anybatch as ab

X = torch.randn(40, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Counting(nn.Module):
    """Has a buffer, which is put back where a step is done again."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3).double()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(x)


def scripted(model: nn.Module) -> nn.Module:
    return torch.jit.script(model)


def traced(model: nn.Module) -> nn.Module:
    return torch.jit.trace(model, X[:2], check_trace=False)


def a_part(model: nn.Module) -> nn.Module:
    return nn.Sequential(torch.jit.script(model), nn.Tanh())


class Loss:
    def __init__(self) -> None:
        self.fails_in = -1

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.fails_in -= 1
        if self.fails_in == 0:
            raise torch.OutOfMemoryError("planted")
        return model(batch).square().mean()


@pytest.mark.parametrize("compiled", [scripted, traced, a_part])
def test_it_is_trained_as_in_a_plain_loop(compiled):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        model = Counting()
        plain, mine = compiled(copy.deepcopy(model)), compiled(model)
    loss = Loss()
    optimizer = torch.optim.AdamW(mine.parameters())
    with ab.Step(mine, optimizer, loss, memory="64MiB") as step:
        step(X)
        loss.fails_in = 1
        before = next(iter(dict(mine.named_buffers()).values())).item()
        outcome = step(X)
        assert next(iter(dict(mine.named_buffers()).values())) == before + outcome.num_micro_batches
        assert step.plan.prediction.rehearsed
    optimizer = torch.optim.AdamW(plain.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        loss(plain, X).backward()
        optimizer.step()
    for own, other in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-14)
