"""What fails in a check of a GPU costs nothing but itself."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from benchmarks import gpu_check
from benchmarks.gpu_check import Record, closing_line, failed_tests, run, run_parts
from benchmarks.gpu_parts import MARK, parts

PARTS = f"""
import json, os, sys, time
for name in sys.argv[1:]:
    print({MARK!r} + json.dumps(dict(part=name)), flush=True)
    if name == "crash":
        print("the driver is gone", file=sys.stderr)
        os._exit(9)
    if name == "hang":
        time.sleep(60)
    result = dict(failed="ValueError: no") if name == "raise" else dict(found=1, took=0.5)
    print("something else")
    print({MARK!r} + json.dumps(dict(part=name, **result)), flush=True)
    if name == "raise":
        raise SystemExit(1)
"""


def measured(names: list[str], seconds: float, folder: Path) -> Record:
    record = Record(device="a GPU")
    until = time.monotonic() + seconds
    command = sys.executable, "-c", PARTS
    run_parts(record, names, until, dict(os.environ), folder, command)
    return record


def test_parts_that_raise_crash_or_hang_leave_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gpu_check, "PART_SECONDS", 2.0)
    names = ["one", "raise", "two", "crash", "three", "hang", "four"]
    record = measured(names, 60, tmp_path)
    assert record.found == dict.fromkeys(("one", "two", "three", "four"), 1)
    assert record.failures == {
        "raise": "ValueError: no",
        "crash": "the process ended with status 9: the driver is gone",
        "hang": "killed after 2 s",
    }
    assert not record.left_out
    assert json.loads((tmp_path / "gpu.json").read_text())["found"] == record.found
    assert "the driver is gone" in (tmp_path / "gpu.md").read_text()


def test_when_time_is_over_the_rest_is_left_out(tmp_path: Path):
    record = measured(["one", "hang", "two"], 2.0, tmp_path)
    assert record.found == {"one": 1}
    assert record.left_out == ["hang", "two"]
    assert not record.failures


def test_a_command_that_hangs_is_ended_and_what_it_printed_is_kept():
    script = "import time; print('so far', flush=True); time.sleep(60)"
    status, output = run([sys.executable, "-c", script], 1.0, dict(os.environ))
    assert (status, output) == (None, "so far\n")


TESTS = """
tests/gpu/test_a.py::test_one PASSED [ 33%]
tests/gpu/test_a.py::test_two[x] FAILED [ 66%]
tests/gpu/test_a.py::test_three"""
SUMMARY = """
=========================== short test summary info ============================
FAILED tests/gpu/test_a.py::test_two[x] - AssertionError: 1 - 2
ERROR tests/gpu/test_a.py::test_four
========================= 1 failed, 1 passed in 2.00s ==========================
"""


def test_what_became_of_a_file_of_tests():
    assert closing_line(None, TESTS, 90) == (
        "killed after 90 s and 1 passed, in tests/gpu/test_a.py::test_three"
    )
    assert closing_line(-11, TESTS, 90) == "ended by signal 11 after 1 passed"
    assert closing_line(1, TESTS + SUMMARY, 90) == "1 failed, 1 passed in 2.00s"
    assert dict(failed_tests(SUMMARY)) == {
        "test_a.py::test_two[x]": "AssertionError: 1 - 2",
        "test_a.py::test_four": "see the output",
    }


def test_figures_that_nobody_expected_are_kept(tmp_path: Path):
    record = Record(device="a GPU", found={"device": {"odd": 1}})
    record.write(tmp_path)
    assert json.loads((tmp_path / "gpu.json").read_text())["found"] == record.found
    assert "KeyError" in (tmp_path / "gpu.md").read_text()


def test_every_model_has_its_turn_before_the_second_variant_of_any():
    cells = [name.removeprefix("cell: ") for name in parts() if name.startswith("cell: ")]
    first = [name for name in cells if name.endswith(", plain")]
    assert cells[: len(first)] == first
