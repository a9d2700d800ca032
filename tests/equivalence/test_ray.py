"""Ray Train with the real library: workers that it starts, kills and starts again train as a plain loop
does. In processes of their own, since Ray leaves many behind in the one that starts it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.equivalence.ray_run import KILLED, Rows, task
from tests.equivalence.reference import train_plainly
from tests.equivalence.test_resume import assert_close

import anybatch as ab

HAS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
METRICS = "['epoch', 'held_out_loss', 'loss', 'samples_seen', 'step']"


def run(folder: Path, workers: int, max_failures: int) -> subprocess.CompletedProcess[str]:
    words = [str(folder), str(workers), str(max_failures)]
    return subprocess.run(
        [sys.executable, "-m", "tests.equivalence.ray_run", *words],
        env={
            **os.environ,
            "RAY_TRAIN_V2_ENABLED": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "400",  # on a busy machine
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )


def check(folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    """It has come to its end, with the weights of a plain loop."""
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = train_plainly(task())
    assert f"METRICS {METRICS} {len(wanted.losses)} True" in done.stdout
    found = torch.load(folder / "weights.pt")
    assert_close(found, wanted.model.state_dict(), 1e-9)


@pytest.mark.slow
@HAS_RAY
def test_one_worker_trains_as_a_plain_loop(tmp_path: Path):
    check(tmp_path, run(tmp_path, 1, 0))


@pytest.mark.slow
@HAS_RAY
def test_a_worker_that_is_killed_comes_back_and_training_goes_on(tmp_path: Path):
    done = run(tmp_path, 2, 1)
    assert (tmp_path / KILLED).exists()
    check(tmp_path, done)


@pytest.mark.slow
@HAS_RAY
def test_another_number_of_workers_goes_on_from_the_checkpoint_in_the_storage(tmp_path: Path):
    failed = run(tmp_path, 2, 0)
    assert failed.returncode != 0
    assert (tmp_path / KILLED).exists()
    assert not (tmp_path / "weights.pt").exists()
    check(tmp_path, run(tmp_path, 1, 0))


@dataclass
class Checkpoint:
    """Like `ray.train.Checkpoint`."""

    path: Path

    @classmethod
    def from_directory(cls, path: str) -> Checkpoint:
        return cls(Path(path))

    def to_directory(self, path: str) -> str:
        return str(shutil.copytree(self.path, path, dirs_exist_ok=True))


@dataclass
class RayTrain:
    """What is used of the module `ray.train`, in a run of one worker: it keeps what is reported."""

    storage: Path
    checkpoints: list[Checkpoint] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    Checkpoint: type[Checkpoint] = Checkpoint

    def get_context(self) -> object:
        return self

    def get_checkpoint(self) -> Checkpoint | None:
        return self.checkpoints[-1] if self.checkpoints else None

    def report(self, metrics: dict[str, Any], checkpoint: Checkpoint | None) -> None:
        self.metrics.append(metrics)
        if checkpoint is not None:
            kept = Checkpoint(self.storage / f"{len(self.checkpoints)}")
            checkpoint.to_directory(str(kept.path))
            self.checkpoints.append(kept)


class FailsUntilMended(Rows):
    """Once two checkpoints are in `storage`, no sample can be loaded until it is mended."""

    def __init__(self, storage: Path) -> None:
        super().__init__(None)
        self._storage = storage

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if (self._storage / "1").exists() and not (self._storage / "mended").exists():
            raise OSError("the disk is gone")
        return super().__getitem__(index)


def test_a_worker_that_fails_goes_on_from_what_it_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from anybatch.integrations.ray import train

    ray = RayTrain(tmp_path)
    monkeypatch.setitem(sys.modules, "ray.train", ray)
    failing = replace(task(), train=FailsUntilMended(tmp_path))
    with pytest.raises(ab.DataError, match="the disk is gone"):
        train(failing, "64MiB", micro_batch=3, checkpoint_every=2)
    before = [found["step"] for found in ray.metrics]
    assert before[:2] == [2, 4]
    (tmp_path / "mended").touch()
    model = train(failing, "64MiB", micro_batch=3, checkpoint_every=2)
    wanted = train_plainly(task())
    assert_close(model.state_dict(), wanted.model.state_dict(), 1e-9)
    steps = [found["step"] for found in ray.metrics]
    assert steps == sorted(steps)
    assert steps[-1] == len(wanted.losses)
    assert str(sorted(ray.metrics[-1])) == METRICS
    [left] = ray.checkpoints[-1].path.glob("step-*")  # of all that were saved
    assert left.name.endswith(str(len(wanted.losses)))


def test_outside_of_a_worker_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # which an import of ray sets
    from anybatch.integrations.ray import train

    with pytest.raises(ab.InputError, match=r"needs the package ray|no worker of Ray Train"):
        train(task())
