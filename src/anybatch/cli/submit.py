"""anybatch submit"""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Annotated

import typer

from anybatch.cli.options import TaskName


def submit(
    task: TaskName,
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTION...]", help="Further options of anybatch train."),
    ] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Submit to Slurm, the scheduler that there is.")
    ] = True,
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", help="Machines.")] = 1,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            "--ranks-per-node",
            metavar="N",
            help="Processes on each machine. Default: one per GPU, or one.",
        ),
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", metavar="N", help="GPUs on each machine.")
    ] = None,
    cpus_per_rank: Annotated[
        int | None, typer.Option("--cpus-per-rank", metavar="N", help="Cores for each process.")
    ] = None,
    time: Annotated[
        str | None,
        typer.Option("--time", metavar="LIMIT", help="As Slurm writes it: 90, 2:00:00, 1-12."),
    ] = None,
    partition: Annotated[
        str | None, typer.Option("--partition", metavar="NAME", help="Default: Slurm's.")
    ] = None,
    job_name: Annotated[
        str | None, typer.Option("--job-name", metavar="NAME", help="Default: the task's name.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Run folder, on a disk that all machines see."),
    ] = None,
    requeue: Annotated[
        bool, typer.Option("--requeue", help="Start the job again when it had to end early.")
    ] = False,
    signal: Annotated[
        str,
        typer.Option(
            "--signal",
            metavar="SIGNAL@SECONDS",
            help="What ranks are sent how long before the time limit.",
        ),
    ] = "TERM@60",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the batch script and submit nothing.")
    ] = False,
) -> None:
    """Submit the training of a task as a Slurm job, one Slurm task per rank."""
    from anybatch.errors import InputError
    from anybatch.launch.slurm import Job, output_of, script
    from anybatch.launch.slurm import submit as submit_job

    _check_lines(task, str(out or ""), *(options or ()))
    _check_task(task)
    if requeue and out is None:
        raise InputError(
            "--requeue is given without --out: name the run folder, so that the job finds its run when"
            " it is started again."
        )
    arguments = ["train", task, *(options or ())]
    if out is not None:
        arguments += ["--out", str(out)]
    job = Job(
        arguments=tuple(arguments),
        name=job_name or _name_of(task),
        logs=(Path("runs") if out is None else out.parent) / "slurm",
        nodes=nodes,
        ranks_per_node=(gpus_per_node or 1) if ranks_per_node is None else ranks_per_node,
        gpus_per_node=gpus_per_node,
        cpus_per_rank=cpus_per_rank,
        time=time,
        partition=partition,
        requeue=requeue,
        signal=signal,
        resume=("--resume",) if requeue else (),
    )
    if dry_run:
        print(script(job), end="")
        return
    number = submit_job(job)
    print(f"job {number} is submitted; rank 0 writes to {output_of(job, number)}")


def _check_lines(*values: str) -> None:
    """Raises `InputError` for what would begin a line of its own in the batch script, which Slurm might
    read as one of its directives."""
    from anybatch.errors import InputError

    for value in values:
        if any(unicodedata.category(one) in ("Cc", "Zl", "Zp") for one in value):
            raise InputError(
                f"{value!r} has a line break or another control character, which a batch script cannot"
                " hold: leave it out."
            )


def _check_task(task: str) -> None:
    """Raises `InputError` for a task that the job would not find. What is in the file is not run: it
    may need what only the machines of the job have."""
    from anybatch.errors import InputError, listed
    from anybatch.recipes import names

    file = task.rpartition(":")[0] if ".py:" in task else task
    if file.endswith(".py"):
        if not Path(file).is_file():
            raise InputError(f"there is no file {file!r}: give the path of the task's file.")
    elif task not in names():
        raise InputError(
            f"there is no recipe {task!r}: give {listed(names())}, or a file of your own as FILE.py or"
            " FILE.py:function."
        )


def _name_of(task: str) -> str:
    return "-".join(Path(task.partition(":")[0]).stem.split())
