"""A folder with one small task file per test, commands run in process, and what they leave behind."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from anybatch.cli import run

TASK = """\
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import anybatch as ab

X = torch.arange(120.0).reshape(40, 3) / 120
Y = X.sum(dim=1, keepdim=True)


def model():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


def loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def given():
    return dict(
        model=model, loss=loss, optimizer=sgd, train=TensorDataset(X, Y), global_batch=8, epochs=1
    )


def task(global_batch: int = 8, epochs: int = 1):
    return ab.Task(**{**given(), "global_batch": global_batch, "epochs": epochs, **CHANGES})


CHANGES = {}
"""


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The first line of what was said."""
        return self.err.splitlines()[0] if self.err else ""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def clean_imports(tmp_path: Path) -> Iterator[None]:
    """Running a user's file leaves its folder on `sys.path` and its module loaded, on purpose."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the command."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


@pytest.fixture
def write_task(folder: Path) -> Callable[..., Path]:
    """Write `task.py`: a task that trains, with `more` code after it."""

    def write(more: str = "", name: str = "task.py") -> Path:
        path = folder / name
        path.write_text(TASK + textwrap.dedent(more))
        return path

    return write


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run one command line."""

    def call(*arguments: str) -> Outcome:
        capsys.readouterr()
        status = run(list(arguments))
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return call


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything in `folder`: the content of files, None for folders."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def one_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process, and those that it starts, as torchrun would have started one of three."""
    ranks = {"RANK": 0, "WORLD_SIZE": 3, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 3, "MASTER_PORT": 1}
    for name, value in {**ranks, "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, str(value))
