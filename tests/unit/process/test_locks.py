"""A file that one writer at a time holds."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from anybatch.process import locks
from anybatch.process.locks import kept_by_one, take

SECONDS = 60.0

HOLDER = """
import sys
from pathlib import Path
from anybatch.process.locks import kept_by_one
with kept_by_one(Path(sys.argv[1])) as alone:
    print(alone, flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the file at `path`, until its input ends."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=pipe, stdout=pipe, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "True\n"
            yield process
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "LOCK_SECONDS", 0.1)


def test_another_process_is_told_apart_and_its_death_frees_the_file(tmp_path: Path):
    path = tmp_path / "lock"
    with holder(path) as other:
        with kept_by_one(path) as alone:
            assert not alone
        assert take(path) is None
        assert path.exists()
        other.kill()
        other.wait(SECONDS)
        with kept_by_one(path) as alone:
            assert alone
    assert not path.exists()


def test_who_waits_gets_what_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Though the file that it waits for is deleted, and made anew."""
    monkeypatch.setattr(locks, "LOCK_SECONDS", SECONDS)
    path = tmp_path / "lock"
    with holder(path) as other:
        assert other.stdin is not None
        threading.Timer(0.3, other.stdin.close).start()
        with kept_by_one(path) as alone:
            assert alone
            assert path.exists()


def test_blocks_of_one_thread_may_lie_in_each_other_and_those_of_two_may_not(tmp_path: Path):
    path = tmp_path / "lock"
    found: list[bool] = []

    def elsewhere() -> None:
        with kept_by_one(path) as alone:
            found.append(alone)

    with kept_by_one(path) as outer, kept_by_one(Path(os.path.relpath(path))) as inner:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert (outer, inner, found) == (True, True, [False])
    assert not path.exists()
    elsewhere()
    assert found == [False, True]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_hold_it_on(tmp_path: Path):
    release = take(tmp_path / "lock")
    assert release is not None
    reading, writing = os.pipe()
    child = os.fork()
    if not child:  # lives on with all files of its parent
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        release()
        with holder(tmp_path / "lock"):
            pass  # it has got it
    finally:
        os.close(writing)
        os.waitpid(child, 0)
        os.close(reading)
