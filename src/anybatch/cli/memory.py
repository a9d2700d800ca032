"""anybatch memory"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from anybatch.cli.bare import STANDARD_OUTPUT, JsonFile
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
    ParallelName,
    PrecisionName,
    RecomputeNames,
    Reproducible,
    Settings,
    ShardOver,
    TaskName,
    compile_of,
    load_task,
    machine_of,
)
from anybatch.process import libraries


def memory(
    task: TaskName,
    global_batch: GlobalBatch = None,
    memory: Memory = None,
    device: DeviceName = None,
    devices: Devices = None,
    precision: PrecisionName = "fp32",
    micro_batch: MicroBatch = None,
    recompute: RecomputeNames = None,
    chunked_loss: ChunkedLoss = None,
    compile: Compile = False,
    compile_if_faster: CompileIfFaster = False,
    reproducible: Reproducible = False,
    grain: Grain = None,
    parallel: ParallelName = None,
    shard_over: ShardOver = None,
    json: JsonFile = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Save it as a page with plots.")
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option(
            "--depth",
            metavar="N",
            min=0,
            help="Levels of layers to unfold. Default: as fits a page.",
        ),
    ] = None,
    every_layer: Annotated[
        bool, typer.Option("--all", help="List every layer, also those that are alike.")
    ] = False,
    settings: Settings = None,
) -> None:
    """Show where each byte goes: by layer, by kind, and over one step."""
    with libraries.loading():
        from dataclasses import asdict
        from json import dumps

        from rich.console import Console

        from anybatch.errors import InputError, NoPlanFits
        from anybatch.estimate import subject_of
        from anybatch.machine import Machine
        from anybatch.planner import account, smallest_micro_batch
        from anybatch.plans import parse_parallel, parse_sharding
        from anybatch.process.files import write_whole
        from anybatch.report import print_ledger, write_ledger
        from anybatch.runs.planning import plan as make_plan

    loaded = load_task(task, settings, global_batch, reproducible, grain)
    where = machine_of(device, devices) or Machine.here()
    if memory is not None:
        where = where.with_budget(memory)
    wishes = {
        "precision": precision,
        "recompute": recompute,
        "chunked_loss": chunked_loss,
        "parallel": parse_parallel(parallel),
        "sharding": parse_sharding(shard_over),
        "compile": compile_of(compile, compile_if_faster),
    }
    subject = subject_of(loaded)
    notice = ""
    try:
        chosen = make_plan(loaded, where, micro_batch=micro_batch, **wishes)
    except NoPlanFits as error:  # all the more reason to see where the bytes go
        notice = str(error)
        chosen = make_plan(loaded, where, micro_batch=smallest_micro_batch(subject), **wishes)
    if chosen.prediction is None:
        raise InputError(f"nothing can be accounted for: {' '.join(chosen.notices)}")
    found = account(subject, where, chosen)
    content = {
        "plan": chosen.model_dump(mode="json"),
        "ledger": found.ledger.to_dict(),
        "knobs": [asdict(knob) for knob in found.knobs],
        "in_use": [asdict(knob) for knob in found.in_use],
    }
    text = dumps(content, indent=1) + "\n"
    if json not in (None, STANDARD_OUTPUT):
        write_whole(json, text, "the ledger")
    if html is not None:
        write_ledger(html, chosen, found.ledger, found.knobs, found.in_use)
    notice = notice[:1].upper() + notice[1:]
    if json == STANDARD_OUTPUT:
        print(text, end="")
        if notice:
            print(notice, file=sys.stderr)
        return
    console = Console()
    print_ledger(console, chosen, found.ledger, found.knobs, found.in_use, depth, every_layer)
    if notice:
        console.print(notice, highlight=False, soft_wrap=True)
    for file in filter(None, (json, html)):
        console.print(f"Saved as {file}.", highlight=False)
