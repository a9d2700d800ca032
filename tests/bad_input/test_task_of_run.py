"""What a user can do wrong in taking up a run: to evaluate it, or to export its weights."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.bad_input.conftest import Outcome, tree
from tests.bad_input.test_commands import check_told

VALID = "CHANGES = dict(valid=TensorDataset(X, Y))\n"


@pytest.fixture
def run(folder: Path, write_task: Callable[..., Path], command: Callable[..., Outcome]) -> Path:
    """A run of five steps, with its checkpoint."""
    write_task(VALID)
    assert command("train", "task.py", "--out", "run").status == 0
    return folder / "run"


@pytest.mark.parametrize(
    ("arguments", "words", "status"),
    [
        ("evaluate", ("RUN", "anybatch evaluate --help"), 2),
        ("evaluate nothing", ("nothing does not exist", "'anybatch train' wrote"), 2),
        ("evaluate .", (". is not a run folder", "events.jsonl", "'anybatch train' wrote"), 2),
        ("evaluate task.py", ("task.py is not a run folder",), 2),
        ("evaluate run --step 3", ("no checkpoint of step 3", "of step 5"), 2),
        ("evaluate run --step -1", ("step is -1", "that was saved"), 2),
        ("evaluate run --step last", ("--step", "'last'"), 2),
        ("evaluate run --memory 12XB", ("'12XB'", "not a size"), 2),
        ("evaluate run --memory 900TiB", ("'900TiB'", "has only"), 2),
        ("evaluate run --memory 256KiB", ("256 KiB", "Give it at least"), 3),
        ("evaluate run --micro-batch 0", ("micro-batch is 0", "at least 1"), 2),
        ("evaluate run --ranks 0", ("ranks is 0", "at least 1"), 2),
        ("evaluate run --ranks 2 --device cpu", ("ranks is 2", "'cpu'", "leave one"), 2),
        ("evaluate run --device h100-80gb", ("'h100-80gb'", "of this machine"), 2),
        ("evaluate run --precision fp7", ("'fp7'", "bf16"), 2),
        ("evaluate run --precision auto", ("'auto'", "leave it out"), 2),
        ("evaluate run --precision tf32", ("tf32", "use fp32"), 2),
        ("evaluate run --task tsk.py", ("'tsk.py'", "does not exist", "'task.py'"), 2),
        ("evaluate run --task task.py:tsk", ("'tsk'", "FILE.py:function, 'task'"), 2),
        ("evaluate run --task digits", ("'digits'", "50,866 parameters", "'task'", "21"), 2),
        ("evaluate run -s epochs", ("'epochs'", "KEY=VALUE"), 2),
        ("evaluate run -s epoch=3", ("'epoch'", "give 'epochs'"), 2),
        ("export", ("RUN", "anybatch export --help"), 2),
        ("export nothing", ("nothing does not exist",), 2),
        ("export run --out weights", ("weights", ".safetensors or .pt", "'torch'"), 2),
        ("export run --out w.pt --format safetensors", ("w.pt", "named as torch"), 2),
        ("export run --format onnx", ("'onnx'", "'torch'"), 2),
        ("export run --format huggingface", ("Sequential", "none of transformers"), 2),
        ("export run --merge", ("'task'", "no adapters", "leave it out"), 2),
        ("export run --dtype fp7", ("'fp7'", "'fp16'"), 2),
        ("export run --step 3", ("no checkpoint of step 3", "of step 5"), 2),
        ("export run --out task.py --format torch", ("task.py is there already", "--force"), 2),
        ("export run --out run/model.safetensors --force", ("a part of the run itself",), 2),
        ("export run --out task.py/w.pt", ("task.py", "ot a directory"), 2),
        ("export run --format huggingface --out run", ("a part of the run itself",), 2),
    ],
)
def test_a_mistake_is_told_and_leaves_nothing(
    arguments: str,
    words: tuple[str, ...],
    status: int,
    run: Path,
    folder: Path,
    command: Callable[..., Outcome],
):
    before = tree(folder)
    outcome = command(*arguments.split())
    assert outcome.status == status, outcome.err
    check_told(outcome.err, words)
    assert not outcome.out
    assert tree(folder) == before


def test_a_run_without_held_out_samples(
    folder: Path, write_task: Callable[..., Path], command: Callable[..., Outcome]
):
    write_task()
    assert command("train", "task.py", "--out", "run").status == 0
    outcome = command("evaluate", "run")
    assert outcome.status == 2
    check_told(outcome.err, ("'task'", "no held-out samples", "--task"))


def test_a_task_of_which_the_run_does_not_tell(
    run: Path, folder: Path, command: Callable[..., Outcome]
):
    lines = []
    for line in (run / "events.jsonl").read_text().splitlines():
        record = json.loads(line)
        record.pop("source", None)
        record.pop("settings", None)
        lines.append(json.dumps(record) + "\n")
    (run / "events.jsonl").write_text("".join(lines))
    outcome = command("evaluate", "run")
    assert outcome.status == 2
    check_told(outcome.err, ("run", "'task'", "--task FILE.py[:function]"))
    assert command("evaluate", "run", "--task", "task.py").status == 0
    assert command("export", "run").status == 0


def test_a_log_with_a_line_that_is_none(run: Path, command: Callable[..., Outcome]):
    log = run / "events.jsonl"
    log.write_text("what is this\n" + log.read_text())
    for name in ("evaluate", "export"):
        with pytest.warns(UserWarning, match=r"1 line is damaged in .* line 1 \("):
            assert command(name, "run").status == 0


def test_weights_that_are_gone_are_taken_from_the_last_checkpoint(
    run: Path, folder: Path, command: Callable[..., Outcome]
):
    (run / "model.safetensors").unlink()
    outcome = command("export", "run")
    assert outcome.status == 0
    assert "step-00000005" in outcome.out
    shutil.rmtree(run / "checkpoints")
    (folder / "run.safetensors").unlink()
    for name in ("evaluate", "export"):
        outcome = command(name, "run")
        assert outcome.status == 2
        check_told(outcome.err, ("weights are gone", "no checkpoint"))
    assert not (folder / "run.safetensors").exists()


def test_what_is_found_is_printed(run: Path, folder: Path, command: Callable[..., Outcome]):
    told = json.loads(
        next(
            line
            for line in (run / "events.jsonl").read_text().splitlines()
            if '"kind": "evaluated"' in line
        )
    )
    found = json.loads(command("evaluate", "run", "--json").out)
    assert found["loss"] == told["loss"]
    assert (found["step"], found["samples"]) == (5, 40)
    shown = command("evaluate", "run", "--step", "5").out
    assert "after step 5, from run/checkpoints/step-00000005" in shown
    assert "predicted" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert command("export", "run", "--dtype", "bf16").out.startswith("run.safetensors: ")
    assert (folder / "run.safetensors").is_file()


# ------------------------------------------------------------------- a folder of somebody else

STRANGE = """
import pathlib
pathlib.Path({mark!r}).touch()
def task(): raise SystemExit
def run(command): pathlib.Path(command).touch()
"""


def name_in_log(run: Path, **fields: object) -> None:
    """Change what the log says that the task was loaded by."""
    log = run / "events.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for record in lines:
        if record["kind"] == "run_started":
            record.update(fields)
    log.write_text("".join(json.dumps(record) + "\n" for record in lines))


def refused(command: Callable[..., Outcome], *words: str) -> None:
    outcome = command("evaluate", "run")
    assert outcome.status == 2
    check_told(outcome.err, ("run", *words, "--task"))


def test_a_file_in_the_folder_itself_is_not_run(
    run: Path, folder: Path, command: Callable[..., Outcome]
):
    mark = folder / "mark"
    helper = run / "helper.py"
    helper.write_text(STRANGE.format(mark=str(mark)))
    digest = hashlib.sha256(helper.read_bytes()).hexdigest()
    for path in (helper, folder / "run" / ".." / "run" / "helper.py"):
        name_in_log(run, source=f"{path}:task", source_sha256=digest)
        refused(command, "helper.py", "lies in that folder")
    (folder / "link.py").symlink_to(helper)
    name_in_log(run, source=f"{folder / 'link.py'}:task", source_sha256=digest)
    refused(command, "helper.py", "lies in that folder")
    assert not mark.exists()


def test_a_file_that_did_not_train_the_run_is_not_run(
    run: Path, folder: Path, command: Callable[..., Outcome]
):
    mark = folder / "mark"
    (folder / "other.py").write_text(STRANGE.format(mark=str(mark)))
    name_in_log(run, source=f"{folder / 'other.py'}:task")
    refused(command, "other.py", "checksum differs")
    name_in_log(run, source_sha256="")
    refused(command, "other.py", "no checksum")
    assert not mark.exists()


def test_a_function_of_an_installed_package_is_not_called(
    run: Path, folder: Path, command: Callable[..., Outcome]
):
    mark = folder / "mark"
    digest = hashlib.sha256(Path(os.__file__).read_bytes()).hexdigest()
    name_in_log(
        run,
        source=f"{os.__file__}:popen",
        source_sha256=digest,
        settings={"cmd": f"touch {mark}"},
    )
    refused(command, "os.py", "installed package")
    assert not mark.exists()


def test_a_file_that_has_changed_is_run_if_the_user_names_it(
    run: Path, folder: Path, command: Callable[..., Outcome]
):
    task = folder / "task.py"
    task.write_text(task.read_text() + "\n# changed\n")
    refused(command, "task.py", "not the one that trained it")
    assert command("evaluate", "run", "--task", "task.py").status == 0
