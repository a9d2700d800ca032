"""Terminal output: the plan before the run, the result after it, and scaling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from anybatch.events import Evaluated, RunEnded, RunStarted
from anybatch.insight.scaling import Scaled, efficiency, limit, what_limits
from anybatch.plans import FrontierPoint, Plan
from anybatch.report.choice_table import is_taken, table_of, with_plan
from anybatch.report.sentences import (
    Comparison,
    compare,
    counted,
    format_scores,
    format_speed,
)
from anybatch.report.tables import Section, Table, print_sections
from anybatch.units import format_bytes, format_count, format_seconds


def print_plan(console: Console, plan: Plan, why: bool = False) -> None:
    """Print `plan`, its notices, the trade-off of memory against time, and rejected candidates: the
    most informative one, or all if `why`."""
    lines = plan.explain()
    if plan.prediction is not None and plan.prediction.by_kind:
        place = 1 + next(i for i, (what, _) in enumerate(lines) if what.endswith(" peak"))
        sizes = sorted(plan.prediction.by_kind.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sizes if size)
        lines.insert(place, ("at the peak", parts))
    points = with_plan(plan) if len(plan.frontier) > 1 else []
    shown = _spread(plan, points)
    hidden = len(points) - len(shown)
    more = f" {hidden} more lie{'s' if hidden == 1 else ''} between them." if hidden else ""
    best = f"The best trade-offs, leanest first: nothing else is both smaller and faster.{more}"
    is_traced = any(is_taken(point, plan) for point in plan.frontier)
    if plan.prediction is not None and plan.prediction.rehearsed and is_traced:
        best += " Peaks are those predicted before the rehearsal."
    sections = [
        Section("Plan", pairs=lines),
        Section("Notices", plan.notices),
        Section("Memory against time", [best] if points else (), table=table_of(plan, shown)),
    ]
    if why:
        possible = [candidate for candidate in plan.rejected if candidate.possible]
        sections += [
            Section("Rejected", table=table_of(plan, possible)),
            Section("Reasons", list(dict.fromkeys(_reasons(plan, possible=True)))),
            Section("Not possible", list(dict.fromkeys(_reasons(plan, possible=False)))),
        ]
    elif plan.rejected:
        count = len(plan.rejected)
        of_all = f" (1 of {format_count(count)}; `anybatch plan --why` lists all.)"
        sections.append(Section("Rejected", [_telling(plan) + (of_all if count > 1 else "")]))
    print_sections(console, sections)


def print_result(
    console: Console,
    started: RunStarted,
    ended: RunEnded,
    last_evaluation: Evaluated | None,
    files: Mapping[str, Path],
    batch: Sequence[tuple[str, str]] = (),
    unmeasured: str = "",
) -> None:
    """Print the result of a run: progress and scores, predictions compared with measurements, whether
    the batch was worth it (lines of `insight.noise_text`; if there are none, the reason in
    `unmeasured`), and `files` (description -> path)."""
    folders = {path.parent for path in files.values()}
    common = folders.pop() if len(folders) == 1 else None
    worth = [] if batch or not unmeasured else [unmeasured]
    shown = [(what, path.name if common else str(path)) for what, path in files.items()]
    sections = [
        Section("Result", pairs=_outcome(started, ended, last_evaluation)),
        Section("Predicted and measured", table=comparison_table(compare(ended))),
        Section("Is the batch worth it?", worth, batch),
        Section("Files" if common is None else f"Files in {common}", pairs=shown),
    ]
    print_sections(console, sections)


# ------------------------------------------------------------------------------------- candidates


def _telling(plan: Plan) -> str:
    """Why the most obvious candidate was rejected: the whole batch as one micro-batch if it was
    considered, else the fastest candidate."""
    rejected = [c for c in plan.rejected if c.possible] or plan.rejected
    whole = [c for c in rejected if c.choice.micro_batch == plan.task.global_batch]
    candidate = whole[0] if whole else min(rejected, key=lambda c: c.step_seconds)
    name = candidate.choice.describe().capitalize()
    if whole:
        recompute = candidate.choice.recompute.describe()
        extra = "" if recompute == "none" else f" with recompute {recompute}"
        name = f"The whole batch of {format_count(plan.task.global_batch)} in one piece{extra}"
    peak, budget = candidate.peak_bytes, plan.budget_bytes
    if peak is not None and budget is not None and peak > budget:
        over = format_bytes(peak - budget)
        return f"{name}: predicted peak {format_bytes(peak)}, {over} over the budget."
    return f"{name}: {candidate.reason.rstrip('.')}."


def _spread(plan: Plan, points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """Both ends of `points`, three between them, and the choice of `plan`."""
    last = len(points) - 1
    spread = {round(last * i / 4) for i in range(5)}
    return [one for i, one in enumerate(points) if i in spread or is_taken(one, plan)]


def _reasons(plan: Plan, possible: bool) -> Iterator[str]:
    for candidate in plan.rejected:
        if candidate.possible == possible:
            where = f", {candidate.parallel}" if plan.num_ranks > 1 and candidate.parallel else ""
            yield f"{candidate.choice.describe().capitalize()}{where}: {candidate.reason}."


# ----------------------------------------------------------------------------------------- result


def _outcome(
    started: RunStarted, ended: RunEnded, evaluation: Evaluated | None
) -> list[tuple[str, str]]:
    steps = format_count(ended.steps)
    if started.total_steps is not None and started.total_steps != ended.steps:
        steps += f" of {format_count(started.total_steps)}"
    left_out = f", {ended.num_skipped:,} of them left out" if ended.num_skipped else ""
    why = "finished" if ended.finished else f"stopped: {ended.reason or 'no reason given'}"
    lines = [
        ("task", str(started.task)),
        ("steps", f"{steps}, {why}"),
        ("samples", f"{format_count(ended.samples_seen)}{left_out}"),
        ("time", format_seconds(ended.seconds)),
    ]
    if ended.samples_per_second:
        lines.append(("samples/s", f"{format_speed(ended.samples_per_second)} while training"))
    if ended.step_parts:
        lines.append(("limited by", what_limits(ended.step_parts)))
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


def comparison_table(rows: Iterable[Comparison]) -> Table:
    """A table of predicted and measured values, one comparison per row."""
    titles = ("predicted", "measured", "error", "budget")
    return Table([("", "whole"), *((it, "number") for it in titles)], [*rows])


# ------------------------------------------------------------------------------------------ scaling

_MODEL = (
    "Predicted steps: computing + exchange + update of the plan for so many ranks; computing is"
    " corrected by what was measured, and the exchange is a ring all-reduce over the link that the plan"
    " names."
)


def print_scale(console: Console, rows: Sequence[Scaled], global_batch: int) -> None:
    """Print `rows`, what limits each of them, and how predictions were computed."""
    titles = ("ranks", "step", "samples/s", "exchange", "efficiency")
    cells = [_of_ranks(row, rows, global_batch) for row in rows]
    table = Table([*((it, "number") for it in titles), ("", "whole")], cells)
    limits = [(str(row.ranks), limit(row, rows)) for row in rows]
    is_predicted = any(row.step_seconds and not row.is_measured for row in rows)
    sections = [
        Section(f"A global batch of {format_count(global_batch)} on several ranks", table=table),
        Section("Limited by", pairs=limits),
        Section("Notices", [_MODEL] if is_predicted else ()),
    ]
    print_sections(console, sections)


def _of_ranks(row: Scaled, rows: Sequence[Scaled], global_batch: int) -> tuple[str, ...]:
    if row.step_seconds is None:
        return (format_count(row.ranks), "", "", "", "", "not possible")
    share, part = row.exchange_share or 0.0, efficiency(row, rows)
    return (
        format_count(row.ranks),
        format_seconds(row.step_seconds),
        f"{global_batch / row.step_seconds:,.3g}",
        f"{share:.0%}" if row.ranks > 1 else "",
        "" if part is None else f"{part:.0%}",
        "measured" if row.is_measured else "predicted",
    )
