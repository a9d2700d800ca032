"""anybatch doctor, where torch is broken, so that it is quick: the words, the JSON, the status."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.bad_input.conftest import Outcome
from tests.unit.doctor.conftest import broken_torch as broken_torch

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="by signals")


@pytest.fixture(autouse=True)
def ahead(broken_torch: Callable[[str], Path]) -> Path:
    return broken_torch("raise ImportError('libcudart.so.13: cannot open shared object file')")


def test_a_broken_torch_is_a_finding_and_the_status_is_1(
    folder: Path, command: Callable[..., Outcome]
):
    outcome = command("doctor")
    assert (outcome.status, outcome.err) == (1, "")
    assert "problem  torch               cannot be imported" in outcome.out
    assert "libcudart.so.13" in outcome.out
    assert outcome.out.splitlines()[-1].startswith("1 problem (torch)")
    assert list(folder.iterdir()) == []


def test_packages_that_are_broken_are_told_each_by_its_name(
    ahead: Path, command: Callable[..., Outcome]
):
    """Those too by which the doctor itself looks."""
    broken = ("psutil", "numpy", "jinja2")
    for name in broken:
        (ahead / f"{name}.py").write_text("raise ImportError('half installed')")
    content = json.loads(command("doctor", "--json").out)
    told = {one["name"]: one["remedy"] for one in content["findings"]}
    assert set(broken) <= told.keys()
    assert "psutil" in told["psutil"]
    assert "reinstall the package" in told["cores and memory"]


def test_json_without_a_file_is_all_that_is_printed(command: Callable[..., Outcome]):
    outcome = command("doctor", "--json")
    content = json.loads(outcome.out)
    assert outcome.status == 1
    (found,) = [one for one in content["findings"] if one["level"] == "problem"]
    assert (found["group"], found["name"]) == ("torch", "torch")


def test_json_that_cannot_be_written_is_bad_input(folder: Path, command: Callable[..., Outcome]):
    outcome = command("doctor", "--json", "nowhere/found.json")
    assert outcome.status == 2
    assert "nowhere/found.json" in outcome.sentence
    assert list(folder.iterdir()) == []


def test_json_with_a_file_is_saved_beside_what_is_printed(
    folder: Path, command: Callable[..., Outcome]
):
    outcome = command("doctor", "--json", "found.json")
    assert outcome.out.splitlines()[-1] == "Saved as found.json."
    assert json.loads((folder / "found.json").read_text())["counts"]["problem"] == 1
