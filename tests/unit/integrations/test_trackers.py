"""Experiment trackers: what they are sent is what the events of the run say. Where a library is not
installed, the sentence that says so."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.unit.runs.test_train import task

import anybatch as ab
from anybatch.cli import run
from anybatch.errors import InputError
from anybatch.events import Event, StepDone
from anybatch.integrations.trackers import TRACKERS, WandbLog, check_tracker

pytestmark = pytest.mark.usefixtures("one_thread")


class _Run:
    """A run of a tracker with the interface of wandb."""

    def __init__(self, breaks: bool) -> None:
        self.config: Any = {}
        self.breaks = breaks
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.ended: list[int] = []

    def log(self, values: dict[str, float], step: int) -> None:
        if self.breaks:
            raise ConnectionError("the service is gone")
        self.logged.append((step, dict(values)))

    def finish(self, exit_code: int = 0) -> None:
        self.ended.append(exit_code)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with wandb's `init`; its runs are kept in `runs`, and break down if `breaks`."""
    module: Any = ModuleType("wandb")
    module.runs, module.breaks = [], False

    def init(project: str, name: str | None) -> _Run:
        run = _Run(module.breaks)
        run.config = {"project": project, "name": name}
        module.runs.append(run)
        return run

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def train(sink: Any) -> list[StepDone]:
    """What two epochs of training told, beside the sink."""
    told: list[Event] = []
    ab.train(task(epochs=2), sinks=[told.append, sink], progress=False)
    return [event for event in told if isinstance(event, StepDone)]


def test_curves_and_settings_are_sent_and_the_run_is_ended(wandb: Any):
    steps = train(WandbLog(project="mine", name="first"))
    [tracked] = wandb.runs
    found = {
        step: values["train/loss"] for step, values in tracked.logged if "train/loss" in values
    }
    assert found == {event.step: event.loss for event in steps}
    assert any("held_out/loss" in values for _, values in tracked.logged)
    assert (tracked.config["project"], tracked.config["name"]) == ("mine", "first")
    assert tracked.config["global_batch"] == task().global_batch
    assert tracked.config["plan"]["choice"]["precision"] == "fp32"
    assert tracked.ended == [0]


def test_a_tracker_that_fails_does_not_end_training(wandb: Any):
    wandb.breaks = True
    with pytest.warns(UserWarning, match="wandb has failed .the service is gone."):
        steps = train(WandbLog())
    assert len(steps) == 4


def test_an_error_ends_the_run_as_failed(wandb: Any):
    with pytest.raises(ZeroDivisionError), WandbLog():
        raise ZeroDivisionError
    assert wandb.runs[0].ended == [1]


def test_the_command_line_tracks(wandb: Any, tmp_path: Path):
    arguments = ["train", "digits", "-s", "epochs=1", "--out", str(tmp_path), "--track", "wandb"]
    assert run(arguments) == 0
    [tracked] = wandb.runs
    assert tracked.ended == [0]
    assert tracked.config["name"] == "digits"
    assert any("train/loss" in values for _, values in tracked.logged)


def test_an_unknown_tracker_is_refused():
    with pytest.raises(InputError, match="choose one of wandb, mlflow, trackio"):
        check_tracker("notebook")


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_a_library_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(InputError, match=f"pip install {name}"):
        TRACKERS[name]()


# ------------------------------------------------------------------------------ the real libraries

SCRIPT = """
import json, sys
import anybatch as ab
from anybatch.events import StepDone
from anybatch.integrations.trackers import TRACKERS
from tests.unit.runs.test_train import task

told = []
with TRACKERS[sys.argv[1]](project="mine", name="first") as log:
    ab.train(task(epochs=2), sinks=[told.append, log], progress=False)
losses = [(event.step, event.loss) for event in told if isinstance(event, StepDone)]
run_id = getattr(log, "_run_id", None)
print(json.dumps({"losses": losses, "run_id": run_id, "batch": task().global_batch}))
"""


def train_by_the_real(name: str, folder: Path, **environment: str) -> dict[str, Any]:
    """Train in a process of its own, since these libraries leave threads and services behind."""
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    paths = os.pathsep.join([str(Path.cwd()), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name],
        env={**os.environ, **environment, "PYTHONPATH": paths},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "has failed" not in done.stderr
    [said] = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(said)


def test_wandb_keeps_a_run_offline(tmp_path: Path):
    train_by_the_real("wandb", tmp_path, WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    [file] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    kept = file.read_bytes()
    assert kept.count(b"train/loss") >= 4
    assert b"global_batch" in kept


def test_mlflow_keeps_a_run_in_files(tmp_path: Path):
    environment = {
        "MLFLOW_TRACKING_URI": f"file://{tmp_path}/runs",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    said = train_by_the_real("mlflow", tmp_path, **environment)
    [run] = tmp_path.glob(f"runs/*/{said['run_id']}")
    kept = [line.split() for line in (run / "metrics/train/loss").read_text().splitlines()]
    assert [(int(step), float(loss)) for _, loss, step, *_ in kept] == [*map(tuple, said["losses"])]
    assert (run / "params/global_batch").read_text() == str(said["batch"])
    plan = json.loads((run / "artifacts/plan.json").read_text())
    assert plan["choice"]["precision"] == "fp32"


def test_trackio_keeps_a_run(tmp_path: Path):
    said = train_by_the_real("trackio", tmp_path, TRACKIO_DIR=str(tmp_path / "runs"))
    [file] = tmp_path.glob("runs/*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    kept = [(step, json.loads(metrics)) for step, metrics in rows]
    losses = [[step, one["train/loss"]] for step, one in kept if "train/loss" in one]
    assert losses == said["losses"]
