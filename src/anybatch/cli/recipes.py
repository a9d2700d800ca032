"""The `anybatch recipes` command."""

from __future__ import annotations

from typing import Annotated

import typer


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE]", help="A recipe or FILE.py, to see its arguments."),
    ] = None,
) -> None:
    """List the ready tasks, or the arguments of one."""
    from rich.console import Console
    from rich.table import Table

    from anybatch.recipes import names, options_of

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=name is not None, header_style="bold")
    if name is None:
        for recipe, description in names().items():
            table.add_row(recipe, description)
    else:
        for column in ("-s", "type", "default", "what it is"):
            table.add_column(column)
        for option in options_of(name):
            default = "required" if option.required else str(option.default)
            table.add_row(option.name, option.type, default, option.doc)
    Console().print(table)
