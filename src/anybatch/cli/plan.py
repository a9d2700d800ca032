"""The `anybatch plan` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from anybatch.cli.options import (
    DeviceName,
    Devices,
    NormsName,
    PlanningOptions,
    Rehearsal,
    TaskName,
    Why,
    machine_of,
    option,
)
from anybatch.process import libraries


def plan(
    task: TaskName,
    options: PlanningOptions,
    device: DeviceName = None,
    devices: Devices = None,
    norms: NormsName = None,
    rehearsal: Rehearsal = None,
    out: Annotated[Path | None, option("--out", "Save the plan, to be run.", "FILE")] = None,
    json: Annotated[bool, option("--json", "Print the plan as JSON, and nothing else.")] = False,
    plot: Annotated[
        Path | None, option("--plot", "Draw memory against time as an HTML page.", "FILE")
    ] = None,
    why: Why = False,
) -> None:
    """Show how a task would be run, without running it."""
    with libraries.loading():
        from rich.console import Console

        from anybatch.cli.waiting import Waiting
        from anybatch.launch import find
        from anybatch.report import print_plan, write_frontier
        from anybatch.runs.planning import plan as make_plan
        from anybatch.runs.planning import with_norms

    loaded, norms_at = with_norms(options.load(task), norms)
    where = machine_of(device, devices)
    with Waiting("planning:") as waiting:
        chosen = make_plan(
            loaded,
            where,
            **options.of_plan(),
            norms=norms_at,
            frontier=True,
            rehearsal=rehearsal,
            watch=waiting,
        )
    member = find()
    if where is None and member is not None and member.rank > 0:
        return  # all ranks planned together, and only rank 0 prints
    if out is not None:
        chosen.save(out)
    if plot is not None:
        write_frontier(plot, chosen)
    if json:
        print(chosen.to_json(), end="")
        return
    console = Console()
    print_plan(console, chosen, why)
    for file in filter(None, (out, plot)):
        console.print(f"Saved as {file}.", highlight=False)
