"""Subjects: a task made ready to be traced, whatever its model function does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.estimate import subject_of


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean()


def test_a_model_function_that_reads_weights_from_a_file_is_traced_without_them(tmp_path: Path):
    path = tmp_path / "weights.pt"
    torch.save(nn.Linear(3, 1).state_dict(), path)

    def build() -> nn.Module:
        model = nn.Linear(3, 1)
        with _disable_current_modes():  # as libraries do that map a file
            model.load_state_dict(torch.load(path), assign=True)
        return model

    task = ab.Task(
        model=build,
        loss=squares,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=TensorDataset(torch.zeros(8, 3)),
        global_batch=8,
        steps=1,
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert not any(isinstance(p, FakeTensor) for p in build().parameters())
        made = subject_of(task).build_model()
        assert all(isinstance(p, FakeTensor) for p in made.parameters())
    kinds = ab.plan(task).prediction.by_kind
    assert kinds["parameters"] == 4 * 4  # bytes, of four numbers
