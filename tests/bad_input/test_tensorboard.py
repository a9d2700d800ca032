"""A log for TensorBoard that cannot be had: told before the run begins, or told and done without."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.bad_input.conftest import Outcome, tree
from tests.bad_input.test_commands import check_told
from tests.bad_input.test_folders import mount as mount

from anybatch.report import read
from anybatch.report.folder import EVENTS_FILE

Command = Callable[..., Outcome]


@pytest.fixture
def without_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)


@pytest.mark.usefixtures("without_tensorboard")
def test_without_the_package(folder: Path, write_task: Callable[..., Path], command: Command):
    write_task("raise RuntimeError('it is told before the task is read')\n")
    before = tree(folder)
    outcome = command("train", "task.py", "--tensorboard")
    assert outcome.status == 2
    check_told(outcome.err, ("needs tensorboard", "pip install 'anybatch[tensorboard]'"))
    assert tree(folder) == before


@pytest.mark.usefixtures("without_tensorboard")
def test_a_recorded_run_without_the_package(
    folder: Path, write_task: Callable[..., Path], command: Command
):
    write_task()
    assert command("train", "task.py", "--out", "run").status == 0
    before = tree(folder)
    outcome = command("report", "run", "--tensorboard")
    assert outcome.status == 2
    check_told(outcome.err, ("needs tensorboard", "pip install 'anybatch[tensorboard]'"))
    assert tree(folder) == before


def test_a_folder_with_the_log_of_another_run(
    folder: Path, write_task: Callable[..., Path], command: Command
):
    pytest.importorskip("tensorboard")
    write_task()
    (folder / "logs").mkdir()
    (folder / "logs" / "events.out.tfevents.1700000000.elsewhere").write_bytes(b"")
    before = tree(folder)
    for arguments in (
        ("train", "task.py", "--tensorboard", "logs"),
        ("train", "task.py", "--ranks", "2", "--tensorboard=logs"),
    ):
        outcome = command(*arguments)
        assert outcome.status == 2
        check_told(outcome.err, ("logs holds a log", "1700000000.elsewhere", "of its own"))
        assert tree(folder) == before


def test_a_folder_that_cannot_be_made(
    folder: Path, write_task: Callable[..., Path], command: Command
):
    pytest.importorskip("tensorboard")
    write_task()
    (folder / "notes").write_text("mine")
    before = tree(folder)
    outcome = command("train", "task.py", "--out", "run", "--tensorboard", "notes/log")
    assert outcome.status == 2
    check_told(outcome.err, ("notes/log", "Not a directory", "--tensorboard"))
    assert tree(folder) == before


def test_a_report_of_no_run_makes_no_log(folder: Path, command: Command):
    outcome = command("report", ".", "--tensorboard", "logs")
    assert outcome.status == 2
    check_told(outcome.err, (". is not a run folder", "anybatch train"))
    assert tree(folder) == {}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_runs_full_ends_the_log_and_not_the_run(
    mount: Callable[..., Path],
    folder: Path,
    write_task: Callable[..., Path],
    command: Command,
):
    pytest.importorskip("tensorboard")
    place = mount("size=32k")
    write_task()
    arguments = ("--out", "run", "--tensorboard", str(place / "log"), "-s", "epochs=40")
    with pytest.warns(UserWarning, match=r"No space left on device\. Training goes on without it"):
        outcome = command("train", "task.py", *arguments)
    assert outcome.status == 0
    assert read(folder / "run" / EVENTS_FILE)[-1].finished
