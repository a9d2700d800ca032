"""The `anybatch verify` command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from anybatch.cli.options import (
    ChunkedLoss,
    GlobalBatch,
    Memory,
    MicroBatch,
    RecomputeNames,
    Settings,
    TaskName,
    load_task,
    option,
)
from anybatch.process import libraries

if TYPE_CHECKING:
    from rich.console import Console

    from anybatch.proof import Verdict


def verify(
    task: TaskName,
    global_batch: GlobalBatch = None,
    memory: Memory = None,
    micro_batch: MicroBatch = None,
    recompute: RecomputeNames = None,
    chunked_loss: ChunkedLoss = None,
    samples: Annotated[
        int | None, option("--samples", "Samples to run both ways. Default: 96.", "N")
    ] = None,
    settings: Settings = None,
) -> None:
    """Prove on a sample of the data that the plan computes the gradient of the whole batch."""
    with libraries.loading():
        from rich.console import Console

        from anybatch.proof import verify as prove
        from anybatch.runs.planning import plan

    loaded = load_task(task, settings, global_batch)
    chosen = plan(
        loaded,
        memory=memory,
        micro_batch=micro_batch,
        recompute=recompute,
        chunked_loss=chunked_loss,
        rehearsal=False,
    )
    verdict = prove(loaded, chosen, samples=samples)
    _show(Console(highlight=False), verdict)
    if not verdict.exact:
        raise typer.Exit(1)


def _show(console: Console, verdict: Verdict) -> None:
    from rich.table import Table

    cut = _lengths(verdict.pieces)
    console.print(
        f"{verdict.num_samples} samples in one piece and as {cut}, in {verdict.dtype}: relative"
        " deviation of the gradient"
    )
    table = Table(box=None, padding=(0, 2, 0, 2), show_header=False)
    for group, deviation in verdict.groups.items():
        table.add_row(group, f"{deviation:.1e}")
    table.add_row("all parameters", f"{verdict.deviation:.1e}", style="bold")
    console.print(table)
    for sentence in (*verdict.notes, *verdict.causes):
        console.print(sentence)
    if verdict.exact:
        apart = ", apart from what the model draws" if verdict.draws else ""
        console.print(
            f"[bold green]Exact{apart}[/]: the pieces compute the gradient of the whole batch."
        )
    else:
        console.print(
            f"[bold red]Not exact[/]: the deviation is above {verdict.tolerance:.0e}, more than"
            " rounding explains."
        )


def _lengths(pieces: tuple[int, ...]) -> str:
    """Description of the sizes of `pieces`: `2 micro-batches of 32 and one of 31`."""
    first, last = pieces[0], pieces[-1]
    if first == last:
        return f"{len(pieces)} micro-batch{'es' if len(pieces) > 1 else ''} of {first}"
    return f"{_lengths(pieces[:-1])} and one of {last}"
