"""Figures of a ledger: bytes over one step, by kind, and by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from anybatch.report import figures
from anybatch.report.figures import Figure
from anybatch.report.layers import PARTS, rows_of
from anybatch.report.memory import where
from anybatch.units import format_bytes

if TYPE_CHECKING:
    from anybatch.estimate.ledger import Ledger, Moment

_KIND_COLORS = {  # from the bottom of the picture up: what stays, what grows, what comes and goes
    "device context": "--grey",
    "libraries": "--ink-2",
    "libraries' workspaces": "--ink-2",
    "parameters": "--blue",
    "buffers": "--blue-faint",
    "weights in half precision": "--sky",
    "gathered weights and gradients": "--sky",
    "optimizer state": "--violet",
    "gradients": "--teal",
    "input batch": "--teal-faint",
    "activations": "--amber",
    "loss and logits": "--rose",
    "temporary": "--moss",
    "kernels' scratch": "--moss-faint",
}
_PART_COLORS = {
    "parameters": "--blue",
    "gradients": "--teal",
    "optimizer": "--violet",
    "buffers": "--blue-faint",
    "activations": "--amber",
}
_MAX_BARS = 30
_LEAST_SHOWN = 0.002
"""Kinds that never come to this part of the most are drawn together."""

_OTHERS = "other kinds"
_NAME_WIDTH = 0.17
"""Part of the picture that the name of a phase takes on a narrow screen."""


def over_time(ledger: Ledger, budget: int | None) -> Figure:
    """Bytes in use over one step, as areas by kind, and what the process holds as a line above them."""
    moments = ledger.curve or (ledger.peak,)
    top = max(moment.num_bytes for moment in moments)
    scale, unit = figures.byte_scale(max(top, 1))
    xs = [moment.number for moment in moments]
    traces = [
        {
            "mode": "lines",
            "name": kind,
            "stackgroup": "kinds",
            "x": xs,
            "y": [_rounded(size / scale) for size in sizes],
            "fillcolor": color,
            "line": {"width": 0, "color": color, "shape": "hv"},
            "hover": False,
        }
        for kind, sizes, color in _areas(moments, top)
    ]
    traces.append(
        {
            "mode": "lines",
            "name": "held by the process",
            "x": xs,
            "y": [_rounded(moment.num_bytes / scale) for moment in moments],
            "text": [_hover(moment) for moment in moments],
            "line": {"width": 1.5, "color": "--ink", "shape": "hv"},
        }
    )
    peak = ledger.peak
    traces.append(
        {
            "mode": "markers",
            "name": "most in use",
            "x": [peak.number],
            "y": [_rounded(peak.used_bytes / scale)],
            "marker": {"size": 9, "color": "--ink", "line": {"width": 2, "color": "--card"}},
            "hover": False,
        }
    )
    said = (
        f"At most {format_bytes(peak.used_bytes)} in use, at operation {peak.number:,}"
        f" ({where(peak)}), and {format_bytes(top)} held"
    )
    lines = [
        figures.mark("x", moments[begin].number, "--grey", "dot", 1)
        for _, begin, _ in _runs(moments)
        if begin
    ]
    layout: dict[str, Any] = {
        "xaxis": {
            "title": "operations of one step",
            "showgrid": False,
            **_ticks(moments),
        },
        "yaxis": {"title": unit, "rangemode": "tozero"},
        "marks": lines,
    }
    if budget and budget < 4 * top:
        text = f"budget {format_bytes(budget)}"
        lines.append(figures.mark("y", budget / scale, "--red", text=text))
        layout["yaxis"]["range"] = [0, 1.06 * max(top, budget) / scale]
        said += f"; the red line is the budget of {format_bytes(budget)}"
    return Figure(
        "curve", "Memory over one step", f"{said}.", {"data": traces, "layout": layout}, 460
    )


def by_kind(ledger: Ledger) -> Figure:
    """Bytes when most is in use."""
    kinds = sorted(ledger.by_kind.items(), key=lambda item: -item[1])
    scale, unit = figures.byte_scale(max([1, *ledger.by_kind.values()]))
    bar = {
        "type": "bar",
        "y": [kind for kind, size in kinds if size],
        "x": [size / scale for _, size in kinds if size],
        "text": [f"{kind}: {format_bytes(size)}" for kind, size in kinds if size],
        "color": [_KIND_COLORS.get(kind, "--grey") for kind, size in kinds if size],
    }
    layout = {
        "bargap": 0.3,
        "xaxis": {"title": unit, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "showgrid": False},
    }
    largest = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in kinds[:3] if size)
    height = 90 + 26 * len(bar["y"])
    return Figure("kinds", "By kind", f"{largest}.", {"data": [bar], "layout": layout}, height)


def by_layer(ledger: Ledger) -> Figure:
    """The layers, alike ones together, the largest of them if there are many."""
    rows = [row for row in rows_of(ledger, 1) if not row.is_part]
    kept = sorted(rows, key=lambda row: -row.total_bytes)[:_MAX_BARS]
    shown = [row for row in rows if row in kept]
    scale, unit = figures.byte_scale(max([1, *(row.total_bytes for row in shown)]))
    names = [row.name for row in shown]
    bars = [
        {
            "type": "bar",
            "name": title,
            "y": names,
            "x": [row.sizes[i] / scale for row in shown],
            "text": [f"{row.name}, {title}: {format_bytes(row.sizes[i])}" for row in shown],
            "color": _PART_COLORS[title],
        }
        for i, (title, _) in enumerate(PARTS)
        if any(row.sizes[i] for row in shown)
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0.25,
        "xaxis": {"title": unit, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "showgrid": False, "type": "category"},
    }
    few = len(shown) < len(rows)
    alt = (
        f"The {len(shown)} largest of {len(rows)}." if few else "Every layer, alike ones together."
    )
    height = 120 + 24 * len(shown)
    return Figure("layers", "By layer", alt, {"data": bars, "layout": layout}, height)


# ------------------------------------------------------------------------------------- over time


def _areas(moments: Sequence[Moment], top: int) -> Iterator[tuple[str, list[int], str]]:
    """(kind, bytes at each moment, colour), from the bottom to the top."""
    others = [0] * len(moments)
    least = _LEAST_SHOWN * top
    for kind, color in _KIND_COLORS.items():
        sizes = [moment.by_kind.get(kind, 0) for moment in moments]
        if max(sizes) > least:
            yield kind, sizes, color
        else:
            others = [a + b for a, b in zip(others, sizes, strict=True)]
    if max(others) > least:
        yield _OTHERS, others, "--grey"


def _hover(moment: Moment) -> str:
    largest = sorted(moment.by_kind.items(), key=lambda item: -item[1])[:4]
    lines = [
        where(moment),
        f"{format_bytes(moment.used_bytes)} in use, {format_bytes(moment.num_bytes)} held",
        *(f"{kind} {format_bytes(size)}" for kind, size in largest),
    ]
    return "\n".join(lines)


def _runs(moments: Sequence[Moment]) -> Iterator[tuple[str, int, int]]:
    """(phase, begin, end) of each stretch of moments in one phase."""
    begin = 0
    for place in range(1, len(moments) + 1):
        if place == len(moments) or moments[place].phase != moments[begin].phase:
            yield moments[begin].phase, begin, place
            begin = place


def _ticks(moments: Sequence[Moment]) -> dict[str, Any]:
    """The names of the phases below the middle of each, those of the longest where they would meet."""
    first, last = moments[0].number, moments[-1].number
    found: list[tuple[float, float, str]] = []
    for phase, begin, end in _runs(moments):
        low = moments[begin].number
        high = moments[end].number if end < len(moments) else last
        found.append((high - low, (low + high) / 2, phase))
    named: list[tuple[float, str]] = []
    for _, middle, phase in sorted(found, reverse=True):
        if all(abs(middle - other) >= _NAME_WIDTH * (last - first) for other, _ in named):
            named.append((middle, phase))
    return {
        "tickvals": [middle for middle, _ in named],
        "ticktext": [name for _, name in named],
    }


def _rounded(value: float) -> float:
    """What a screen can show of it, so that pages stay small."""
    return float(f"{value:.5g}")
