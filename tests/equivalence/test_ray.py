"""Ray Train with the real library: workers that it starts, kills and starts again train as a plain loop
does. In processes of their own, since Ray leaves many behind in the one that starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.equivalence.ray_run import KILLED, task
from tests.equivalence.reference import train_plainly
from tests.equivalence.test_resume import assert_close

import anybatch as ab

HAS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
METRICS = "['epoch', 'held_out_loss', 'loss', 'samples_seen', 'step']"


def run(folder: Path, workers: int, max_failures: int) -> subprocess.CompletedProcess[str]:
    words = [str(folder), str(workers), str(max_failures)]
    return subprocess.run(
        [sys.executable, "-m", "tests.equivalence.ray_run", *words],
        env={**os.environ, "RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0"},
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


def test_outside_of_a_worker_it_says_what_is_missing():
    from anybatch.integrations.ray import train

    with pytest.raises(ab.InputError, match=r"needs the package ray|no worker of Ray Train"):
        train(task())
