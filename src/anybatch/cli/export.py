"""The `anybatch export` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from anybatch.cli.options import RunFolder, Settings, Step, TaskOfRun, option, settings_of
from anybatch.process import libraries


def export(
    run: RunFolder,
    out: Annotated[
        Path | None, option("--out", "File or folder. Default: here, named after the run.", "PATH")
    ] = None,
    format: Annotated[
        str | None,
        option("--format", "safetensors, torch or huggingface. Default: by the name.", "F"),
    ] = None,
    step: Step = None,
    dtype: Annotated[
        str | None, option("--dtype", "fp32, bf16 or fp16. Default: as they are.", "T")
    ] = None,
    merge: Annotated[bool, option("--merge", "Add adapters to the weights below them.")] = False,
    force: Annotated[bool, option("--force", "Replace what is there.")] = False,
    task: TaskOfRun = None,
    settings: Settings = None,
) -> None:
    """Write the weights of a run for other programs."""
    with libraries.loading():
        from anybatch.report.sentences import counted
        from anybatch.runs.export import export as take_out
        from anybatch.units import format_bytes

    form: Any = format  # checked in `take_out`, which names the valid values
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
