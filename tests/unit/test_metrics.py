"""What a task may have for metrics, and that torchmetrics is nobody's business who has none of it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics.classification import BinaryF1Score

from anybatch.errors import InputError
from anybatch.metrics import Metrics
from anybatch.task import Task


def task(metrics: Any) -> Task:
    return Task(
        model=lambda: nn.Linear(1, 1),
        loss=lambda model, batch: model(batch).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=[torch.ones(1)],
        global_batch=1,
        steps=1,
        metrics=metrics,
    )


def sums(_model: nn.Module, _batch: Any) -> dict[str, Any]:
    return {"one": (1.0, 1.0)}


GIVEN = Metrics({"f1": BinaryF1Score()}, lambda model, batch: (batch, batch))


@pytest.mark.parametrize(
    "metrics", [None, sums, GIVEN, [sums, GIVEN], (GIVEN,), []], ids=lambda m: type(m).__name__
)
def test_what_may_be_given(metrics: Any):
    assert task(metrics).metrics is metrics


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        (3, "metrics is a value of type int; give a function, an anybatch.Metrics, a list"),
        ([sums, "f1"], "metrics is a value of type str; give a function"),
        (BinaryF1Score(), r"metrics is .*BinaryF1Score.* updated with.*Metrics\(\{name: metric\}"),
        ([BinaryF1Score()], "metrics is a value of type BinaryF1Score"),
        ({"f1": BinaryF1Score()}, "metrics is a value of type dict; give a function"),
    ],
    ids=["number", "name", "metric", "metric in a list", "dict"],
)
def test_what_may_not_be_given(metrics: Any, says: str):
    with pytest.raises(InputError, match=says):
        task(metrics)


@pytest.mark.slow
def test_torchmetrics_is_not_imported():
    code = (
        "import sys, anybatch.runs.train, anybatch.metrics; sys.exit('torchmetrics' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
