"""A metric of evaluations that is a mean, given as a single number."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch as ab
from anybatch.compute.loss_reduction_check import _warn

DRAW = torch.Generator().manual_seed(1)
DATA = torch.utils.data.TensorDataset(
    torch.randn(20, 6, generator=DRAW), torch.randint(3, (20,), generator=DRAW)
)


def loss(model: nn.Module, batch: Any) -> ab.Loss:
    return ab.Loss(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))


def certainty(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).softmax(1).amax(1)


def warned(metrics: Any) -> tuple[list[str], float]:
    _warn.cache_clear()
    task = ab.Task(
        model=nn.Linear(6, 3),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        train=DATA,
        valid=DATA,
        metrics=metrics,
        global_batch=10,
        epochs=1,
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = ab.train(task, micro_batch=5, progress=False)
    assert result.evaluation is not None
    found = [str(one.message) for one in told if "metric" in str(one.message)]
    right = certainty(result.model, DATA.tensors).mean().item()
    return found, result.evaluation.metrics["certainty"] - right


def test_a_mean_is_told():
    (told,), _ = warned(lambda model, batch: {"certainty": certainty(model, batch).mean()})
    assert "the metric function" in told
    assert "'certainty' that is a mean" in told
    assert "give a sum, or a pair (sum, weight)" in told


@pytest.mark.parametrize(
    "metrics",
    [
        lambda model, batch: {"certainty": certainty(model, batch).sum()},
        lambda model, batch: {"certainty": (certainty(model, batch).sum(), len(batch[1]))},
    ],
)
def test_sums_are_right_and_nothing_is_said(metrics: Any):
    told, deviation = warned(metrics)
    assert told == []
    assert deviation == pytest.approx(0, abs=1e-6)
