"""Which folder a run writes to, and that no other one does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from anybatch import locks
from anybatch.errors import InputError
from anybatch.report import new_folder, next_folder, run_folder


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
        InputError, match=r"no run folder can be made in .*runs: .*Give one with --out"
    ):
        new_folder(tmp_path / "runs", "task").__enter__()
