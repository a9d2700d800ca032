"""Small tensors: one thread is the fastest, and leaves the cores to other tests. Most folders have it
for each of their tests; modules beside this file ask for it by `usefixtures`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.unit.small_runs import small_task

import anybatch as ab


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps, with an evaluation and a checkpoint at steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    ab.train(small_task(), out=folder, checkpoint_every=2, progress=False)
    return folder
