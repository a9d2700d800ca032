"""Where output cannot be written: told before work is done for it, and nothing half-written stays."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.bad_input.conftest import Outcome, tree
from tests.bad_input.test_commands import check_told

from anybatch.events import StepDone
from anybatch.report import read


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mount a file system in memory, with options."""
    mounted: list[Path] = []

    def call(options: str) -> Path:
        place = tmp_path / "mounted"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip("needs the right to mount a file system")
        mounted.append(place)
        return place

    yield call
    for place in mounted:
        subprocess.run(["umount", str(place)], check=True)


def test_a_folder_that_is_read_only(
    mount: Callable[..., Path], write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    place = mount("ro,size=1m")
    write_task("def model(): raise RuntimeError('the folder is looked at first')\n")
    outcome = command("train", "task.py", "--out", str(place / "run"))
    assert outcome.status == 2
    check_told(outcome.err, (str(place / "run"), "Read-only file system", "--out"))
    outcome = command("train", "task.py", "--out", str(place))
    assert outcome.status == 2
    check_told(outcome.err, (str(place), "Read-only file system", "--out"))


@pytest.mark.filterwarnings("ignore:.*so does the log as soon as there is room")
@pytest.mark.parametrize(
    ("size", "what"), [("4k", ""), ("16k", "model.safetensors")], ids=["beginning", "end"]
)
def test_a_disk_without_room_for_the_beginning_or_the_end(
    size: str,
    what: str,
    mount: Callable[..., Path],
    write_task: Callable[..., Path],
    command: Callable[..., Outcome],
):
    place = mount(f"size={size}")
    write_task()
    outcome = command("train", "task.py", "--out", str(place), "-s", "epochs=20")
    assert outcome.status == 2
    check_told(outcome.err, (str(place), "No space left on device", what))
    assert not [name for name in tree(place) if "partial" in name]


def test_training_goes_on_where_a_disk_runs_full(
    mount: Callable[..., Path], write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    """Of the log the beginning fits, and so do the weights once there is room again."""
    place = mount("size=64k")
    fill = f"""
FULL, CALLS = {str(place / "full")!r}, []

def model():
    return nn.Linear(3, 1)

def loss(model, batch):
    if getattr(model.weight, "device", None) is not None and not model.weight.is_meta:
        CALLS.append(1)
    if len(CALLS) == 40:
        with contextlib.suppress(OSError), open(FULL, "wb", buffering=0) as file:
            while file.write(bytes(1024)):
                pass
    if len(CALLS) == 80:
        os.unlink(FULL)
    return F.mse_loss(model(batch[0]), batch[1])
"""
    write_task("import contextlib, os\n" + fill)
    words = ("--checkpoint-every", "never")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        outcome = command("train", "task.py", "--out", str(place), "-s", "epochs=25", *words)
    assert outcome.status == 0, outcome.err
    told = [str(one.message) for one in warned]
    assert (
        sum("Training goes on, and so does the log as soon as there is room" in one for one in told)
        == 1
    )
    assert sum("anybatch report" in one and "writes it later" in one for one in told) == 1
    steps = [event.step for event in read(place / "events.jsonl") if isinstance(event, StepDone)]
    assert 0 < len(steps) < 125
    assert steps[-1] == 125
    assert (place / "model.safetensors").exists()


def test_weights_that_find_no_room_leave_no_part_of_them(
    mount: Callable[..., Path], write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    place = mount("size=1m")
    write_task("def model(): return nn.Linear(3, 400_000)\ndef loss(m, b): return m(b[0]).mean()\n")
    outcome = command("train", "task.py", "--out", str(place))
    assert outcome.status == 2
    check_told(outcome.err, (str(place / "model.safetensors"), "is there room"))
    assert tree(place).keys() == {"plan.json", "events.jsonl", "report.html"}


def test_folders_that_were_made_for_a_bad_input_are_taken_away_again(
    folder: Path, write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    write_task("def model(): pass\n")
    (folder / "mine").mkdir()
    before = tree(folder)
    assert command("train", "task.py", "--out", "mine/a/b").status == 2
    assert command("train", "task.py", "--out", "mine").status == 2
    assert tree(folder) == before


def test_a_folder_of_the_user_keeps_its_files(
    folder: Path, write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    (folder / "mine").mkdir()
    (folder / "mine" / "notes.txt").write_text("keep")
    write_task("def loss(model, batch): return model(batch[0]).mean() * float('nan')\n")
    assert command("train", "task.py", "--out", "mine").status == 2
    assert (folder / "mine" / "notes.txt").read_text() == "keep"


def test_a_failed_run_has_no_weights_of_the_run_before_it(
    folder: Path, write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    write_task()
    assert command("train", "task.py", "--out", "run").status == 0
    assert (folder / "run" / "model.safetensors").exists()
    write_task("def loss(model, batch): return model(batch[0]).mean() * float('nan')\n")
    assert command("train", "task.py", "--out", "run").status == 2
    assert not (folder / "run" / "model.safetensors").exists()
