"""A run that is resumed with parameters in other groups, or with another optimizer."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.errors import InputError, Stopped

DRAW = torch.Generator().manual_seed(1)
KIND: Any = {"dtype": torch.float64}
DATA = torch.utils.data.TensorDataset(
    torch.randn(48, 6, generator=DRAW, **KIND), torch.randint(3, (48,), generator=DRAW)
)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)
    ).double()


def loss(model: nn.Module, batch: Any) -> ab.Loss:
    return ab.Loss(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def amsgrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, amsgrad=True)


def as_built(model: nn.Module) -> list[Any]:
    return list(model.parameters())


def middle_first(model: Any) -> list[Any]:
    rest = [*model[0].parameters(), *model[4].parameters()]
    return [{"params": list(model[2].parameters())}, {"params": rest}]


def by_decay(model: nn.Module) -> list[Any]:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": decayed}, {"params": [p for p in model.parameters() if p.dim() == 1]}]


def without_the_first(model: Any) -> list[Any]:
    return [*model[2].parameters(), *model[4].parameters()]


def task(optimizer: Any = momentum, groups: Any = as_built) -> ab.Task:
    return ab.Task(
        model=build,
        loss=loss,
        optimizer=optimizer,
        parameters=groups,
        train=DATA,
        global_batch=16,
        epochs=4,
    )


def trained(one: ab.Task, **options: Any) -> dict[str, Tensor]:
    return ab.train(one, micro_batch=8, progress=False, **options).model.state_dict()


def stop(event: Any) -> None:
    if getattr(event, "step", 0) == 4 and type(event).__name__ == "StepDone":
        os.kill(os.getpid(), signal.SIGTERM)


def begun(folder: Path, **options: Any) -> Path:
    with pytest.raises(Stopped):
        trained(task(**options), out=folder, sinks=[stop])
    return folder


@pytest.mark.parametrize("groups", [as_built, middle_first, by_decay])
def test_states_follow_their_parameters(tmp_path: Path, groups: Callable[[nn.Module], list[Any]]):
    whole = trained(task())
    found = trained(task(groups=groups), out=begun(tmp_path / "run"), resume=True)
    assert all(torch.equal(found[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    ("first", "then", "groups", "words"),
    [
        (momentum, adamw, as_built, "its states are momentum_buffer, and AdamW needs 'exp_avg'"),
        (adamw, amsgrad, as_built, "AdamW needs 'max_exp_avg_sq'"),
        (momentum, momentum, without_the_first, r"it trained '0\.weight' and 1 more, which"),
    ],
)
def test_another_optimizer_is_refused(
    tmp_path: Path, first: Any, then: Any, groups: Any, words: str
):
    folder = begun(tmp_path / "run", optimizer=first)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=words):
        trained(task(then, groups), out=folder, resume=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
