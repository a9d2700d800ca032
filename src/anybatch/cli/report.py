"""anybatch report"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
) -> None:
    """Write the report of a run anew, from its plan and its events."""
    from anybatch.errors import InputError
    from anybatch.report import write
    from anybatch.report.folder import EVENTS_FILE

    if not (run / EVENTS_FILE).is_file():
        raise InputError(
            f"{run} is not a run folder, since it has no {EVENTS_FILE}: give the folder that"
            " 'anybatch train' wrote."
        )
    print(write(run))
