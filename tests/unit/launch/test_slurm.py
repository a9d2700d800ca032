"""The batch script of a job, and the command that submits it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from anybatch.cli.submit import submit as submit_command
from anybatch.errors import InputError
from anybatch.launch.slurm import script, submit

ARGUMENTS = ("train", "digits", "--out", "runs/a b")
LOGS = Path("logs")


def options(text: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if "#SBATCH" in line]
    return dict(line.split("=", 1) if "=" in line else (line, "") for line in lines)


def command(text: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith("srun")]
    return line


def test_one_task_per_rank_runs_the_command():
    given = {
        "job-name": "digits",
        "nodes": 2,
        "ntasks-per-node": 4,
        "gpus-per-node": 4,
        "cpus-per-task": 8,
        "time": "2:00:00",
        "partition": "long",
        "signal": "TERM@60",
    }
    text = script(ARGUMENTS, LOGS, given)
    found = options(text)
    assert found["nodes"] == "2"
    assert found["ntasks-per-node"] == "4"
    assert found["gpus-per-node"] == "4"
    assert found["cpus-per-task"] == "8"
    assert found["time"] == "2:00:00"
    assert found["partition"] == "long"
    assert found["job-name"] == "digits"
    assert found["signal"] == "TERM@60"
    assert "no-requeue" in found
    assert "requeue" not in found
    assert command(text).endswith(
        f"--cpus-per-task=8 {sys.executable} -u -m anybatch train digits --out 'runs/a b'"
    )
    assert "scontrol" not in text


def test_only_what_was_asked_for_is_asked_of_slurm():
    shown, error = anybatch_submit("digits", "--dry-run")
    assert error is None
    assert options(shown).keys() == {
        *("output", "open-mode", "job-name", "nodes", "ntasks-per-node", "signal", "no-requeue")
    }
    assert options(shown)["signal"] == "TERM@60"
    assert "--cpus-per-task" not in command(shown)


def in_bash(text: str, tmp_path: Path, status: int, restarts: int) -> tuple[int, list[str]]:
    """Status and calls of a script, with stand-ins for Slurm's commands."""
    calls = tmp_path / "calls"
    for name, ends in (("srun", status), ("scontrol", 0)):
        program = tmp_path / name
        program.write_text(f'#!/bin/bash\necho {name} "${{@: -1}}" >> {calls}\nexit {ends}\n')
        program.chmod(0o700)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    done = subprocess.run(["bash", "-c", text], env=environment, check=False)
    return done.returncode, calls.read_text().splitlines()


@pytest.mark.parametrize(
    ("status", "restarts", "calls"),
    [
        (0, 0, ["srun runs/a b"]),
        (1, 0, ["srun runs/a b"]),
        (75, 0, ["srun runs/a b", "scontrol 7"]),
        (0, 1, ["srun --resume"]),
    ],
    ids=["done", "failed", "stopped early", "again"],
)
def test_a_job_that_was_stopped_early_goes_back_into_the_queue(
    status: int, restarts: int, calls: list[str], tmp_path: Path
):
    text = script(ARGUMENTS, LOGS, {}, resume=("--resume",))
    assert in_bash(text, tmp_path, status, restarts) == (status, calls)


def test_without_slurm_there_is_nowhere_to_submit_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="sbatch cannot be found"):
        submit("#!/bin/bash\n", tmp_path / "logs")
    assert not (tmp_path / "logs").exists()


# --------------------------------------------------------------------------------------- the command


def anybatch_submit(*words: str) -> tuple[str, BaseException | None]:
    app = typer.Typer()
    app.command()(submit_command)
    done = CliRunner().invoke(app, words)
    return done.stdout, done.exception


def test_the_script_is_shown_before_it_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    shown, error = anybatch_submit(
        *("digits", "--slurm", "--nodes", "2", "--gpus-per-node", "4", "--dry-run"),
        *("--out", "runs/big", "--", "--memory", "10GiB", "-s", "epochs=3"),
    )
    assert error is None
    assert options(shown)["ntasks-per-node"] == "4"
    assert options(shown)["output"] == f"{tmp_path}/runs/slurm/%j_0_log.out"
    assert command(shown).endswith(
        "-m anybatch train digits --memory 10GiB -s epochs=3 --out runs/big"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("nosuch",), "there is no recipe 'nosuch'"),
        (("gone.py:task",), "there is no file 'gone.py'"),
        (("digits", "--requeue"), "--requeue is given without --out"),
        (("digits", "--gpus-per-node", "2", "--ranks-per-node", "4"), "--gpus-per-node is 2 and"),
        (("digits", "--nodes", "0"), "--nodes is 0"),
        (("digits", "--ranks-per-node", "-1"), "--ranks-per-node is -1"),
        (("digits", "--gpus-per-node", "0"), "--gpus-per-node is 0"),
        (("digits", "--cpus-per-rank", "0"), "--cpus-per-rank is 0"),
    ],
)
def test_mistakes_on_the_command_line_are_named(words: tuple[str, ...], told: str):
    _, error = anybatch_submit(*words, "--dry-run")
    assert isinstance(error, InputError)
    assert told in str(error)
