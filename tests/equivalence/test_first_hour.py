"""What a script's loss may look like when `Step` is put around it: right, or told in a sentence."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.errors import LossError

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))


def mean(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def done(loss: Any, model: nn.Module | None = None) -> int:
    """Micro-batches of a step by `loss`."""
    model = model or nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ab.Step(model, optimizer, loss, micro_batch=8, verbose=False) as step:
        return step(X).num_micro_batches


def test_a_function_of_no_module():
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return mean(model, batch)

    loss.__module__ = None  # as `exec` and some notebooks leave it
    assert done(loss) == 3


def test_the_scripts_own_gradient_scaler():
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(LossError, match=r"scales the loss by a GradScaler.* precision='fp16'"):
        done(lambda model, batch: scaler.scale(mean(model, batch)))
    assert float(scaler.scale(torch.ones(()))) == scaler.get_scale()  # elsewhere it works on


def test_a_dict_of_metrics_beside_the_loss():
    with pytest.raises(LossError, match=r"is a dict: .* metrics=\{\.\.\.\}"):
        done(lambda model, batch: (mean(model, batch), {"loss": 1.0}))


class FrozenBatchNorm(nn.Module):
    """As detection models have it: constants."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in {"running_mean": 0.1, "running_var": 1.0}.items():
            self.register_buffer(name, torch.full((8,), value))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.running_mean) * self.running_var.rsqrt()


def test_constants_of_a_frozen_norm_are_nothing_to_warn_of():
    model = nn.Sequential(nn.Linear(6, 8), FrozenBatchNorm(), nn.Linear(8, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert done(mean, model) == 3
