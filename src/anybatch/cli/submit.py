"""The `anybatch submit` command."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Annotated

import typer

from anybatch.cli.options import TaskName, option


def submit(
    task: TaskName,
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTION...]", help="Further options of anybatch train."),
    ] = None,
    slurm: Annotated[
        bool, option("--slurm", "Submit to Slurm, the scheduler that there is.")
    ] = True,
    nodes: Annotated[int, option("--nodes", "Machines.", "N")] = 1,
    ranks_per_node: Annotated[
        int | None,
        option("--ranks-per-node", "Processes on each machine. Default: one per GPU, or one.", "N"),
    ] = None,
    gpus_per_node: Annotated[
        int | None, option("--gpus-per-node", "GPUs on each machine.", "N")
    ] = None,
    cpus_per_rank: Annotated[
        int | None, option("--cpus-per-rank", "Cores for each process.", "N")
    ] = None,
    time: Annotated[
        str | None, option("--time", "As Slurm writes it: 90, 2:00:00, 1-12.", "LIMIT")
    ] = None,
    partition: Annotated[str | None, option("--partition", "Default: Slurm's.", "NAME")] = None,
    job_name: Annotated[
        str | None, option("--job-name", "Default: the task's name.", "NAME")
    ] = None,
    out: Annotated[
        Path | None, option("--out", "Run folder, on a disk that all machines see.", "DIR")
    ] = None,
    requeue: Annotated[
        bool, option("--requeue", "Start the job again when it had to end early.")
    ] = False,
    signal: Annotated[
        str,
        option("--signal", "What ranks are sent how long before the time limit.", "SIGNAL@SECONDS"),
    ] = "TERM@60",
    dry_run: Annotated[
        bool, option("--dry-run", "Print the batch script and submit nothing.")
    ] = False,
) -> None:
    """Submit the training of a task as a Slurm job, one Slurm task per rank."""
    from anybatch.errors import InputError
    from anybatch.launch.slurm import script
    from anybatch.launch.slurm import submit as submit_job
    from anybatch.units import check_count

    words = (time, partition, job_name, signal, str(out or ""), *(options or ()))
    _check_lines(task, *(word for word in words if word))
    _check_task(task)
    if requeue and out is None:
        raise InputError(
            "--requeue is given without --out: name the run folder, so that the job finds its run when"
            " it is started again."
        )
    ranks = (gpus_per_node or 1) if ranks_per_node is None else ranks_per_node
    check_count(nodes, "--nodes")
    check_count(ranks, "--ranks-per-node")
    for name, count in (("--gpus-per-node", gpus_per_node), ("--cpus-per-rank", cpus_per_rank)):
        if count is not None:
            check_count(count, name)
    if gpus_per_node is not None and gpus_per_node < ranks:
        raise InputError(
            f"--gpus-per-node is {gpus_per_node} and --ranks-per-node is {ranks}: each rank needs a GPU"
            " of its own, so ask for as many GPUs, or for fewer ranks."
        )
    arguments = ["train", task, *(options or ())]
    if out is not None:
        arguments += ["--out", str(out)]
    logs = (Path("runs") if out is None else out.parent).absolute() / "slurm"
    given = {
        "job-name": job_name or "-".join(Path(task.partition(":")[0]).stem.split()),
        "nodes": nodes,
        "ntasks-per-node": ranks,
        "gpus-per-node": gpus_per_node,
        "cpus-per-task": cpus_per_rank,
        "time": time,
        "partition": partition,
        "signal": signal,
    }
    text = script(arguments, logs, given, ("--resume",) if requeue else None)
    if dry_run:
        print(text, end="")
        return
    number = submit_job(text, logs)
    print(f"job {number} is submitted; rank 0 writes to {logs / f'{number}_0_log.out'}")


def _check_lines(*values: str) -> None:
    """Raises `InputError` if a value contains a line break or another control character: it could start
    a new line in the batch script, which Slurm might parse as a directive."""
    from anybatch.errors import InputError

    for value in values:
        if any(unicodedata.category(one) in ("Cc", "Zl", "Zp") for one in value):
            raise InputError(
                f"{value!r} has a line break or another control character, which a batch script cannot"
                " hold: leave it out."
            )


def _check_task(task: str) -> None:
    """Raises `InputError` if the job would not find the task. The task's file is not executed, since it
    may depend on something that only the machines of the job have."""
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
