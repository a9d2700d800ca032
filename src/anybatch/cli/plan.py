"""anybatch plan"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anybatch.cli.options import (
    ChunkedLoss,
    Compile,
    CompileIfFaster,
    DeviceName,
    Devices,
    GlobalBatch,
    Grain,
    Memory,
    MicroBatch,
    NormsName,
    ParallelName,
    PrecisionName,
    RecomputeNames,
    Rehearsal,
    Reproducible,
    Settings,
    ShardOver,
    TaskName,
    Why,
    compile_of,
    load_task,
    machine_of,
)
from anybatch.process import libraries


def plan(
    task: TaskName,
    global_batch: GlobalBatch = None,
    memory: Memory = None,
    device: DeviceName = None,
    devices: Devices = None,
    parallel: ParallelName = None,
    shard_over: ShardOver = None,
    norms: NormsName = None,
    precision: PrecisionName = "fp32",
    micro_batch: MicroBatch = None,
    recompute: RecomputeNames = None,
    chunked_loss: ChunkedLoss = None,
    compile: Compile = False,
    compile_if_faster: CompileIfFaster = False,
    reproducible: Reproducible = False,
    grain: Grain = None,
    rehearsal: Rehearsal = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Save the plan, to be run.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the plan as JSON, and nothing else.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw memory against time as an HTML page."),
    ] = None,
    settings: Settings = None,
    why: Why = False,
) -> None:
    """Show how a task would be run, without running it."""
    with libraries.loading():
        from rich.console import Console

        from anybatch.cli.waiting import Waiting
        from anybatch.launch import find
        from anybatch.plans import parse_parallel, parse_sharding
        from anybatch.report import print_plan, write_frontier
        from anybatch.runs.planning import plan as make_plan
        from anybatch.runs.planning import with_norms

    loaded, norms_at = with_norms(
        load_task(task, settings, global_batch, reproducible, grain), norms
    )
    where = machine_of(device, devices)
    with Waiting("planning:") as waiting:
        chosen = make_plan(
            loaded,
            where,
            memory=memory,
            parallel=parse_parallel(parallel),
            sharding=parse_sharding(shard_over),
            norms=norms_at,
            precision=precision,
            micro_batch=micro_batch,
            recompute=recompute,
            chunked_loss=chunked_loss,
            compile=compile_of(compile, compile_if_faster),
            frontier=True,
            rehearsal=rehearsal,
            watch=waiting,
        )
    member = find()
    if where is None and member is not None and member.rank > 0:
        return  # all ranks have planned together, and one tells
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
