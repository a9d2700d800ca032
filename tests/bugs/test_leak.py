"""A task that keeps something of each step runs out of memory, and is told that it does.

Symptom (0.1): "the budget of 64 MiB is too small even for the leanest plan", of a plan that had fit for
hundreds of steps. Mechanism: the sentence knew the last failure alone.
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import anybatch as ab

MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is held by Linux only")
def test_memory_that_grows_with_each_step_is_named():
    kept: list[torch.Tensor] = []

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        found = nn.functional.mse_loss(model(batch[0]), batch[1])
        if found.requires_grad and not found.is_meta and model.training:
            kept.append(torch.ones(MIB // 4))
        return found

    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    task = ab.Task(
        model=lambda: nn.Linear(16, 1),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        train=TensorDataset(x, x.sum(dim=1, keepdim=True)),
        global_batch=4,
        epochs=3,
    )
    with pytest.raises(
        ab.NoPlanFits, match=r"memory in use grew until step .* keeps something of each step"
    ):
        ab.train(task, memory="64MiB", progress=False)
    kept.clear()
