"""The report of a run: one HTML page that works offline, generated from the run folder alone.

Figures are embedded, and the page's content security policy forbids it to load external resources, so
a report sent by mail looks the same years later and does not reveal that it was opened.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

import jinja2
import numpy as np

from anybatch.events import Event, Rebalanced, Replanned, RunEnded
from anybatch.insight.noise_series import in_unit_of_batch
from anybatch.insight.noise_text import lines, mean_batch, unmeasured
from anybatch.plans import Plan
from anybatch.process.files import write_whole
from anybatch.report import figures
from anybatch.report.choice_table import table_of
from anybatch.report.log import iterate
from anybatch.report.plot import draw
from anybatch.report.record import Record
from anybatch.report.sentences import (
    MISSING,
    compare,
    describe,
    format_number,
    format_speed,
    scores,
    severity,
)
from anybatch.report.tables import Section, Table, Tag
from anybatch.report.terminal import comparison_table
from anybatch.units import format_bytes, format_count, format_seconds

MAX_EVENTS = 400
"""Maximum number of rows in the table of events. If a run has more events, the first and last are
shown."""


def write(folder: str | os.PathLike[str]) -> Path:
    """Write `report.html` to the run's `folder` atomically, and return its path.

    Reads `plan.json` and `events.jsonl`. Raises `InputError` if they cannot be read, or the page
    cannot be written.
    """
    run = Path(folder)
    plan = Plan.load(run / "plan.json")
    record = Record(iterate(run / "events.jsonl"))
    ended, started = record.ended, record.starts[0] if record.starts else None
    if ended is None:
        outcome = Tag("no end recorded: the run was killed, or is still going", "warn")
    elif ended.finished:
        outcome = Tag("finished", "good")
    else:
        outcome = Tag(f"stopped early: {ended.reason or 'no reason given'}", "warn")
    resumed = len(record.starts) - 1
    facts = [
        started.device if started else plan.device_name or plan.device,
        _moment(started.time) if started else "",
        "" if resumed < 1 else "resumed once" if resumed == 1 else f"resumed {resumed:,} times",
    ]
    page = render(
        started.task if started else plan.task.name,
        facts,
        _tiles(plan, record),
        _sections(plan, record),
        outcome,
    )
    return write_whole(run / "report.html", page, "the report")


def render(
    title: str,
    facts: Sequence[str],
    tiles: Sequence[tuple[str, str, str]],
    sections: Sequence[Section],
    outcome: Tag | None = None,
) -> str:
    """Render a page. The page's script reads the data of the figures.

    Args:
        title: shown at the top, followed by the `facts` that are not empty and the `outcome`.
        tiles: key figures, as (label, figure, remark).
        sections: those that are empty are omitted.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("anybatch.report", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    shown = [section for section in sections if not section.is_empty]
    figures = [figure for section in shown for figure in section.figures]
    return environment.get_template("page.html.jinja").render(
        title=title,
        facts=facts,
        tiles=tiles,
        sections=shown,
        outcome=outcome,
        draw=draw,
        specs={figure.id: dataclasses.asdict(figure) for figure in figures},
    )


def _sections(plan: Plan, record: Record) -> list[Section]:
    noise = record.noise()
    size = mean_batch(plan, in_unit_of_batch(noise)[0])
    batch = lines(plan, noise)
    reason = [] if batch else [unmeasured(plan, record.num_steps)]
    method = plan.prediction.method if plan.prediction else ""
    replanned = any(isinstance(event, Replanned) for event in record.others)
    memory = figures.memory(plan, _measured_peak(record), replanned)
    loss, metrics = figures.loss(record), figures.metrics(record)
    if not record.evaluations:
        scored = ["No held-out samples were evaluated."]
    else:
        scored = [] if metrics else ["The task has no metrics besides its loss."]
    compared = table_of(plan, plan.rejected)
    reasons = [[*row, c.reason] for row, c in zip(compared.rows, plan.rejected, strict=True)]
    rejected = Table([*compared.columns, ("reason", "words")], reasons)
    notices = [*plan.notices, *(notice for start in record.starts for notice in start.notices)]
    return [
        Section("Plan", pairs=plan.explain()),
        Section("Notices", _each_once(notices)),
        Section(
            "Predicted and measured",
            [f"Predicted by: {method}"] if method else [],
            table=_comparisons(plan, record),
        ),
        Section("Memory", figures=memory, table=_memory_parts(plan)),
        Section("Loss", [] if loss else ["No step was committed."], figures=loss),
        Section("Metrics", scored, figures=metrics),
        Section(
            "Speed and optimisation",
            figures=[*figures.speed(record), *figures.optimisation(record)],
        ),
        Section(
            "Is the batch worth it?",
            reason,
            batch,
            figures.noise_scale(noise, size, " on average" if plan.task.batch_rule else ""),
        ),
        Section("Events", table=_events(record)),
        Section(
            "Candidates",
            figures=figures.candidates(plan),
            more=("All candidates not taken", rejected),
        ),
        Section("How it was run", pairs=_how_it_was_run(record)),
    ]


def _tiles(plan: Plan, record: Record) -> list[tuple[str, str, str]]:
    tiles: list[tuple[str, str, str]] = []
    if record.evaluations:
        last = record.evaluations[-1]
        metrics_first = sorted(scores(last).items(), key=lambda item: item[0] == "loss")
        remark = f"after step {format_count(last.step)}"
        tiles += [(f"held-out {name}", text, remark) for name, text in metrics_first[:4]]
    elif record.num_steps:
        tiles.append(
            ("training loss", format_number(float(record.column("loss")[-1])), "last step")
        )
    total = record.starts[-1].total_steps if record.starts else None
    done = record.ended.steps if record.ended else 0
    done = int(record.column("step")[-1]) if record.num_steps else done
    tiles.append(
        ("steps", format_count(done), "" if total is None else f"of {format_count(total)}")
    )
    tiles.append(("time", format_seconds(record.seconds), ""))
    seconds = record.column("seconds")
    if seconds.sum() > 0:
        speed = float(record.column("samples").sum() / seconds.sum())
        tiles.append(("samples/s", format_speed(speed), "while training"))
        waiting = float(record.column("data_seconds").sum() / seconds.sum())
        if waiting > figures.WORTH_TELLING:
            tiles.append(("waiting", f"{waiting:.0%}", "of a step, for samples"))
    peak = _measured_peak(record)
    if peak:
        budget = plan.budget_bytes if plan.enforced else None
        tiles.append(
            ("peak memory", format_bytes(peak), f"of {format_bytes(budget)}" if budget else "")
        )
    return tiles


def _measured_peak(record: Record) -> int | None:
    steps = [int(record.column("memory_bytes").max())] if record.num_steps else []
    return max([*steps, *(end.measured_peak_bytes for end in record.ends)], default=None)


def _comparisons(plan: Plan, record: Record) -> Table:
    seconds, waited, prediction = (
        record.column("seconds"),
        record.column("data_seconds"),
        plan.prediction,
    )
    median = float(np.median(seconds)) if len(seconds) else None
    ended = record.ended or RunEnded(
        time=0.0,
        steps=0,
        samples_seen=0,
        seconds=0.0,
        step_seconds=median,
        predicted_peak_bytes=prediction and prediction.peak_bytes,
        measured_peak_bytes=0,
        predicted_step_seconds=prediction and prediction.step_seconds,
        budget_bytes=None,
        finished=False,
        data_seconds=(median or 0.0) - float(np.median(seconds - waited)) if len(seconds) else 0.0,
    )
    over_all_starts = dataclasses.replace(
        ended,
        measured_peak_bytes=_measured_peak(record) or 0,
        budget_bytes=plan.budget_bytes,
        step_seconds=ended.step_seconds or median,
    )
    return comparison_table(compare(over_all_starts))


def _memory_parts(plan: Plan) -> Table:
    parts = figures.memory_parts(plan)
    total = sum(size for _, size in parts)
    return Table(
        [("at the predicted peak", "words"), ("bytes", "number"), ("share", "number")],
        [(kind, format_bytes(size), f"{size / total:.0%}") for kind, size in parts],
    )


def _events(record: Record) -> Table:
    begin = record.others[0].time if record.others else 0.0
    rows = [
        _event_row(event, begin) for event in record.others if not isinstance(event, Rebalanced)
    ]
    hidden = len(rows) - MAX_EVENTS
    if hidden > 0:
        half = MAX_EVENTS // 2
        gap = ("", "", "", f"{format_count(hidden)} more events: see events.jsonl")
        rows = [*rows[:half], gap, *rows[-half:]]
    return Table(
        [("after", "number"), ("step", "number"), ("event", "whole"), ("what happened", "words")],
        rows,
    )


def _event_row(event: Event, begin: float) -> tuple[str, ...]:
    step = getattr(event, "step", None)
    after = event.time - begin
    return (
        format_seconds(after) if after >= 1e-3 else "0 s",
        MISSING if step is None else format_count(step),
        Tag(event.kind.replace("_", " "), severity(event)),
        describe(event),
    )


def _how_it_was_run(record: Record) -> list[tuple[str, str]]:
    """The commands and the environment of the run, so that it can be repeated. Versions are from the
    last start."""
    if not record.starts:
        return []
    ended = f", ended {_moment(record.ended.time)}" if record.ended else ""
    commands = _each_once(start.command for start in record.starts)
    lines = [
        *(("resumed by" if number else "command", one) for number, one in enumerate(commands)),
        ("host", ", ".join(_each_once(start.host for start in record.starts))),
        ("device", ", ".join(_each_once(start.device for start in record.starts))),
        ("date", f"began {_moment(record.starts[0].time)}{ended}"),
        *record.starts[-1].versions.items(),
    ]
    return [(what, how) for what, how in lines if how]


def _each_once(texts: Iterable[str]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text]


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M %Z")
