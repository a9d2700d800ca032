"""A sample that cannot be loaded, in the step whose passes are rehearsed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch as ab
from anybatch.data import BadSamples
from anybatch.events import Skipped


class Data(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 45

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise OSError("disk read")
        return torch.randn(6, generator=torch.Generator().manual_seed(index)), index % 3


def loss(model: nn.Module, batch: Any) -> ab.Loss:
    return ab.Loss(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))


def trained(bad_data: str, **options: Any) -> list[Skipped]:
    skipped: list[Skipped] = []
    task = ab.Task(
        model=lambda: nn.Linear(6, 3),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=Data(),
        global_batch=8,
        epochs=2,
        shuffle=False,
        bad_data=bad_data,
    )
    sink = [lambda event: skipped.append(event) if isinstance(event, Skipped) else None]
    ab.train(task, progress=False, sinks=sink, **options)
    return skipped


@pytest.mark.parametrize("rehearsal", [True, False])
def test_it_is_skipped_in_each_epoch(rehearsal: bool):
    skipped = trained("skip", rehearsal=rehearsal)
    assert [(one.epoch, one.samples) for one in skipped] == [(0, (3,)), (1, (3,))]


def test_it_ends_a_run_that_does_not_skip():
    with pytest.raises(
        BadSamples, match=r"sample 3 of Data .* cannot be loaded: OSError: disk read"
    ):
        trained("stop", rehearsal=True)
