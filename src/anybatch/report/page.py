"""The report of a run: one HTML page that works offline, generated from the run folder alone.

Figures are embedded, and the page's content security policy forbids it to load external resources, so
a report sent by mail looks the same years later and does not reveal that it was opened.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from anybatch.events import Event, Rebalanced, RunEnded
from anybatch.insight.noise_series import Block, in_unit_of_batch
from anybatch.insight.noise_text import lines, mean_batch, unmeasured
from anybatch.plans import Plan
from anybatch.process.files import write_whole
from anybatch.report import figures
from anybatch.report.log import iterate
from anybatch.report.plot import Figure, draw
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
from anybatch.report.tables import Content, Table
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
    record = Record.of(iterate(run / "events.jsonl"))
    page = _page(plan, record)
    return write_whole(run / "report.html", page, "the report")


def render(template: str, figures: Iterable[Figure], **values: Any) -> str:
    """Render a template of this package with `values`. The page's script reads `figures`."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    specs = {figure.id: dataclasses.asdict(figure) for figure in figures}
    return environment.get_template(template).render(draw=draw, specs=specs, **values)


def _read(name: str) -> str:
    return resources.files(__package__ or "anybatch.report").joinpath(name).read_text("utf-8")


def _page(plan: Plan, record: Record) -> str:
    noise = record.noise()
    drawn = _figures(plan, record, noise)
    return render(
        "page.html.jinja",
        [figure for group in drawn.values() for figure in group],
        header=_header(plan, record),
        tiles=_tiles(plan, record),
        plan=plan.explain(),
        notices=_notices(plan, record),
        memory_parts=_memory_parts(plan),
        comparisons=_comparisons(plan, record),
        method=plan.prediction.method if plan.prediction else "",
        drawn=drawn,
        evaluated=bool(record.evaluations),
        batch=lines(plan, noise),
        unmeasured=unmeasured(plan, record.num_steps),
        events=_events(record),
        rejected=_rejected(plan),
        commands=_each_once(start.command for start in record.starts),
        how=_how_it_was_run(record),
    )


def _figures(plan: Plan, record: Record, noise: Sequence[Block]) -> dict[str, list[Figure]]:
    memory = figures.memory(plan, _measured_peak(record))
    loss = figures.loss(record)
    candidates = figures.candidates(plan)
    on_average = " on average" if plan.task.batch_rule else ""
    size = mean_batch(plan, in_unit_of_batch(noise)[0])
    scale = figures.noise_scale(noise, size, on_average)
    return {
        "memory": [memory] if memory else [],
        "loss": [loss] if loss else [],
        "metrics": figures.metrics(record),
        "speed": [*figures.speed(record), *figures.optimisation(record)],
        "noise": [scale] if scale else [],
        "candidates": [candidates] if candidates else [],
    }


# ------------------------------------------------------------------------------------- the header


def _header(plan: Plan, record: Record) -> dict[str, str]:
    ended = record.ended
    if ended is None:
        state, outcome = "warn", "no end recorded: the run was killed, or is still going"
    elif ended.finished:
        state, outcome = "good", "finished"
    else:
        state, outcome = "warn", f"stopped early: {ended.reason or 'no reason given'}"
    started = record.starts[0] if record.starts else None
    resumed = len(record.starts) - 1
    times = "" if resumed < 1 else "resumed once" if resumed == 1 else f"resumed {resumed:,} times"
    return {
        "task": str(started.task if started else plan.task.name),
        "device": str(started.device if started else plan.device_name or plan.device),
        "began": _moment(started.time) if started else "",
        "resumed": times,
        "state": state,
        "outcome": outcome,
    }


def _tiles(plan: Plan, record: Record) -> list[tuple[str, str, str]]:
    """The key figures of the run, as (label, figure, remark)."""
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
    of_total = "" if total is None else f"of {format_count(total)}"
    tiles.append(("steps", format_count(_last_step(record)), of_total))
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


