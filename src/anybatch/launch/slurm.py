"""A training run as a Slurm job: the batch script, and its submission.

Each task of the job is one rank. It runs the command that a user would type, which finds its
membership by itself, so a job can be read, edited and submitted again by hand.

A job that may be requeued ends early in one of two ways. If it is preempted or its node fails,
Slurm requeues it. Shortly before its time limit, Slurm sends the ranks a signal; they finish their
step, save, and exit together with status 75, and the script then has the job requeued. When the job
is restarted, options that make the run resume are added to the command.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from anybatch.errors import InputError, LaunchError

STOPPED_EARLY = 75
"""Exit status of a run that has saved everything and is to be resumed."""

_SUBMIT_SECONDS = 120


def script(
    arguments: Sequence[str],
    logs: Path,
    options: Mapping[str, object],
    resume: Sequence[str] | None = None,
) -> str:
    """The batch script of a job.

    Args:
        arguments: arguments of `python -m anybatch`, the same for every rank.
        logs: folder for the script and the output of the ranks, visible to all nodes.
        options: options of sbatch by name, checked by sbatch; None leaves an option out.
        resume: options added to `arguments` when the job is restarted after it had to end early;
            None: it is not restarted.
    """
    logs = logs.absolute()
    options = {"output": logs / "%j_0_log.out", "open-mode": "append", **options}
    given = [f"{name}={shlex.quote(str(v))}" for name, v in options.items() if v is not None]
    given.append("no-requeue" if resume is None else "requeue")
    run = ["srun", "--unbuffered", "--output", str(logs / "%j_%t_log.out")]
    run.append("--kill-on-bad-exit=1")  # otherwise the others would wait for a failed rank
    if options.get("cpus-per-task") is not None:
        # Since Slurm 22.05, srun does not inherit the job's cores per task.
        run.append(f"--cpus-per-task={options['cpus-per-task']}")
    command = shlex.join([*run, sys.executable, "-u", "-m", "anybatch", *arguments])
    lines = ["#!/bin/bash", *(f"#SBATCH --{option}" for option in given), ""]
    if resume is None:
        lines.append(command)
    else:
        lines += [
            "again=()",
            f'if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ]; then again=({shlex.join(resume)}); fi',
            command + ' "${again[@]}"',
            "status=$?",
            f'if [ "$status" -eq {STOPPED_EARLY} ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
            'exit "$status"',
        ]
    return "\n".join(lines) + "\n"


def submit(text: str, logs: Path) -> str:
    """Submit the batch script `text`, store it in `logs`, and return the number of the job.

    Raises:
        InputError: Slurm is not installed here.
        LaunchError: Slurm did not accept the job.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise InputError(
            "sbatch cannot be found, so there is no Slurm to submit to: run this on a login node of"
            " the cluster (or load its module), or look at the script with --dry-run."
        )
    logs.mkdir(parents=True, exist_ok=True)
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
            f"Slurm did not take the job: {' '.join(done.stderr.split()) or 'no reason'} (sinfo shows"
            " the partitions and what they have)."
        )
    number = done.stdout.strip().partition(";")[0]
    (logs / f"{number}_submission.sh").write_text(text, "utf-8")
    return number
