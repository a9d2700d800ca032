"""Libraries are loaded without collections, and in a process of anybatch's own they stay."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from anybatch.cli import run
from anybatch.process.libraries import loading

OWN = """
import gc
from anybatch.process import libraries

libraries.stay()
with libraries.loading():
    import json
assert gc.isenabled()
aside = gc.get_freeze_count()
assert aside
import user
assert gc.get_freeze_count() <= aside
"""

USER = """
from anybatch.process import libraries

class Circle:
    def __init__(self):
        self.itself = self
        self.file = open("file", "w")

circle = Circle()
circle.file.write("all of it")
with libraries.loading():
    import csv
"""


def test_what_the_user_makes_in_a_process_of_ours_is_finalized_at_its_end(tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "user.py").write_text(USER)
    subprocess.run([sys.executable, "own.py"], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "file").read_text() == "all of it"


def test_a_process_of_the_user_is_left_as_it_was():
    before = gc.get_freeze_count()
    with loading():
        assert not gc.isenabled()
        with loading():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == before


def test_who_collects_by_hand_goes_on_so():
    gc.disable()
    try:
        with loading():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_import_that_fails_switches_it_on_again():
    with pytest.raises(ImportError), loading():
        raise ImportError
    assert gc.isenabled()


@pytest.mark.parametrize("name", ["train", "plan", "memory", "verify", "evaluate", "export"])
def test_a_command_sets_its_libraries_aside_before_the_users_code(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    done: list[str] = []
    monkeypatch.setattr("anybatch.process.libraries._sets_aside", True)
    monkeypatch.setattr("gc.freeze", lambda: done.append("aside"))
    assert run([name, "nowhere.py"]) == 2
    assert done == ["aside"]
