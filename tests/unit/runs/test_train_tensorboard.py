"""A log for TensorBoard beside a run: what it holds is what the events of the run say."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.report.reading_tensorboard import found_in
from tests.unit.runs.test_train import task

import anybatch as ab
from anybatch.errors import InputError, Stopped
from anybatch.events import Event, StepDone
from anybatch.report import TensorBoardLog, read, write_tensorboard

pytest.importorskip("tensorboard")


pytestmark = pytest.mark.usefixtures("one_thread")


def run(folder: Path, **options: Any) -> ab.Result:
    steps = options.pop("epochs", 3)
    return ab.train(task(epochs=steps), out=folder, progress=False, **options)


def assert_same(one: Path, other: Path):
    """Not the settings of runs: two logs of one run agree in all that is drawn and told."""
    for name in (".", "by_samples"):
        assert found_in(one / name) == found_in(other / name)


def test_the_log_is_that_of_the_recorded_events(tmp_path: Path):
    run(tmp_path / "run", tensorboard=True)
    log = tmp_path / "run" / "tensorboard"
    steps = [e for e in read(tmp_path / "run" / "events.jsonl") if isinstance(e, StepDone)]
    found = found_in(log)
    assert [step for step, _ in found.scalars["train/loss"]] == [event.step for event in steps]
    wanted = pytest.approx([event.loss for event in steps], rel=1e-6)
    assert [loss for _, loss in found.scalars["train/loss"]] == wanted
    assert found.texts["events/run_ended"][0][0] == 6
    write_tensorboard(tmp_path / "run" / "events.jsonl", tmp_path / "again")
    assert_same(log, tmp_path / "again")


def test_a_folder_of_its_own_needs_none_for_the_run(tmp_path: Path):
    ab.train(task(epochs=1), tensorboard=tmp_path / "log", progress=False)
    assert [step for step, _ in found_in(tmp_path / "log").scalars["train/loss"]] == [1, 2]


def test_a_loop_of_ones_own_gives_it_the_steps(tmp_path: Path):
    mine = task(epochs=1)
    with (
        TensorBoardLog(tmp_path) as log,
        ab.Session(mine, ab.plan(mine), sinks=[log]) as session,
    ):
        losses = [event.loss for event in session.steps()]
    found = found_in(tmp_path).scalars["train/loss"]
    assert [loss for _, loss in found] == pytest.approx(losses, rel=1e-6)


def stopping_after(step: int):
    """The next step's vote tells all ranks of it, so one more is done."""

    def stop(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return stop


@pytest.mark.parametrize("from_the_beginning", [True, False])
def test_a_stopped_run_goes_on_in_the_same_log(tmp_path: Path, from_the_beginning: bool):
    wished = True if from_the_beginning else None
    with pytest.raises(Stopped):
        run(tmp_path / "run", sinks=[stopping_after(3)], tensorboard=wished)
    log = tmp_path / "run" / "tensorboard"
    if from_the_beginning:
        assert [step for step, _ in found_in(log).scalars["train/loss"]] == [1, 2, 3, 4]
    run(tmp_path / "run", resume=True, tensorboard=True)
    found = found_in(log)
    assert [step for step, _ in found.scalars["train/loss"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in found.scalars["held_out/loss"]] == [2, 4, 6]
    assert [step for step, _ in found.texts["events/resumed"]] == [4]
    write_tensorboard(tmp_path / "run" / "events.jsonl", tmp_path / "again")
    assert found.scalars == found_in(tmp_path / "again").scalars


def test_a_finished_run_that_is_resumed_adds_no_points(tmp_path: Path):
    run(tmp_path / "run", tensorboard=True)
    before = found_in(tmp_path / "run" / "tensorboard").scalars
    run(tmp_path / "run", resume=True, tensorboard=True)
    after = found_in(tmp_path / "run" / "tensorboard").scalars
    for tag in ("train/loss", "held_out/loss"):
        assert after[tag] == before[tag]


def test_steps_after_the_checkpoint_are_done_again_and_not_doubled(tmp_path: Path):
    class Killed(BaseException):
        """Ends a run with nothing saved, as a kill does."""

    def kill(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 6:  # told before it is written down
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path / "run", sinks=[kill], tensorboard=True, checkpoint_every=2)
    before = found_in(tmp_path / "run" / "tensorboard").scalars["train/loss"]
    assert [step for step, _ in before] == [1, 2, 3, 4, 5]
    again: list[int] = []

    def count(event: Event) -> None:
        if isinstance(event, StepDone):
            again.append(event.step)

    run(tmp_path / "run", resume=True, tensorboard=True, sinks=[count])
    assert again[0] <= 5  # done again
    after = found_in(tmp_path / "run" / "tensorboard").scalars["train/loss"]
    assert [step for step, _ in after] == [1, 2, 3, 4, 5, 6]
    assert after[: len(before)] == before


def test_a_new_run_in_the_folder_has_a_new_log_or_none(tmp_path: Path):
    run(tmp_path / "run", tensorboard=True)
    run(tmp_path / "run", epochs=1, tensorboard=True)
    losses = found_in(tmp_path / "run" / "tensorboard").scalars["train/loss"]
    assert [step for step, _ in losses] == [1, 2]
    run(tmp_path / "run")
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_without_the_package_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):

    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(InputError, match=r"pip install 'anybatch\[tensorboard\]'"):
        run(tmp_path / "run", tensorboard=True)
    assert not (tmp_path / "run").exists()
