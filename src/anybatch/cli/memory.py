"""The `anybatch memory` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from anybatch.cli.options import (
    STANDARD_OUTPUT,
    DeviceName,
    Devices,
    JsonFile,
    PlanningOptions,
    Rehearsal,
    TaskName,
    machine_of,
    option,
)
from anybatch.process import libraries


def memory(
    task: TaskName,
    options: PlanningOptions,
    device: DeviceName = None,
    devices: Devices = None,
    rehearsal: Rehearsal = None,
    json: JsonFile = None,
    html: Annotated[
        Path | None, option("--html", "Save it as a page with a plot over one step.", "FILE")
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
        bool, option("--all", "List every layer, also those that are alike.")
    ] = False,
) -> None:
    """Show where each byte goes: by layer, by kind, and over one step."""
    with libraries.loading():
        from dataclasses import asdict
        from json import dumps

        from rich.console import Console

        from anybatch.cli.waiting import Waiting
        from anybatch.errors import InputError, NoPlanFits
        from anybatch.estimate import subject_of
        from anybatch.launch import find
        from anybatch.machine import Machine
        from anybatch.planner import account, smallest_micro_batch
        from anybatch.process.files import write_whole
        from anybatch.report import print_ledger, write_ledger
        from anybatch.runs.planning import plan as make_plan

    loaded = options.load(task)
    where = machine_of(device, devices) or Machine.here()
    if options.memory is not None:
        where = where.with_budget(options.memory)
    wishes = {**options.of_plan(), "memory": None}  # the budget is set in `where`
    subject = subject_of(loaded)
    notice = ""
    try:
        if device is None and devices is None and find() is None:  # the plan of `anybatch plan`
            with Waiting("planning:") as waiting:
                chosen = make_plan(loaded, **options.of_plan(), rehearsal=rehearsal, watch=waiting)
        else:
            chosen = make_plan(loaded, where, **wishes)
    except NoPlanFits as error:  # the ledger shows why
        notice = str(error)
        wishes["micro_batch"] = smallest_micro_batch(subject)
        chosen = make_plan(loaded, where, **wishes)
    if chosen.prediction is None:
        raise InputError(f"nothing can be accounted for: {' '.join(chosen.notices)}")
    found = account(subject, where, chosen)
    content = {
        "plan": chosen.model_dump(mode="json"),
        "ledger": found.ledger.to_dict(),
        "knobs": [asdict(knob) for knob in found.knobs],
    }
    text = dumps(content, indent=1) + "\n"
    if json not in (None, STANDARD_OUTPUT):
        write_whole(json, text, "the ledger")
    if html is not None:
        write_ledger(html, chosen, found.ledger, found.knobs)
    notice = notice[:1].upper() + notice[1:]
    if json == STANDARD_OUTPUT:
        print(text, end="")
        if notice:
            print(notice, file=sys.stderr)
        return
    console = Console()
    print_ledger(console, chosen, found.ledger, found.knobs, depth, every_layer)
    if notice:
        console.print(notice, highlight=False, soft_wrap=True)
    for file in filter(None, (json, html)):
        console.print(f"Saved as {file}.", highlight=False)
