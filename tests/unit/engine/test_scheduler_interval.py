"""A scheduler of torch takes its step per epoch or per global step, as the task says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import anybatch as ab
from anybatch.errors import InputError
from anybatch.events import Event, StepDone


def rates(num_samples: int, **options: Any) -> list[float]:
    """Learning rates of the steps under a scheduler that takes a tenth at each of its own."""
    events: list[Event] = []
    task = ab.Task(
        model=lambda: nn.Linear(2, 1),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        train=list(torch.ones(num_samples, 2)),
        scheduler=lambda optimizer: StepLR(optimizer, 1, 0.1),
        global_batch=4,
        **options,
    )
    ab.train(task, micro_batch=4, progress=False, sinks=[events.append])
    return [event.learning_rate for event in events if isinstance(event, StepDone)]


@pytest.mark.parametrize(
    ("num_samples", "options", "powers"),
    [
        (8, {"epochs": 3, "scheduler_interval": "epoch"}, [0, 0, 1, 1, 2, 2]),
        (8, {"epochs": 2, "scheduler_interval": "step"}, [0, 1, 2, 3]),
        (6, {"epochs": 2, "scheduler_interval": "epoch"}, [0, 0, 1, 1]),
        (6, {"steps": 6, "scheduler_interval": "epoch", "last": "wrap"}, [0, 0, 1, 2, 2, 3]),
        (3, {"steps": 3, "scheduler_interval": "epoch", "last": "wrap"}, [0, 1, 2]),
        (1, {"steps": 3, "scheduler_interval": "epoch", "last": "wrap"}, [0, 4, 8]),
    ],
)
def test_a_scheduler_steps_as_the_task_says(
    num_samples: int, options: dict[str, Any], powers: list[int]
):
    assert rates(num_samples, **options) == pytest.approx([0.1**power for power in powers])


def test_how_often_is_not_guessed():
    with pytest.raises(InputError, match=r"StepLR.*scheduler_interval='epoch'"):
        rates(8, epochs=1)
    with pytest.raises(InputError, match="scheduler_interval is 'batch'; give 'epoch' or 'step'"):
        rates(8, epochs=1, scheduler_interval="batch")
