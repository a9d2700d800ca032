"""Which folder a run writes to, and that no other one does."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.unit.report.fake_run import (
    make_end,
    make_start,
    write_run,
)

from anybatch.errors import InputError
from anybatch.process import locks
from anybatch.report import new_folder, next_folder, run_folder, write


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "LOCK_SECONDS", 0.1)


@contextmanager
def used_by_another(folder: Path) -> Iterator[None]:
    """Another thread stands for another process."""
    begun, done = threading.Event(), threading.Event()

    def run() -> None:
        with run_folder(folder):
            begun.set()
            done.wait(60)

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(60)
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_one_run_at_a_time(tmp_path: Path):
    folder = tmp_path / "run"
    with used_by_another(folder):
        for resume in (False, True):
            with pytest.raises(
                InputError, match="run is in use by another run: give another folder"
            ):
                run_folder(folder, resume).__enter__()
    with run_folder(folder):
        assert [path.name for path in folder.iterdir()] == [".in-use"]
    assert not list(folder.iterdir())


def test_ranks_that_were_started_again_do_not_wait_for_those_before_them(tmp_path: Path):
    with used_by_another(tmp_path), run_folder(tmp_path, resume=True, again=True) as folder:
        assert folder == tmp_path


def test_a_name_belongs_to_who_was_first(tmp_path: Path):
    parent = tmp_path / "a" / "runs"
    with new_folder(parent, "task") as first, new_folder(parent, "task") as second:
        assert (first, second) == (parent / "task-1", parent / "task-2")
        assert next_folder(parent, "task") == parent / "task-3"
        (second / "plan.json").touch()
    assert not first.exists()
    assert [path.name for path in parent.iterdir()] == ["task-2"]


def test_what_was_made_for_nothing_is_taken_away(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "runs", "task"):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_a_name_that_another_takes_at_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def named(parent: Path, name: str) -> Path:
        found = next_folder(parent, name)
        if not (parent / "task-2").exists():
            found.mkdir()
        return found

    monkeypatch.setattr("anybatch.report.folder.next_folder", named)
    with new_folder(tmp_path, "task") as folder:
        assert folder == tmp_path / "task-3"


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(
        InputError, match=r"no run folder can be made in .*runs: .*Give one with out="
    ):
        new_folder(tmp_path / "runs", "task").__enter__()


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("../../x", "x-1"),
        ("/etc/x", "etc-x-1"),
        ("..", "run-1"),
        ("a/../b\\c", "a-..-b-c-1"),
        ("a\nb\0c", "a-b-c-1"),
        ("x" * 500, "x" * 60 + "-1"),
        ("my task, größer", "my task, größer-1"),
    ],
)
def test_no_name_of_a_task_leads_out_of_the_folder(tmp_path: Path, name: str, folder: str):
    with new_folder(tmp_path / "runs", name) as found:
        assert found == tmp_path / "runs" / folder
        assert found.is_dir()


def test_a_folder_whose_name_is_no_utf_8_has_a_report(tmp_path: Path):
    folder = tmp_path / os.fsdecode(b"bad\xff")
    folder.mkdir()
    write_run(folder, [make_start(command=f"anybatch train --out {folder}"), make_end()])
    assert "udcff" in write(folder).read_text()
