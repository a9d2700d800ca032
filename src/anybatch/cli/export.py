"""anybatch export"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from anybatch.cli.options import RunFolder, Settings, Step, TaskOfRun, settings_of
from anybatch.process import libraries


def export(
    run: RunFolder,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="PATH", help="File or folder. Default: here, named after the run."
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="F",
            help="safetensors, torch or huggingface. Default: as the name says, or safetensors.",
        ),
    ] = None,
    step: Step = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="T", help="fp32, bf16 or fp16. Default: as they are."),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Add adapters to the weights below them.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    task: TaskOfRun = None,
    settings: Settings = None,
) -> None:
    """Write the weights of a run for other programs."""
    with libraries.loading():
        from anybatch.report.sentences import counted
        from anybatch.runs.export import export as take_out
        from anybatch.units import format_bytes

    form: Any = format  # what else it may be, is told there
    kind: Any = dtype
    done = take_out(
        run,
        out,
        step=step,
        format=form,
        dtype=kind,
        merge=merge,
        force=force,
        task=task,
        settings=settings_of(settings),
    )
    print(
        f"{done.path}: {done.format}, {counted(done.num_tensors, 'tensor')},"
        f" {format_bytes(done.num_bytes)}; weights after step {done.step:,}, from {done.source}"
    )
