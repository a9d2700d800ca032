"""The `anybatch report` command."""

from __future__ import annotations

from typing import Annotated

from anybatch.cli.options import RunFolder, option


def report(
    run: RunFolder,
    tensorboard: Annotated[
        str | None,
        option("--tensorboard", "Write a log for TensorBoard instead, by default in RUN.", "[DIR]"),
    ] = None,
) -> None:
    """Write the report of a run anew, from its plan and its events."""
    from anybatch.errors import InputError
    from anybatch.report import output_folder, tensorboard_folder, write, write_tensorboard
    from anybatch.report.folder import EVENTS_FILE, not_a_run

    if not (run / EVENTS_FILE).is_file():
        raise InputError(not_a_run(run))
    log = tensorboard_folder(tensorboard, run)
    if log is None:
        print(write(run))
        return
    with output_folder(log, name="tensorboard"):
        print(write_tensorboard(run / EVENTS_FILE, log))
