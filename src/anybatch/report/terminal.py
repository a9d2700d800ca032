"""Tables for the terminal: the plan before the run, the result after it.

They are read at 80 columns, in logs and without colour, so structure comes from words, space and
alignment; colour only repeats it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from anybatch.events import Evaluated, RunEnded, RunStarted
from anybatch.plans import Candidate, Plan
from anybatch.report.sentences import compare, counted, format_scores
from anybatch.units import format_bytes, format_count, format_seconds


def print_plan(console: Console, plan: Plan, why: bool = False) -> None:
    """Print `plan`, its notices, and what was not taken: the most telling candidate, or with `why`
    all of them."""
    lines = plan.explain()
    if plan.prediction is not None and plan.prediction.by_kind:
        place = [what for what, _ in lines].index("predicted peak") + 1
        lines.insert(place, ("at the peak", _by_kind(plan.prediction.by_kind)))
    print_section(console, "Plan", pairs(lines))
    if plan.notices:
        print_section(console, "Notices", _bullets(plan.notices))
    if not plan.rejected:
        return
    if why:
        print_section(console, "Not taken", _candidates(plan))
    else:
        sentence = _telling(plan)
        if len(plan.rejected) > 1:
            sentence += f" One of {format_count(len(plan.rejected))} candidates not taken."
        print_section(console, "Not taken", _bullets([sentence]))


def print_result(
    console: Console,
    started: RunStarted,
    ended: RunEnded,
    last_evaluation: Evaluated | None,
    files: Mapping[str, Path],
) -> None:
    """Print what came of a run: how far and how well, predicted beside measured, and `files` (what
    a file is -> where it is)."""
    print_section(console, "Result", pairs(_outcome(started, ended, last_evaluation)))
    print_section(console, "Predicted and measured", _predicted_and_measured(ended))
    if files:
        folders = {path.parent for path in files.values()}
        common = folders.pop() if len(folders) == 1 else None
        title = "Files" if common is None else f"Files in {common}"
        shown = [(what, path.name if common else str(path)) for what, path in files.items()]
        print_section(console, title, pairs(shown))


def print_section(console: Console, title: str, body: Table) -> None:
    # A console without width of its own (a file, a pipe) has 80 columns.
    console.print(Text(title, "bold"), soft_wrap=True)
    console.print(Padding(body, (0, 0, 0, 2), expand=False))
    console.print()


def pairs(lines: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for what, how in lines:
        table.add_row(Text(what), Text(how))
    return table


def _bullets(sentences: Iterable[str]) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="yellow", no_wrap=True)
    table.add_column(overflow="fold")
    for sentence in sentences:
        table.add_row("*", Text(sentence))
    return table


def _by_kind(num_bytes: Mapping[str, int]) -> str:
    largest_first = sorted(num_bytes.items(), key=lambda item: -item[1])
    return ", ".join(f"{kind} {format_bytes(size)}" for kind, size in largest_first if size)


# ------------------------------------------------------------------------------------- candidates


def _telling(plan: Plan) -> str:
    """Why not the obvious: the whole batch in one piece where it was weighed, else the fastest."""
    whole = [c for c in plan.rejected if c.choice.micro_batch == plan.task.global_batch]
    # The user's own first thought is the batch as it is, with nothing computed twice.
    plain = [c for c in whole if c.choice.recompute.describe() == "none"]
    if whole:
        candidate = (plain or whole)[0]
        extra = "" if plain else f" with recompute {candidate.choice.recompute.describe()}"
        name = f"The whole batch of {format_count(plan.task.global_batch)} in one piece{extra}"
    else:
        candidate = min(plan.rejected, key=lambda c: c.step_seconds)
        name = candidate.choice.describe().capitalize()
    over = candidate.peak_bytes - plan.budget_bytes if plan.budget_bytes else 0
    if over > 0:
        return (
            f"{name}: predicted peak {format_bytes(candidate.peak_bytes)},"
            f" {format_bytes(over)} more than the budget."
        )
    return f"{name}: {candidate.reason.rstrip('.')}."


def _candidates(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    varied = len({c.choice.precision for c in plan.rejected} | {plan.choice.precision}) > 1
    table.add_column("micro-batch", justify="right", no_wrap=True)
    if varied:
        table.add_column("precision", no_wrap=True)
    table.add_column("recompute", overflow="fold", max_width=24)
    table.add_column("peak", justify="right", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("reason", overflow="fold", min_width=16)
    for candidate in plan.rejected:
        table.add_row(*_cells(candidate, varied))
    return table


def _cells(candidate: Candidate, with_precision: bool) -> list[Text]:
    choice = candidate.choice
    return [
        Text(format_count(choice.micro_batch)),
        *([Text(choice.precision)] if with_precision else []),
        Text(choice.recompute.describe()),
        Text(format_bytes(candidate.peak_bytes)),
        Text(format_seconds(candidate.step_seconds)),
        Text(candidate.reason),
    ]


# ----------------------------------------------------------------------------------------- result


def _outcome(
    started: RunStarted, ended: RunEnded, evaluation: Evaluated | None
) -> list[tuple[str, str]]:
    steps = format_count(ended.steps)
    if started.total_steps is not None and started.total_steps != ended.steps:
        steps += f" of {format_count(started.total_steps)}"
    why = "finished" if ended.finished else f"stopped: {ended.reason or 'no reason given'}"
    lines = [
        ("task", str(started.task)),
        ("steps", f"{steps}, {why}"),
        ("samples", format_count(ended.samples_seen)),
        ("time", format_seconds(ended.seconds)),
    ]
    if ended.step_seconds and ended.steps:
        speed = ended.samples_seen / ended.steps / ended.step_seconds
        lines.append(("samples/s", f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"))
    if evaluation is None:
        lines.append(("held-out", "not evaluated"))
    else:
        where = "" if evaluation.step == ended.steps else f", after step {evaluation.step:,}"
        lines.append(
            (
                "held-out",
                f"{format_scores(evaluation)} ({counted(evaluation.samples, 'sample')}{where})",
            )
        )
    return lines


def _predicted_and_measured(ended: RunEnded) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("", style="dim", no_wrap=True)
    for title in ("predicted", "measured", "error", "budget"):
        table.add_column(title, justify="right", no_wrap=True, min_width=10)
    rows = compare(
        predicted_peak_bytes=ended.predicted_peak_bytes,
        measured_peak_bytes=ended.measured_peak_bytes,
        budget_bytes=ended.budget_bytes,
        predicted_step_seconds=ended.predicted_step_seconds,
        measured_step_seconds=ended.step_seconds,
    )
    for row in rows:
        table.add_row(row.what, row.predicted, row.measured, row.error, row.budget)
    return table
