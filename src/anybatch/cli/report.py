"""anybatch report"""

from __future__ import annotations

from anybatch.cli.options import RunFolder


def report(run: RunFolder) -> None:
    """Write the report of a run anew, from its plan and its events."""
    from anybatch.errors import InputError
    from anybatch.report import write
    from anybatch.report.folder import EVENTS_FILE
    from anybatch.report.remembered import not_a_run

    if not (run / EVENTS_FILE).is_file():
        raise InputError(not_a_run(run))
    print(write(run))
