"""What can be wrong with a run that is to be resumed: told, and what is there stays as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.bad_input.conftest import Outcome, tree
from tests.bad_input.test_commands import check_told

Command = Callable[..., Outcome]
WriteTask = Callable[..., Path]


@pytest.fixture
def run(folder: Path, write_task: WriteTask, command: Command) -> Path:
    """A run of two epochs that failed in its second, with a checkpoint."""
    write_task(
        "seen = []\ndef loss(m, b):\n    seen.append(0)\n"
        "    found = F.mse_loss(m(b[0]), b[1])\n"
        "    return found * float('nan') if len(seen) == 8 else found\n"
    )
    outcome = command("train", "task.py", "-s", "epochs=2", "--out", "run", "--micro-batch", "8")
    assert outcome.status == 2
    assert "the loss of step" in outcome.err
    assert list((folder / "run" / "checkpoints").glob("step-*"))
    write_task("")
    return folder / "run"


def refused(run: Path, command: Command, words: tuple[str, ...], *more: str) -> None:
    before = tree(run)
    outcome = command("train", "task.py", "-s", "epochs=2", "--out", "run", *more)
    assert outcome.status == 2
    check_told(outcome.err, words)
    assert tree(run) == before


def test_it_is_not_overwritten(run: Path, command: Command):
    refused(run, command, ("run", "not finished", "--resume", "another folder"))


def test_another_global_batch(run: Path, command: Command):
    words = ("global_batch was 8 and is 5", "another task")
    refused(run, command, words, "--resume", "--global-batch", "5")


def test_a_global_batch_that_grows(run: Path, command: Command):
    words = ("global_batch was 8 and is '2:8:0.5 with epochs=2'",)
    refused(run, command, words, "--resume", "--global-batch", "2:8:0.5")


def test_other_samples(run: Path, write_task: WriteTask, command: Command):
    write_task("X, Y = X[:30], Y[:30]\n")
    refused(run, command, ("number of training samples was 40 and is 30",), "--resume")


def test_another_model(run: Path, write_task: WriteTask, command: Command):
    write_task("def model(): return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))\n")
    refused(run, command, ("another",), "--resume")


def test_a_finished_run(run: Path, command: Command):
    again = ("train", "task.py", "-s", "epochs=2", "--out", "run", "--resume")
    assert command(*again).status == 0
    refused(run, command, ("global_batch was 8 and is 5",), "--resume", "--global-batch", "5")


def damage(run: Path, how: Callable[[Path], None]) -> None:
    for place in (run / "checkpoints").glob("step-*"):
        how(place)


def flip(place: Path) -> None:
    data = bytearray((place / "rank-0.data").read_bytes())
    data[len(data) // 2] ^= 1
    (place / "rank-0.data").write_bytes(data)


def cut(place: Path) -> None:
    path = place / "rank-0.data"
    path.write_bytes(path.read_bytes()[:-1])


def empty(place: Path) -> None:
    (place / "manifest.json").write_text("")


def lose(place: Path) -> None:
    (place / "rank-0.data").unlink()


def edit(place: Path) -> None:
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["step"] = 3
    (place / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("how", [flip, cut, empty, lose, edit], ids=lambda how: how.__name__)
def test_all_checkpoints_are_damaged(run: Path, command: Command, how: Callable[[Path], None]):
    damage(run, how)
    refused(run, command, ("none of the", "is intact", "another folder"), "--resume")


def test_the_newest_checkpoint_is_damaged(run: Path, command: Command):
    *_, newest = sorted((run / "checkpoints").glob("step-*"))
    shutil.copytree(newest, run / "checkpoints" / "step-00000999")
    outcome = command("train", "task.py", "-s", "epochs=2", "--out", "run", "--resume")
    assert outcome.status == 0
    assert "step-00000999 is not intact" in " ".join(outcome.out.split())


def test_a_damaged_log_is_gone_on_with(run: Path, command: Command):
    log = run / "events.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"kind": "run_started"', b'"kind": "run_stbrted"', 1))
    with pytest.warns(UserWarning, match="1 line is damaged in .* left out: line 1 "):
        outcome = command("train", "task.py", "-s", "epochs=2", "--out", "run", "--resume")
    assert outcome.status == 0
    assert (run / "report.html").exists()


def test_a_folder_without_a_run_begins_anew(write_task: WriteTask, command: Command):
    write_task("")
    outcome = command("train", "task.py", "--out", "new", "--resume")
    assert outcome.status == 0
    assert "5, finished" in outcome.out