def _last_step(record: Record) -> int:
    if record.num_steps:
        return int(record.column("step")[-1])
    return record.ended.steps if record.ended else 0


def _notices(plan: Plan, record: Record) -> list[str]:
    told = [*plan.notices, *(notice for start in record.starts for notice in start.notices)]
    return list(dict.fromkeys(told))


# ------------------------------------------------------------------------------------- the tables


def _measured_peak(record: Record) -> int | None:
    steps = [int(record.column("memory_bytes").max())] if record.num_steps else []
    return max([*steps, *(end.measured_peak_bytes for end in record.ends)], default=None)


def _comparisons(plan: Plan, record: Record) -> Table:
    seconds, waited, told = record.column("seconds"), record.column("data_seconds"), plan.prediction
    median = float(np.median(seconds)) if len(seconds) else None
    ended = record.ended or RunEnded(
        time=0.0,
        steps=record.num_steps,
        samples_seen=0,
        seconds=record.seconds,
        step_seconds=None,
        predicted_peak_bytes=None,
        measured_peak_bytes=0,
        predicted_step_seconds=None,
        budget_bytes=None,
        finished=False,
        data_seconds=(median or 0.0) - float(np.median(seconds - waited)) if len(seconds) else 0.0,
    )
    rows = compare(
        dataclasses.replace(
            ended,
            predicted_peak_bytes=ended.predicted_peak_bytes or (told.peak_bytes if told else None),
            measured_peak_bytes=_measured_peak(record) or 0,
            budget_bytes=plan.budget_bytes,
            predicted_step_seconds=ended.predicted_step_seconds
            or (told.step_seconds if told else None),
            step_seconds=ended.step_seconds or median,
        )
    )
    return comparison_table(rows)


def _memory_parts(plan: Plan) -> list[tuple[str, str, str, str]]:
    parts = figures.memory_parts(plan)
    total = sum(size for _, size, _ in parts)
    return [(kind, format_bytes(size), f"{size / total:.0%}", color) for kind, size, color in parts]


def _events(record: Record) -> dict[str, Any]:
    begin = record.others[0].time if record.others else 0.0
    shown = [event for event in record.others if not isinstance(event, Rebalanced)]
    hidden = len(shown) - MAX_EVENTS
    half = MAX_EVENTS // 2
    head, tail = (shown, []) if hidden <= 0 else (shown[:half], shown[-half:])
    return {
        "head": [_event_row(event, begin) for event in head],
        "hidden": format_count(hidden) if hidden > 0 else "",
        "tail": [_event_row(event, begin) for event in tail],
    }


def _event_row(event: Event, begin: float) -> dict[str, str]:
    step = getattr(event, "step", None)
    return {
        "after": format_seconds(after) if (after := event.time - begin) >= 1e-3 else "0 s",
        "step": MISSING if step is None else format_count(step),
        "label": event.kind.replace("_", " "),
        "state": severity(event),
        "sentence": describe(event),
    }


def _rejected(plan: Plan) -> Table:
    columns: list[tuple[str, Content]] = [
        ("micro-batch", "number"),
        ("precision", "words"),
        ("recompute", "words"),
        ("predicted peak", "number"),
        ("predicted step", "number"),
        ("reason", "words"),
    ]
    cells = [
        (
            format_count(candidate.choice.micro_batch),
            candidate.choice.precision,
            candidate.choice.recompute.describe()
            + (", loss in chunks" if candidate.choice.chunked_head else ""),
            "" if candidate.peak_bytes is None else format_bytes(candidate.peak_bytes),
            format_seconds(candidate.step_seconds),
            candidate.reason,
        )
        for candidate in plan.rejected
    ]
    return Table(columns, cells)


def _how_it_was_run(record: Record) -> list[tuple[str, str]]:
    """The environment of the run as (what, how) lines, shown with the command so that the run can be
    repeated. Versions are from the last start."""
    if not record.starts:
        return []
    ended = f", ended {_moment(record.ended.time)}" if record.ended else ""
    lines = [
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
