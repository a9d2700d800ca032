"""Display: a run shown to whoever called `train`: its plan, then how far it is and what happens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from anybatch.events import Event, RunStarted
from anybatch.plans import Plan
from anybatch.report.progress import Progress
from anybatch.report.terminal import print_plan


class Display:
    """A sink that shows what a caller wants to see of a run.

    Args:
        progress: shows all but the plan.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._shown: Plan | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted) and event.plan:
            self.show(Plan.from_json(json.dumps(event.plan)))
        self._progress(event)

    def show(self, plan: Plan) -> None:
        """Show `plan`, unless it was shown last: a run may be started again under it."""
        if plan != self._shown:
            self._progress.screen.write(lambda console: print_plan(console, plan))
            self._shown = plan


@contextmanager
def displayed(wanted: bool) -> Iterator[Display | None]:
    """A display in the notebook's cell that runs now, or on standard error; None unless it is
    `wanted`."""
    if not wanted:
        yield None
        return
    with Progress(Console(stderr=True)) as progress:
        yield Display(progress)
