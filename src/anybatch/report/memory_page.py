"""Pages beside that of a run: a ledger as a page, and the plans of a task, memory against time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anybatch.plans import Plan
from anybatch.report import figures, sheet
from anybatch.report.figures import Figure
from anybatch.report.memory import plain_name
from anybatch.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from anybatch.estimate.ledger import LayerBytes, Ledger, Moment
    from anybatch.planner.knobs import Knob

_PHASE_COLORS = {
    "input": "--grey",
    "forward": "--blue",
    "loss": "--violet",
    "backward": "--teal",
    "update": "--amber",
}
_LAYER_PARTS = (
    ("parameters", "parameter_bytes", "--blue"),
    ("gradients", "gradient_bytes", "--sky"),
    ("optimizer state", "optimizer_bytes", "--violet"),
    ("buffers", "buffer_bytes", "--grey"),
    ("activations", "activation_bytes", "--amber"),
)
_MAX_BARS = 30


@dataclass(frozen=True, slots=True)
class _Table:
    """`columns` are (title, whether numbers stand in it)."""

    columns: Sequence[tuple[str, bool]]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class _Section:
    title: str
    text: str = ""
    figures: Sequence[Figure] = ()
    table: _Table | None = None


def write_ledger(
    path: str | os.PathLike[str], plan: Plan, ledger: Ledger, knobs: Sequence[Knob]
) -> Path:
    """Write `ledger`, made for `plan`, as a page that works offline. Raises `InputError` if it cannot
    be written."""
    peak = ledger.peak
    module = f" of {peak.module}" if peak.module else ""
    budget = f"of {format_bytes(plan.budget_bytes)}" if plan.budget_bytes else ""
    tiles = [
        ("predicted peak", format_bytes(peak.num_bytes), budget),
        ("parameters", format_count(ledger.num_parameters), ""),
        ("activations", format_bytes(ledger.activation_bytes), "when forward ends"),
        ("micro-batch", format_count(ledger.micro_batch), f"of {plan.task.global_batch:,} samples"),
    ]
    sections = [
        _Section(
            "Over one step",
            f"The peak comes in {peak.phase}{module}, at {plain_name(peak.operation)}.",
            [_curve(ledger.curve or (peak,), plan.budget_bytes)],
        ),
        _Section("At the peak, by kind", figures=[_kinds(ledger)], table=_kinds_table(ledger)),
        _Section("By layer", figures=[_layers(ledger)], table=_layers_table(ledger)),
    ]
    if knobs:
        sections.append(_Section("What would shrink it", table=_knobs_table(knobs, peak.num_bytes)))
    facts = [
        plan.device_name or plan.device,
        plan.choice.precision,
        f"recompute {plan.choice.recompute.describe()}",
        ledger.method,
    ]
    return _write(path, f"Memory of {plan.task.name}", facts, tiles, sections)


def write_frontier(path: str | os.PathLike[str], plan: Plan) -> Path:
    """Write what memory buys in time, as a page. Raises `InputError` if it cannot be written."""
    told = plan.prediction
    tiles: list[tuple[str, str, str]] = []
    if told is not None:
        tiles = [
            ("predicted step", format_seconds(told.step_seconds), ""),
            ("predicted peak", format_bytes(told.peak_bytes), ""),
            ("micro-batch", format_count(plan.choice.micro_batch), ""),
        ]
    drawn = [figure for figure in (figures.candidates(plan),) if figure]
    table = _Table(
        [("micro-batch", True), ("recompute", False), ("peak", True), ("step", True)],
        [
            (
                format_count(point.choice.micro_batch),
                point.choice.recompute.describe(),
                format_bytes(point.peak_bytes),
                format_seconds(point.step_seconds),
            )
            for point in plan.frontier
        ],
    )
    text = "Each of these is beaten by no other in both memory and time; the leanest comes first."
    sections = [
        _Section("Memory against time", figures=drawn),
        _Section("The frontier", text, table=table),
        _Section(
            "The plan",
            table=_Table([("", False), ("", False)], [list(line) for line in plan.explain()]),
        ),
    ]
    facts = [plan.device_name or plan.device, plan.choice.precision]
    return _write(path, f"Plans for {plan.task.name}", facts, tiles, sections)


def _write(
    path: str | os.PathLike[str],
    title: str,
    facts: Sequence[str],
    tiles: Sequence[tuple[str, str, str]],
    sections: Sequence[_Section],
) -> Path:
    specs = {figure.id: figure.spec for section in sections for figure in section.figures}
    page = sheet.render(
        "sections.html.jinja",
        title=title,
        facts=[fact for fact in facts if fact],
        tiles=tiles,
        sections=sections,
        specs=specs,
    )
    return sheet.write_whole(path, page, "the page")


# --------------------------------------------------------------------------------------- figures


def _curve(moments: Sequence[Moment], budget: int | None) -> Figure:
    top = max(moment.num_bytes for moment in moments)
    scale, unit = figures.byte_scale(max(top, 1))
    traces: list[dict[str, Any]] = []
    named: set[str] = set()
    for phase, begin, end in _runs(moments):
        # With the first moment of the next, so that no gap is seen.
        shown = moments[begin : end + 1]
        color = _PHASE_COLORS.get(phase, "--grey")
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": figures.escaped(phase),
                "legendgroup": figures.escaped(phase),
                "showlegend": phase not in named,
                "x": [moment.number for moment in shown],
                "y": [moment.num_bytes / scale for moment in shown],
                "text": [_hover(moment) for moment in shown],
                "hovertemplate": "%{text}<extra></extra>",
                "fill": "tozeroy",
                "line": {"width": 1.5, "color": color, "shape": "hv"},
            }
        )
        named.add(phase)
    layout: dict[str, Any] = {
        "hovermode": "closest",
        "xaxis": {"title": {"text": "operation"}, "tickformat": ",d"},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
    }
    said = f"At most {format_bytes(top)}, over {len(moments):,} moments of one step"
    if budget and budget < 4 * top:
        layout["shapes"] = [figures.horizontal(budget / scale, "--red")]
        layout["yaxis"]["range"] = [0, 1.06 * max(top, budget) / scale]
        said += f"; the line is the budget of {format_bytes(budget)}"
    return Figure(
        "curve", "Memory over one step", f"{said}.", {"data": traces, "layout": layout}, 380
    )


def _runs(moments: Sequence[Moment]) -> Iterator[tuple[str, int, int]]:
    """(phase, begin, end) of each stretch of moments in one phase."""
    begin = 0
    for place in range(1, len(moments) + 1):
        if place == len(moments) or moments[place].phase != moments[begin].phase:
            yield moments[begin].phase, begin, place
            begin = place


def _hover(moment: Moment) -> str:
    where = f" in {moment.module}" if moment.module else ""
    return (
        f"{format_bytes(moment.num_bytes)}, {format_bytes(moment.live_bytes)} of it in tensors<br>"
        f"{figures.escaped(plain_name(moment.operation))}{figures.escaped(where)}"
    )


def _kinds(ledger: Ledger) -> Figure:
    kinds = sorted(ledger.by_kind.items(), key=lambda item: -item[1])
    scale, unit = figures.byte_scale(max([1, *ledger.by_kind.values()]))
    bar = {
        "type": "bar",
        "orientation": "h",
        "y": [figures.escaped(kind) for kind, size in kinds if size],
        "x": [size / scale for _, size in kinds if size],
        "text": [format_bytes(size) for _, size in kinds if size],
        "hovertemplate": "%{y}: %{text}<extra></extra>",
        "textposition": "none",
        "marker": {"color": "--blue"},
    }
    layout = {
        "hovermode": "closest",
        "bargap": 0.3,
        "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "showgrid": False, "ticks": ""},
    }
    largest = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in kinds[:3] if size)
    height = 90 + 26 * len(bar["y"])
    return Figure("kinds", "By kind", f"{largest}.", {"data": [bar], "layout": layout}, height)


def _layers(ledger: Ledger) -> Figure:
    shown = _largest(ledger.layers)
    scale, unit = figures.byte_scale(max([1, *(layer.total_bytes for layer in shown)]))
    names = [figures.escaped(layer.name) for layer in shown]
    bars = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": names,
            "x": [getattr(layer, field) / scale for layer in shown],
            "text": [format_bytes(getattr(layer, field)) for layer in shown],
            "hovertemplate": f"%{{y}}, {name}: %{{text}}<extra></extra>",
            "textposition": "none",
            "marker": {"color": color},
        }
        for name, field, color in _LAYER_PARTS
        if any(getattr(layer, field) for layer in shown)
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0.25,
        "hovermode": "closest",
        "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "showgrid": False, "ticks": "", "type": "category"},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
        "margin": {"l": 8, "r": 12, "t": 40, "b": 8},
    }
    few = len(shown) < len(ledger.layers)
    alt = f"The {len(shown)} largest of {len(ledger.layers)} layers." if few else "Every layer."
    height = 120 + 22 * len(shown)
    return Figure("layers", "By layer", alt, {"data": bars, "layout": layout}, height)


def _largest(layers: Sequence[LayerBytes]) -> list[LayerBytes]:
    """The largest, in order of definition."""
    chosen = sorted(range(len(layers)), key=lambda i: -layers[i].total_bytes)[:_MAX_BARS]
    return [layers[i] for i in sorted(chosen)]


# ---------------------------------------------------------------------------------------- tables


def _kinds_table(ledger: Ledger) -> _Table:
    total = max(1, ledger.peak.num_bytes)
    rows = [
        (kind, format_bytes(size), f"{size / total:.0%}")
        for kind, size in sorted(ledger.by_kind.items(), key=lambda item: -item[1])
        if size
    ]
    return _Table([("kind", False), ("bytes", True), ("share", True)], rows)


def _layers_table(ledger: Ledger) -> _Table:
    columns = [("layer", False), ("type", False), ("output", False), ("numbers", True)]
    columns += [(name, True) for name, _, _ in _LAYER_PARTS] + [("all", True)]
    rows = [
        [
            layer.name,
            layer.type_name,
            " × ".join(map(str, layer.output_shape)) if layer.output_shape else "",
            format_count(layer.num_parameters) if layer.num_parameters else "",
            *(_or_empty(getattr(layer, field)) for _, field, _ in _LAYER_PARTS),
            format_bytes(layer.total_bytes),
        ]
        for layer in ledger.layers
    ]
    return _Table(columns, rows)


def _knobs_table(knobs: Sequence[Knob], peak_bytes: int) -> _Table:
    columns = [("one change", False), ("peak", True), ("frees", True), ("step", True), ("", False)]
    rows = [
        (
            knob.what,
            format_bytes(knob.peak_bytes),
            f"{1 - knob.peak_bytes / max(1, peak_bytes):.0%}",
            format_seconds(knob.step_seconds),
            knob.remark,
        )
        for knob in knobs
    ]
    return _Table(columns, rows)


def _or_empty(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else ""
