"""The `anybatch doctor` command."""

from __future__ import annotations

import typer

from anybatch.cli.options import STANDARD_OUTPUT, JsonFile


def doctor(json: JsonFile = None) -> None:
    """Look at this machine: what is here to train with, what is wrong, and the remedy."""
    from json import dumps

    from rich.console import Console

    from anybatch.cli.waiting import Waiting
    from anybatch.doctor import examine
    from anybatch.process.files import write_whole

    with Waiting("Looking at this machine ..."):
        report = examine()
    text = dumps(report.to_dict(), indent=1) + "\n"
    if json not in (None, STANDARD_OUTPUT):
        write_whole(json, text, "the findings")
    if json == STANDARD_OUTPUT:
        print(text, end="")
    else:
        console = Console(highlight=False, markup=False)
        report.print(console)
        if json is not None:
            console.print(f"Saved as {json}.", soft_wrap=True)
    if report.named("problem"):
        raise typer.Exit(1)
