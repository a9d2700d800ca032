"""The `anybatch scale` command."""

from __future__ import annotations

from typing import Annotated

from anybatch.cli.options import (
    DeviceName,
    GlobalBatch,
    Memory,
    ParallelName,
    PrecisionName,
    Settings,
    TaskName,
    load_task,
    machine_of,
    option,
)
from anybatch.errors import InputError
from anybatch.process import libraries


def scale(
    task: TaskName,
    ranks: Annotated[str, option("--ranks", "Numbers of ranks to compare.", "N,N,...")] = "1,2,4",
    global_batch: GlobalBatch = None,
    memory: Memory = None,
    precision: PrecisionName = "fp32",
    parallel: ParallelName = None,
    device: DeviceName = None,
    steps: Annotated[int, option("--steps", "Steps to run for each number of ranks.", "N")] = 12,
    json: Annotated[bool, option("--json", "Print the rows as JSON, and nothing else.")] = False,
    settings: Settings = None,
) -> None:
    """Show how long a step takes on several numbers of ranks, and what limits it."""
    with libraries.loading():
        from dataclasses import asdict
        from json import dumps

        from rich.console import Console

        from anybatch.cli.waiting import Waiting
        from anybatch.data import largest_batch
        from anybatch.plans import parse_parallel
        from anybatch.report import print_scale
        from anybatch.runs.scale import scale as measure

    counts = _counts(ranks)
    way = parse_parallel(parallel)
    loaded = load_task(task, settings, global_batch)
    with Waiting("running or predicting:") as waiting:
        rows = measure(
            loaded,
            counts,
            machine_of(device, None),
            memory=memory,
            precision=precision,
            parallel=way,
            steps=steps,
            watch=waiting,
        )
    if json:
        print(dumps([{**asdict(row), "plan": row.plan and row.plan.model_dump()} for row in rows]))
        return
    print_scale(Console(), rows, largest_batch(loaded))


def _counts(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise InputError(
            f"--ranks is {text!r}: give numbers of ranks separated by commas, such as 1,2,4."
        ) from None
