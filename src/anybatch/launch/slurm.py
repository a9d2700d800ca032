"""A training run as a Slurm job: the batch script, and its submission.

Each task of the job is one rank. It runs the command that a user would type, which finds its
membership by itself, so a job can be read, edited and submitted again by hand.

A job that may be requeued ends early in one of two ways. If it is preempted or its node fails,
Slurm requeues it. Shortly before its time limit, Slurm sends the ranks a signal; they finish their
step, save, and exit together with status 75, and the script then has the job requeued. When the job
is restarted, options that make the run resume are added to the command.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from anybatch.errors import InputError, LaunchError
from anybatch.units import check_count

STOPPED_EARLY = 75
"""Exit status of a run that has saved everything and is to be resumed."""

_SUBMIT_SECONDS = 120
_SIGNAL = re.compile(r"(?:[A-Z][A-Z0-9]*|\d+)@\d+$")
_TIME = re.compile(r"(?:\d+-)?\d+(?::\d{1,2}){0,2}$")


@dataclass(frozen=True, slots=True)
class Job:
    """A job to be submitted.

    Attributes:
        arguments: arguments of `python -m anybatch`, the same for every rank.
        name: name of the job.
        logs: folder for the script and the output of the ranks, visible to all nodes.
        nodes: number of machines.
        ranks_per_node: number of processes on each node.
        gpus_per_node: number of devices on each node, visible to all of its ranks; None requests
            none.
        cpus_per_rank: number of cores for each rank; None leaves it to Slurm.
        time: time limit, in Slurm's format (`90`, `2:00:00`, `1-12`); None: the limit of the
            partition.
        partition: partition of the job; None: Slurm's default.
        requeue: whether the job is restarted after it had to end early.
        signal: signal that ranks are sent before the time limit, and how many seconds before:
            `TERM@60`.
        resume: options added to `arguments` when the job is restarted.
    """

    arguments: tuple[str, ...]
    name: str
    logs: Path
    nodes: int = 1
    ranks_per_node: int = 1
    gpus_per_node: int | None = None
    cpus_per_rank: int | None = None
    time: str | None = None
    partition: str | None = None
    requeue: bool = False
    signal: str = "TERM@60"
    resume: tuple[str, ...] = ()


def script(job: Job) -> str:
    """The batch script of `job`. Raises `InputError` for an invalid attribute."""
    _check(job)
    logs = job.logs.absolute()
    options = {
        "job-name": job.name,
        "output": logs / "%j_0_log.out",
        "open-mode": "append",
        "nodes": job.nodes,
        "ntasks-per-node": job.ranks_per_node,
        "gpus-per-node": job.gpus_per_node,
        "cpus-per-task": job.cpus_per_rank,
        "time": job.time,
        "partition": job.partition,
        "signal": job.signal,
    }
    given = [f"{name}={shlex.quote(str(v))}" for name, v in options.items() if v is not None]
    given.append("requeue" if job.requeue else "no-requeue")
    run = ["srun", "--unbuffered", "--output", str(logs / "%j_%t_log.out")]
    run.append("--kill-on-bad-exit=1")  # otherwise the others would wait for a failed rank
    if job.cpus_per_rank is not None:
        # Since Slurm 22.05, srun does not inherit the job's cores per task.
        run.append(f"--cpus-per-task={job.cpus_per_rank}")
    command = shlex.join([*run, sys.executable, "-u", "-m", "anybatch", *job.arguments])
    lines = ["#!/bin/bash", *(f"#SBATCH --{option}" for option in given), ""]
    if job.resume:
        command += ' "${again[@]}"'
        again = shlex.join(job.resume)
        lines += [
            "again=()",
            f'if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ]; then again=({again}); fi',
        ]
    lines.append(command)
    if job.requeue:
        lines += [
            "status=$?",
            f'if [ "$status" -eq {STOPPED_EARLY} ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
            'exit "$status"',
        ]
    return "\n".join(lines) + "\n"


def submit(job: Job) -> str:
    """Submit `job`, and return its number.

    Raises:
        InputError: Slurm is not installed here, or see `script`.
        LaunchError: Slurm did not accept the job.
    """
    text = script(job)
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise InputError(
            "sbatch cannot be found, so there is no Slurm to submit to: run this on a login node of"
            " the cluster (or load its module), or look at the script with --dry-run."
        )
    job.logs.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            [sbatch, "--parsable"],
            input=text,
            capture_output=True,
            text=True,
            timeout=_SUBMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"sbatch has not answered within {_SUBMIT_SECONDS} s: see whether squeue does, and whether"
            " the job is there, before you submit it again."
        ) from error
    if done.returncode:
        raise LaunchError(
            f"Slurm did not take the job: {_in_words(done.stderr)}. See sinfo for the partitions and"
            " what they have."
        )
    number = done.stdout.strip().partition(";")[0]
    (job.logs / f"{number}_submission.sh").write_text(text, "utf-8")
    return number


def output_of(job: Job, number: str) -> Path:
    """The file that rank 0 of job `number` writes to. The files of the other ranks are in the same
    folder."""
    return job.logs.absolute() / f"{number}_0_log.out"


def _check(job: Job) -> None:
    """Raises `InputError` for the first invalid attribute."""
    counts = {
        "--nodes": job.nodes,
        "--ranks-per-node": job.ranks_per_node,
        "--gpus-per-node": job.gpus_per_node,
        "--cpus-per-rank": job.cpus_per_rank,
    }
    for name, value in counts.items():
        if value is not None:
            check_count(value, name)
    if job.gpus_per_node is not None and job.gpus_per_node < job.ranks_per_node:
        raise InputError(
            f"--gpus-per-node is {job.gpus_per_node} and --ranks-per-node is {job.ranks_per_node}:"
            " each rank needs a GPU of its own, so ask for as many GPUs, or for fewer ranks."
        )
    if not _SIGNAL.match(job.signal):
        raise InputError(
            f"--signal is {job.signal!r}: write a signal's name and how many seconds before the time"
            " limit it is sent, such as TERM@60."
        )
    if job.time is not None and not _TIME.match(job.time):
        raise InputError(
            f"--time is {job.time!r}: write minutes (90), hours (2:00:00) or days (1-12:00:00)."
        )
    for name, text in (("--job-name", job.name), ("--partition", job.partition)):
        if text is not None and (not text or any(c.isspace() for c in text)):
            raise InputError(f"{name} is {text!r}: give a name without spaces.")


def _in_words(output: str) -> str:
    """The error messages of sbatch in one line."""
    lines: Sequence[str] = [line.removeprefix("sbatch: ") for line in output.splitlines()]
    return (
        "; ".join(line.removeprefix("error: ").rstrip(".") for line in lines if line) or "no reason"
    )
