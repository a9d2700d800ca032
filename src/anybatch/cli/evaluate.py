"""The `anybatch evaluate` command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from anybatch.cli.options import (
    RunFolder,
    Settings,
    Step,
    TaskOfRun,
    option,
    settings_of,
)
from anybatch.process import libraries

if TYPE_CHECKING:
    from anybatch.events import Event
    from anybatch.runs.evaluate import Evaluation


def evaluate(
    run: RunFolder,
    step: Step = None,
    memory: Annotated[
        str | None,
        option("--memory", "Memory that it may use; enforced. Default: as in the run.", "SIZE"),
    ] = None,
    micro_batch: Annotated[
        int | None,
        option("--micro-batch", "Samples per pass. Default: as in the run, or fewer.", "N"),
    ] = None,
    precision: Annotated[
        str | None, option("--precision", "As for train. Default: that of the run.", "P")
    ] = None,
    ranks: Annotated[
        int | None, option("--ranks", "Processes on this machine. Default: as in the run.", "N")
    ] = None,
    device: Annotated[
        str | None, option("--device", "cpu, cuda or cuda:N of this machine. Default: chosen.", "D")
    ] = None,
    task: TaskOfRun = None,
    settings: Settings = None,
    json: Annotated[
        bool, option("--json", "Print what was found as JSON, and nothing else.")
    ] = False,
) -> None:
    """Evaluate the held-out samples with the weights of a run."""
    with libraries.loading():
        from rich.console import Console

        from anybatch.events import Evaluated
        from anybatch.launch import find
        from anybatch.report import Progress
        from anybatch.report.sentences import compare_peak
        from anybatch.report.tables import Section, print_sections
        from anybatch.report.terminal import comparison_table
        from anybatch.runs.evaluate import evaluate as run_evaluation

    with Progress(Console(stderr=True)) as progress:

        def news(event: Event) -> None:  # `Evaluated` is not shown: its scores are printed below
            if not isinstance(event, Evaluated):
                progress(event)

        found = run_evaluation(
            run,
            task,
            settings=settings_of(settings),
            step=step,
            memory=memory,
            ranks=ranks,
            micro_batch=micro_batch,
            precision=precision,
            device=device,
            sinks=[news],
        )
    member = find()
    if member is not None and member.rank > 0:
        return
    if json:
        from anybatch.events import plain_json

        print(plain_json(_as_dict(found)))
        return
    budget = found.plan.budget_bytes if found.plan.enforced else None
    peaks = compare_peak(found.predicted_peak_bytes, found.measured_peak_bytes, budget)
    sections = [
        Section("Evaluation", pairs=_lines(found)),
        Section("Notices", found.plan.notices),
        Section("Predicted and measured", table=comparison_table([peaks])),
    ]
    print_sections(Console(highlight=False), sections)


def _lines(found: Evaluation) -> list[tuple[str, str]]:
    """The evaluation as rows of (label, text)."""
    from anybatch.report.sentences import counted, format_scores
    from anybatch.units import format_seconds

    plan = found.plan
    ranks = f"{plan.num_ranks} ranks of " if plan.num_ranks > 1 else ""
    return [
        ("task", found.task),
        ("weights", f"after step {found.step:,}, from {found.weights}"),
        ("held-out", f"{format_scores(found)} ({counted(found.samples, 'sample')})"),
        ("time", format_seconds(found.seconds)),
        ("device", f"{ranks}{plan.device_name or plan.device}"),
        ("passes", f"of up to {plan.choice.evaluation_batch} samples, {plan.choice.precision}"),
    ]


def _as_dict(found: Evaluation) -> dict[str, Any]:
    """The evaluation as plain data."""
    plan = found.plan
    return {
        "run": str(found.run),
        "task": found.task,
        "step": found.step,
        "weights": str(found.weights),
        "loss": found.loss,
        "metrics": dict(found.metrics),
        "samples": found.samples,
        "seconds": found.seconds,
        "predicted_peak_bytes": found.predicted_peak_bytes,
        "measured_peak_bytes": found.measured_peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "enforced": plan.enforced,
        "ranks": plan.num_ranks,
        "micro_batch": plan.choice.evaluation_batch,
        "precision": plan.choice.precision,
        "notices": list(plan.notices),
    }
